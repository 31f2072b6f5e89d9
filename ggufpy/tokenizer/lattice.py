"""The best way to cut a text into tokens when each has a score: Viterbi's algorithm over all cuts.

Owns: the path with the greatest sum of scores. Does not own: where the scores come from (`unigram.py`, `plamo2.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Lattice"]


class Lattice:
    """Cut bytes into tokens. `tokens`: by id, empty for one that is not to be found; `scores`: the score of each.

    A character that is no token costs `cost` and has the id `unknown`, as have several in a row. If there are
    `byte_ids`, it has these ids of its bytes, and is weighed against a token for it too.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        scores: Sequence[float],
        *,
        cost: float,
        unknown: int = -1,
        byte_ids: Sequence[int] | None = None,
    ) -> None:
        self._scores = scores
        self._cost = cost
        self._unknown = unknown
        self._byte_ids = byte_ids
        self._id_of = {token: id for id, token in enumerate(tokens) if token}
        self._longest: dict[int, int] = {}  # of the tokens that begin with a byte
        for token in self._id_of:
            if len(token) > self._longest.get(token[0], 0):
                self._longest[token[0]] = len(token)

    def backwards(self, text: bytes) -> list[int]:
        """Return the ids of the path, the last first; those of the bytes of a character in their order.

        Of equally good paths to a place, the one whose last part is longest; sums are made from left to right.
        """
        n, id_of, scores = len(text), self._id_of.get, self._scores
        sums, starts, ids = [0.0] + [-math.inf] * n, [0] * (n + 1), [-1] * (n + 1)
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
            if (unknown or self._byte_ids) and sums[start] + self._cost > sums[after]:
                sums[after], starts[after], ids[after] = sums[start] + self._cost, start, -1
            start = after
        path: list[int] = []
        while n:
            id = self._unknown if ids[n] < 0 else ids[n]
            if self._byte_ids and ids[n] < 0:
                path += [self._byte_ids[byte] for byte in text[starts[n] : n]]
            elif not path or not path[-1] == id == self._unknown:
                path.append(id)
            n = starts[n]
        return path


def _length(lead: int) -> int:
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
