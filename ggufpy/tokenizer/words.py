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


class Words(dict[str, tuple[int, ...]]):
    """Remember the ids of the words met, for as long as they are few and short."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._encode = WeakMethod(encode)  # weak: who encodes holds this

    def __missing__(self, word: str) -> tuple[int, ...]:
        encode = self._encode()
        assert encode is not None
        ids = encode(word)
        if len(word) <= _MAX_LENGTH:
            if len(self) >= _MAX_CACHED:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of all the words, one after the other."""
        return list(chain.from_iterable(map(self.__getitem__, words)))
