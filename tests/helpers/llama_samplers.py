"""Runs llama.cpp's own samplers through llama-cpp-python's low-level interface. Knows nothing of ggufpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

__all__ = ["LlamaChain", "bias", "breakers"]

_DATA = [("id", np.int32), ("logit", np.float32), ("p", np.float32)]


class LlamaChain:
    """A chain of samplers, each given by its name (`top_k` for llama_sampler_init_top_k) and its arguments."""

    def __init__(self, *samplers: tuple[Any, ...]) -> None:
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for name, *arguments in samplers:
            sampler = getattr(llama_cpp, f"llama_sampler_init_{name}")(*arguments)
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def __enter__(self) -> LlamaChain:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_sampler_free(self._chain)

    def accept(self, tokens: Sequence[int]) -> None:
        """Show tokens to the chain, as a prompt's are shown."""
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def apply(self, logits: np.ndarray) -> tuple[list[int], np.ndarray, int]:
        """Apply the chain to a row; return the ids and logits left, in order, and the place that is selected or -1."""
        data = np.zeros(logits.size, _DATA)
        data["id"], data["logit"] = np.arange(logits.size), logits
        array = llama_cpp.llama_token_data_array(
            data=data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)),
            size=logits.size, selected=-1, sorted=False,
        )  # fmt: skip
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        # XTC moves the pointer on instead of the data.
        skipped = (ctypes.cast(array.data, ctypes.c_void_p).value - data.ctypes.data) // data.itemsize
        left = data[skipped : skipped + array.size]
        return left["id"].tolist(), left["logit"].copy(), array.selected

    def choose(self, logits: np.ndarray) -> int:
        """Apply the chain to a row, accept the token it selects and return it."""
        ids, _, selected = self.apply(logits)
        self.accept([ids[selected]])
        return ids[selected]


def bias(biases: dict[int, float]) -> tuple[int, Any]:
    """Return the last arguments of `logit_bias`."""
    array = (llama_cpp.llama_logit_bias * max(1, len(biases)))()
    for place, (token, value) in enumerate(biases.items()):
        array[place].token, array[place].bias = token, value
    return len(biases), array


def breakers(strings: Sequence[str]) -> tuple[Any, int]:
    """Return the last arguments of `dry`."""
    return (ctypes.c_char_p * max(1, len(strings)))(*(string.encode() for string in strings)), len(strings)
