"""RWKV's vocabulary (`tokenizer.ggml.model` = "rwkv"): the longest token from the left, over bytes.

Owns: how the tokens' bytes are written in the file. Does not own: the search (`longest.py`), special tokens
(`tokenizer.py`).
"""

from __future__ import annotations

import re

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer import native
from ggufpy.tokenizer.longest import Longest
from ggufpy.tokenizer.vocab import Vocabulary

__all__ = ["RWKV", "unescaped"]

_ESCAPE = re.compile(rb"((?:\\x[0-9a-f]{2})+)|\\(?:x(..)|x.?$|(.)|$)", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class RWKV:
    """Encode text by the longest token at each place (llama.cpp's llm_tokenizer_rwkv)."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._unknown = vocab.given_ids.get("unk")
        tokens = list(map(unescaped, vocab.texts))
        self._has_all_bytes = {bytes([byte]) for byte in range(256)} <= set(tokens)
        self._longest = (native.LongestTokens if native.available() else Longest)(tokens)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens. Raises TokenizerError for a byte that begins no token."""
        ids = self._longest.encode(text.encode("utf-8", "surrogateescape"))
        if self._has_all_bytes or -1 not in ids:
            return ids
        if self._unknown is None:
            raise TokenizerError("the text has a byte that begins no token, and there is none for the unknown")
        return [self._unknown if id < 0 else id for id in ids]

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        return [char.encode("utf-8", "surrogateescape") for char in text]


def unescaped(token: bytes) -> bytes:
    """Return the bytes that a token stands for: `\\xNN`, `\\t`, `\\n`, `\\r`, and `\\` before any other for itself."""
    return _ESCAPE.sub(_unescape, token) if b"\\" in token else token


def _unescape(found: re.Match[bytes]) -> bytes:
    if found[1]:
        return bytes.fromhex(found[1].replace(b"\\x", b"").decode())
    if found[2]:  # no such digits; llama.cpp reckons all the same
        high, low = (digit - 87 if digit >= 97 else digit - 48 for digit in found[2])
        return bytes([(high * 16 + low) & 0xFF])
    char = found[3] or b""
    return _ESCAPED.get(char, char)
