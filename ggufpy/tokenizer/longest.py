"""The longest token from the left, again and again.

Owns: the search. Does not own: what is searched (`wordpiece.py`, `rwkv.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Longest"]


class Longest:
    """Cut bytes into the longest tokens."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._id_of = dict(zip(tokens, range(len(tokens)), strict=True))
        lengths: dict[bytes, set[int]] = {}  # of the tokens that begin with two bytes
        for token in tokens:
            lengths.setdefault(token[:2], {1}).add(len(token))
        self._lengths = {start: sorted(some, reverse=True) for start, some in lengths.items()}

    def encode(self, text: bytes) -> list[int]:
        """Return the ids, -1 for a byte that begins no token."""
        ids, at = [], 0
        while at < len(text):
            id, length = self._longest(text, at)
            ids.append(id)
            at += length
        return ids

    def _longest(self, text: bytes, at: int) -> tuple[int, int]:
        for length in self._lengths.get(text[at : at + 2], (1,)):
            id = self._id_of.get(text[at : at + length])
            if id is not None and at + length <= len(text):
                return id, length
        return -1, 1
