"""Parts of a text that come again and again: their token ids are remembered.

Owns: the memory. Does not own: how a text is cut into words, or what a word becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from weakref import WeakMethod

__all__ = ["Words"]

_MAX_CACHED = 1 << 16
_MAX_LENGTH = 64  # characters; longer words hardly come twice
_MANY = 2000  # characters of new words; from here on, preparing to encode many words at once pays
_SOME = 16  # characters; fewer are encoded word by word all the same


class Words(dict[str, tuple[int, ...]]):
    """Remember the ids of the words met, for as long as they are few and short.

    `encode_word` gives the ids of one word, `encode_many` those of many, or None when it has no quicker way.
    """

    def __init__(
        self,
        encode_word: Callable[[str], tuple[int, ...]],
        encode_many: Callable[[list[str]], list[tuple[int, ...]] | None],
    ) -> None:
        super().__init__()
        self._encode_word = WeakMethod(encode_word)  # weak: who encodes holds this
        self._encode_many = WeakMethod(encode_many)
        self._n_met = 0  # characters in words that were new

    def __missing__(self, word: str) -> tuple[int, ...]:
        encode_word = self._encode_word()
        assert encode_word is not None
        ids = encode_word(word)
        if len(word) <= _MAX_LENGTH:
            if len(self) >= _MAX_CACHED:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of all the words, one after the other."""
        words = list(words)
        new = [word for word in set(words) if word not in self]
        n_new = sum(map(len, new))
        self._n_met += n_new
        learnt = n_new >= _SOME and self._n_met >= _MANY and self._learn(new)
        ids = list(chain.from_iterable(map(self.__getitem__, words)))
        if learnt:
            self._forget(new)
        return ids

    def _learn(self, words: list[str]) -> bool:
        encode_many = self._encode_many()
        assert encode_many is not None
        ids = encode_many(words)
        if ids is None:
            return False
        self.update(zip(words, ids, strict=True))
        return True

    def _forget(self, words: list[str]) -> None:
        """Keep to the limits again."""
        if len(self) > _MAX_CACHED:
            self.clear()
        for word in words:
            if len(word) > _MAX_LENGTH:
                self.pop(word, None)
