"""Qwen: rotation by halves, with biases of the queries, keys and values or, since Qwen 3, with norms instead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.decoder import IMROPE, MROPE, NEOX, Decoder, Has, Presence
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Qwen", "Qwen2", "Qwen2VL", "Qwen3", "Qwen3TTS", "Qwen3VL"]

N_VOCAB_TALKER = 3072


class Qwen(Decoder):
    """Qwen 1: one matrix for q, k and v; `feed_forward_length` counts gate and up together."""

    name = "qwen"
    grouped = False
    partial_rope = True
    tie = False
    rope = NEOX
    qkv_fused = True
    qkv_bias = True
    tiny = {"n_head_kv": 4}

    def adjust(self) -> Config:
        return replace(self.c, n_ff=tuple(n // 2 for n in self.c.n_ff))


class Qwen2(Decoder):
    """Qwen 2 and 2.5: biases of q, k and v, and of the output matrix where the file has one."""

    name = "qwen2"
    rope = NEOX
    head_bias: ClassVar[Presence] = None


class Qwen2VL(Qwen2):
    """Qwen 2 VL and 2.5 VL, the text part: rotation by time, height and width.

    llama.cpp reads neither this architecture's epsilon, which is 0 then, nor a bias of the output matrix.
    """

    name = "qwen2vl"
    keys = {"rope_sections": REQUIRED, "norm_rms_eps": 0.0}
    ignored = ("output.bias",)
    rope = MROPE
    head_bias = False

    def adjust(self) -> Config:
        return replace(self.c, norm_rms_eps=0.0)


class Qwen3(Decoder):
    """Qwen 3: each head's queries and keys are normalized."""

    name = "qwen3"
    ignored = ("cls.output.weight",)
    rope = NEOX
    qk_norm = "head"
    ffn_scale: ClassVar[bool] = True


class Qwen3VL(Qwen3):
    """Qwen 3 VL, the text part: rotation by time, height and width, interleaved."""

    name = "qwen3vl"
    keys = {"rope_sections": REQUIRED}
    rope = IMROPE
    ffn_scale = False


class Qwen3TTS(Qwen3VL):
    """Qwen 3 TTS, the talker: an output matrix of its own knows only the last tokens, those of sound."""

    name = "qwen3tts"
    tiny = {"n_vocab": N_VOCAB_TALKER + 64}

    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.c.n_vocab < N_VOCAB_TALKER:
            yield f"tokenizer.ggml.tokens: expected {N_VOCAB_TALKER} or more, found {self.c.n_vocab}"

    def tensors(self, has: Has = ()) -> Iterator[TensorSpec]:
        for spec in super().tensors(has):
            yield replace(spec, shape=(self.c.n_embd, N_VOCAB_TALKER)) if spec.name == "output.weight" else spec

    def head(self, x: Tensor) -> Tensor:
        g, y = self.g, super().head(x)
        n_silent = self.c.n_vocab - y.ne[0]
        if not n_silent:
            return y
        none = g.scale_bias(g.view_1d(self.w["output_norm.weight"], 1, 0), 0.0, -math.inf)
        return g.concat(g.repeat_4d(none, n_silent, y.ne[1], 1, 1), y, 0)
