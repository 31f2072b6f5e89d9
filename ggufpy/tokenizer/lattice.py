"""The best way to cut a text into tokens when each has a score: Viterbi's algorithm over all cuts.

Owns: the path with the greatest sum of scores. Does not own: where the scores come from (`unigram.py`, `plamo2.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Lattice"]


class Lattice:
    """Cut bytes into tokens. `tokens`: by id, empty for one that is not to be found; `scores`: the score of each.

    A character that is no token costs `cost` and has the id `unknown`, as have several in a row. If `apart`, each of
    them is one, and weighed against a token for it too.
    """

    def __init__(
        self, tokens: Sequence[bytes], scores: Sequence[float], *, cost: float, unknown: int = -1, apart: bool = False
    ) -> None:
        self._scores = scores
        self._cost = cost
        self._unknown = unknown
        self._apart = apart
        self._id_of = {token: id for id, token in enumerate(tokens) if token}
        self._longest: dict[int, int] = {}  # of the tokens that begin with a byte
        for token in self._id_of:
            if len(token) > self._longest.get(token[0], 0):
                self._longest[token[0]] = len(token)

    def best(self, text: bytes) -> list[int]:
        """Return the ids of the path."""
        return self.best_with_ends(text)[0]

    def best_with_ends(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return the ids of the path and where each ends.

        Of equally good paths to a place, the one whose last part is longest; sums are made from left to right.
        """
        n, id_of, scores = len(text), self._id_of.get, self._scores
        sums, starts, ids = [0.0] + [-math.inf] * n, [0] * (n + 1), [self._unknown] * (n + 1)
        start = 0
        while start < n:
            after = min(n, start + _length(text[start]))
            unknown = True
            for end in range(start + 1, min(n, start + self._longest.get(text[start], 0)) + 1):
                id = id_of(text[start:end], -1)
                if id >= 0:
                    unknown = unknown and end != after
                    if sums[start] + scores[id] > sums[end]:
                        sums[end], starts[end], ids[end] = sums[start] + scores[id], start, id
            if (unknown or self._apart) and sums[start] + self._cost > sums[after]:
                sums[after], starts[after], ids[after] = sums[start] + self._cost, start, self._unknown
            start = after
        path: list[tuple[int, int]] = []
        while n:
            if self._apart or not path or not path[-1][0] == ids[n] == self._unknown:
                path.append((ids[n], n))
            n = starts[n]
        return [id for id, _ in reversed(path)], [end for _, end in reversed(path)]


def _length(lead: int) -> int:
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
