"""RWKV's vocabulary (`tokenizer.ggml.model` = "rwkv"): the longest token from the left, over bytes.

Owns: the search for tokens, and how their bytes are written in the file. Does not own: special tokens (`tokenizer.py`).
"""

from __future__ import annotations

import re

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer.vocab import Vocabulary

__all__ = ["LongestMatch", "unescaped"]

_ESCAPE = re.compile(rb"\\(?:x(..)|x.?$|(.)|$)", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class LongestMatch:
    """Encode text by the longest token at each place (llama.cpp's llm_tokenizer_rwkv)."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._unknown = vocab.given_ids.get("unk")
        self._id_of = {unescaped(token): id for id, token in enumerate(vocab.texts)}
        lengths: dict[bytes, set[int]] = {}  # of the tokens that begin with two bytes
        for token in self._id_of:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(some, reverse=True) for start, some in lengths.items()}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        data, at, ids = text.encode("utf-8", "surrogateescape"), 0, []
        while at < len(data):
            for length in (*self._lengths.get(data[at : at + 2], ()), 1):
                if (id := self._id_of.get(data[at : at + length])) is not None and at + length <= len(data):
                    break
            else:
                id, length = self._unknown_id(data[at]), 1
            ids.append(id)
            at += length
        return ids

    def _unknown_id(self, byte: int) -> int:
        if self._unknown is None:
            raise TokenizerError(f"no token begins with the byte 0x{byte:02X}, and there is none for the unknown")
        return self._unknown


def unescaped(token: bytes) -> bytes:
    """Return the bytes that a token stands for: `\\xNN`, `\\t`, `\\n`, `\\r`, and `\\` before any other for itself."""
    return _ESCAPE.sub(_unescape, token) if b"\\" in token else token


def _unescape(found: re.Match[bytes]) -> bytes:
    if found[1]:
        high, low = (digit - 87 if digit >= 97 else digit - 48 for digit in found[1])
        return bytes([(high * 16 + low) & 0xFF])
    char = found[2] or b""
    return _ESCAPED.get(char, char)
