"""Unigram vocabularies (`tokenizer.ggml.model` = "t5"): the likeliest of all ways to cut the text.

Owns: the tokens' scores, and how spaces are written. Does not own: normalization (`charsmap.py`), the search for the
best cut (`lattice.py`), special tokens and the order of things in a text (`tokenizer.py`).
"""

from __future__ import annotations

from array import array

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer.charsmap import CharacterMap
from ggufpy.tokenizer.lattice import Lattice
from ggufpy.tokenizer.spm import SPACE
from ggufpy.tokenizer.vocab import TokenAttr, Vocabulary

__all__ = ["Unigram"]

_UNKNOWN_PENALTY = 10.0
_MATCHED = TokenAttr.NORMAL | TokenAttr.USER_DEFINED | TokenAttr.UNUSED
_SPACE = SPACE.encode()


class Unigram:
    """Encode text by the sum of its tokens' scores (llama.cpp's llm_tokenizer_ugm)."""

    def __init__(self, vocab: Vocabulary) -> None:
        attrs, texts = vocab.attrs, vocab.texts
        named = {id for id, attr in enumerate(attrs) if attr & TokenAttr.USER_DEFINED}
        normal = [score for score, attr in zip(vocab.scores, attrs, strict=True) if attr & TokenAttr.NORMAL]
        worst = array("f", [min(normal, default=0.0) - _UNKNOWN_PENALTY])[0]
        tokens = {texts[id]: id for id, attr in enumerate(attrs) if attr & _MATCHED}
        scores = [0.0 if id in named else score for id, score in enumerate(vocab.scores)]
        self._lattice = Lattice(tokens, scores, unknown=worst)
        self._map = CharacterMap(vocab.charsmap, [texts[id] for id in sorted(named)])
        self._unknown = vocab.given_ids.get("unk")
        self._merges_spaces = vocab.remove_extra_whitespaces
        self._prefixes = vocab.add_space_prefix

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens. Unknown characters in a row are one unknown token."""
        ids: list[int] = []
        for _, id in self._lattice.best(self._spaced(self._map.normalize(text))):
            id = self._unknown_id() if id < 0 else id
            if not (ids and ids[-1] == id == self._unknown):
                ids.append(id)
        return ids

    def _unknown_id(self) -> int:
        if self._unknown is None:
            raise TokenizerError("the text has a character that is no token, and there is none for the unknown")
        return self._unknown

    def _spaced(self, text: bytes) -> bytes:
        """Write spaces as the tokens do: one before each word, or as they are and one before the first word."""
        words = text.split(b" ")
        if self._merges_spaces:
            return b"".join(_SPACE + word for word in words if word)
        if self._prefixes and (first := next((i for i, word in enumerate(words) if word), None)) is not None:
            words[first] = _SPACE + words[first]
        return _SPACE.join(words)
