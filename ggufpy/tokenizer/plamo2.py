"""PLaMo-2's vocabulary (`tokenizer.ggml.model` = "plamo2"): the best of all ways to cut the text, found from its end.

Owns: the tokens' scores and the bytes for what is no token. Does not own: the search for the best cut (`lattice.py`),
special tokens (`tokenizer.py`).
"""

from __future__ import annotations

import math

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer.lattice import Lattice
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
        tokens = {id: vocab.texts[id] for id, attr in enumerate(vocab.attrs) if not attr & TokenAttr.BYTE}
        scores = list(map(_score, vocab.scores))
        usable = {_reversed(text): id for id, text in tokens.items() if scores[id] > _INVALID}
        # Of equally good cuts llama.cpp takes the one that is longer where it starts, and it starts at the end.
        self._lattice = Lattice(usable, scores, unknown=_UNKNOWN, always_unknown=True)
        bytes_ = {int(text[3:5], 16): id for id, text in enumerate(vocab.texts) if id not in tokens}
        if missing := [byte for byte in range(256) if byte not in bytes_]:
            raise TokenizerError(f"tokenizer.ggml.tokens: there is no token for the byte 0x{missing[0]:02X}")
        self._bytes = bytes_

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        data = _encoded(relaxed(text).removeprefix(_BYTE_ORDER_MARK)[::-1])
        ids, start = [], 0
        for end, id in self._lattice.best(data):
            ids.append([id] if id >= 0 else [self._bytes[byte] for byte in data[start:end]])
            start = end
        return [id for part in reversed(ids) for id in part]


def _score(score: float) -> float:
    """Round to a whole number of ten thousandths, halves away from zero."""
    return math.copysign(math.floor(abs(score) * 1e4 + 0.5), score) if math.isfinite(score) else _INVALID


def _reversed(text: bytes) -> bytes:
    return _encoded(text.decode("utf-8", "surrogateescape")[::-1])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
