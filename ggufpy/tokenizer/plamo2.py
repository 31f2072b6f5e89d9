"""PLaMo-2's vocabulary (`tokenizer.ggml.model` = "plamo2"): the best of all ways to cut the text, found from its end.

Owns: the tokens' scores and the bytes for what is no token. Does not own: the search for the best cut (`lattice.py`),
special tokens (`tokenizer.py`).
"""

from __future__ import annotations

import math

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer import native
from ggufpy.tokenizer.lattice import Lattice
from ggufpy.tokenizer.offsets import utf8_of_each
from ggufpy.tokenizer.utf8 import relaxed
from ggufpy.tokenizer.vocab import TokenAttr, Vocabulary

__all__ = ["Plamo2"]

_UNKNOWN = -10_000_000.0
_INVALID = -20_000_000.0
_BYTE_ORDER_MARK = "\ufeff"


class Plamo2:
    """Encode text by the sum of its tokens' scores (llama.cpp's llm_tokenizer_plamo2)."""

    def __init__(self, vocab: Vocabulary) -> None:
        """Prepare the search. Raises TokenizerError when one of the 256 byte tokens is missing."""
        scores = list(map(_score, vocab.scores))
        byte_of = {id: int(vocab.texts[id][3:5], 16) for id, attr in vocab.unusual.items() if attr & TokenAttr.BYTE}
        # Of equally good cuts llama.cpp takes the one that is longer where it starts, and it starts at the end.
        tokens = [_reversed(text) if score > _INVALID else b"" for text, score in zip(vocab.texts, scores, strict=True)]
        for id in byte_of:
            tokens[id] = b""
        ids = {byte: id for id, byte in byte_of.items()}
        if missing := [byte for byte in range(256) if byte not in ids]:
            raise TokenizerError(f"tokenizer.ggml.tokens: there is no token for the byte 0x{missing[0]:02X}")
        search = native.BestPath if native.available() else Lattice
        self._lattice = search(tokens, scores, cost=_UNKNOWN, byte_ids=[ids[byte] for byte in range(256)])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return self._lattice.backwards(_encoded(relaxed(text).removeprefix(_BYTE_ORDER_MARK)[::-1]))

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        return utf8_of_each(text)


def _score(score: float) -> float:
    """Round to a whole number of ten thousandths, halves away from zero."""
    return math.copysign(math.floor(abs(score) * 1e4 + 0.5), score) if math.isfinite(score) else _INVALID


def _reversed(text: bytes) -> bytes:
    return _encoded(text.decode("utf-8", "surrogateescape")[::-1])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
