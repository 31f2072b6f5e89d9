"""Asks llama.cpp, through llama-cpp-python, what it makes of a vocabulary. Knows nothing of ggufpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

__all__ = ["LlamaVocabulary"]


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    pass


class LlamaVocabulary:
    """Loads the vocabulary of a GGUF file and nothing else of it."""

    def __init__(self, path: str | Path) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def close(self) -> None:
        """Free it."""
        llama_cpp.llama_model_free(self._model)

    def facts(self) -> dict[str, Any]:
        """Give what is not about text: the size, special ids, flags and the tokens that end generation."""
        size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        ids = {"bos": llama_cpp.llama_vocab_bos(self._vocab), "eos": llama_cpp.llama_vocab_eos(self._vocab)}
        return {
            **{role: None if id < 0 else id for role, id in ids.items()},
            "size": size,
            "add_bos": llama_cpp.llama_vocab_get_add_bos(self._vocab),
            "add_eos": llama_cpp.llama_vocab_get_add_eos(self._vocab),
            "eog": {id for id in range(size) if llama_cpp.llama_vocab_is_eog(self._vocab, id)},
        }

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Call llama_tokenize."""
        data = text.encode() if isinstance(text, str) else text
        ids = (llama_cpp.llama_token * (3 * len(data) + 8))()  # a bad byte can become three tokens
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return list(ids[:n])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> bytes:
        """Call llama_detokenize."""
        given = (llama_cpp.llama_token * max(1, len(ids)))(*ids)
        buffer = ctypes.create_string_buffer(64)
        for _ in range(2):
            n = llama_cpp.llama_detokenize(
                self._vocab, given, len(ids), buffer, len(buffer), False, not skip_special_tokens
            )
            if n >= 0:
                break
            buffer = ctypes.create_string_buffer(-n)
        return buffer.raw[:n]

    def piece(self, id: int) -> bytes:
        """Call llama_token_to_piece, special tokens shown."""
        buffer = ctypes.create_string_buffer(1 << 16)
        n = llama_cpp.llama_token_to_piece(self._vocab, id, buffer, len(buffer), 0, True)
        return buffer.raw[:n]
