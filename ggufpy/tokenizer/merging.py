"""Merging neighbouring symbols until none can be merged: what all byte-pair encodings have in common.

Owns: the order of merges. Does not own: what the symbols and the ranks are (`bpe.py`, `spm.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

__all__ = ["Merger"]

_LONG = 64  # symbols; beyond, looking for the smallest rank again after each merge costs more than keeping order


class Merger:
    """Merge pairs by rank: the lowest first, the leftmost of equal ones.

    The rank of a pair is `ranks[places[left + between + right]]`; a pair that `places` does not know stays apart.
    `ranks` has one more entry at its end, greater than all others.
    """

    def __init__(self, places: Mapping[bytes, int], ranks: Sequence[float], between: bytes = b"") -> None:
        self._places = places
        self._ranks = ranks
        self._between = between
        self._never = ranks[-1]

    def merge(self, symbols: list[bytes]) -> list[bytes]:
        """Return what is left of the symbols; changes `symbols`."""
        return self._merge(symbols) if len(symbols) <= _LONG else self._merge_long(symbols)

    def _pair_ranks(self, symbols: list[bytes]) -> list[float]:
        ranks, place_of, between = self._ranks, self._places.get, self._between
        return [ranks[place_of(left + between + right, -1)] for left, right in pairwise(symbols)]

    def _merge(self, symbols: list[bytes]) -> list[bytes]:
        ranks, place_of, between, never = self._ranks, self._places.get, self._between, self._never
        pairs = self._pair_ranks(symbols)
        while pairs:
            best = min(pairs)
            if best == never:
                break
            i = pairs.index(best)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            del pairs[i]
            if i < len(pairs):
                pairs[i] = ranks[place_of(symbols[i] + between + symbols[i + 1], -1)]
            if i:
                pairs[i - 1] = ranks[place_of(symbols[i - 1] + between + symbols[i], -1)]
        return symbols

    def _merge_long(self, symbols: list[bytes]) -> list[bytes]:
        """Do the same with a queue of the pairs, in time that grows with n log n."""
        n = len(symbols)
        after, before = list(range(1, n + 1)), list(range(-1, n - 1))
        pairs = [*self._pair_ranks(symbols), self._never]  # of each symbol with the one after it
        queue = [(rank, left) for left, rank in enumerate(pairs) if rank != self._never]
        heapify(queue)
        while queue:
            rank, left = heappop(queue)
            if pairs[left] != rank:
                continue  # one of the two has been merged into something else meanwhile
            right = after[left]
            symbols[left] += symbols[right]
            symbols[right], pairs[right] = b"", self._never
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
            for place in (before[left], left):
                if place >= 0:
                    pairs[place] = self._pair_rank(symbols, place, after[place])
                    if pairs[place] != self._never:
                        heappush(queue, (pairs[place], place))
        return [symbol for symbol in symbols if symbol]

    def _pair_rank(self, symbols: list[bytes], left: int, right: int) -> float:
        if right >= len(symbols):
            return self._never
        return self._ranks[self._places.get(symbols[left] + self._between + symbols[right], -1)]
