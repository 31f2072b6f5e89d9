"""Unigram vocabularies (`tokenizer.ggml.model` = "t5"): the likeliest of all ways to cut the text.

Owns: the tokens' scores, and how spaces are written. Does not own: normalization (`charsmap.py`), the search for the
best cut (`lattice.py`), special tokens and the order of things in a text (`tokenizer.py`).
"""

from __future__ import annotations

import math
import re
from array import array

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer import native
from ggufpy.tokenizer.charsmap import CharacterMap
from ggufpy.tokenizer.lattice import Lattice
from ggufpy.tokenizer.spm import SPACE
from ggufpy.tokenizer.vocab import TokenAttr, Vocabulary

__all__ = ["Unigram"]

_UNKNOWN_PENALTY = 10.0
_MATCHED = TokenAttr.NORMAL | TokenAttr.USER_DEFINED | TokenAttr.UNUSED
_SPACE = SPACE.encode()
_SPACES = re.compile(b"  +")


class Unigram:
    """Encode text by the sum of its tokens' scores (llama.cpp's llm_tokenizer_ugm)."""

    def __init__(self, vocab: Vocabulary) -> None:
        tokens, scores, best = list(vocab.texts), list(vocab.scores), list(vocab.scores)
        named = []
        for id, attr in vocab.unusual.items():
            if not attr & TokenAttr.NORMAL:
                best[id] = math.inf
            if attr & TokenAttr.USER_DEFINED:
                scores[id] = 0.0
                named.append(tokens[id])
            if not attr & _MATCHED:
                tokens[id] = b""
        # Plain spaces are shorter than what stands for them. A token with one is never found: no text has any then.
        tokens = [b"" if b" " in token else token.replace(_SPACE, b" ") for token in tokens]
        worst = min(best)
        cost = array("f", [(worst if worst < math.inf else 0.0) - _UNKNOWN_PENALTY])[0]
        search = native.BestPath if native.available() else Lattice
        self._lattice = search(tokens, scores, cost=cost, unknown=vocab.given_ids.get("unk", -1))
        self._map = CharacterMap(vocab.charsmap, named)
        self._merges_spaces = vocab.remove_extra_whitespaces
        self._prefixes = vocab.add_space_prefix

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens. Unknown characters in a row are one unknown token."""
        ids = self._lattice.backwards(self._spaced(self._map.normalize(text)))[::-1]
        if -1 in ids:
            raise TokenizerError("the text has a character that is no token, and there is none for the unknown")
        return ids

    def seen(self, text: str) -> list[bytes | None]:
        """Return what becomes of each character."""
        return [part and part.replace(_SPACE, b" ") for part in self._map.normalized_characters(text)]

    def _spaced(self, text: bytes) -> bytes:
        """Put one space before each word, in place of all others, or leave them and put one before the first word.

        U+2581, which stands for a space in the tokens, is one from then on.
        """
        first = len(text) - len(text.lstrip(b" "))
        if self._merges_spaces:
            text = _SPACES.sub(b" ", text.strip(b" "))
            text = b" " + text if text else b""
        elif self._prefixes and first < len(text):
            text = text[:first] + b" " + text[first:]
        return text.replace(_SPACE, b" ")
