"""The best way to cut a text into tokens when each has a score: Viterbi's algorithm over all cuts.

Owns: the path with the greatest sum of scores. Does not own: where the scores come from (`unigram.py`, `plamo2.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Lattice"]


class Lattice:
    """Cut bytes into tokens: `tokens` are the ids by their bytes, `scores` the score of each id.

    A character that is no token costs `unknown`. With `always_unknown` this is weighed against a token for it too.
    """

    def __init__(
        self, tokens: Mapping[bytes, int], scores: Sequence[float], *, unknown: float, always_unknown: bool = False
    ) -> None:
        self._tokens = tokens
        self._scores = scores
        self._unknown = unknown
        self._always_unknown = always_unknown
        self._longest: dict[int, int] = {}  # of the tokens that begin with a byte
        for token in tokens:
            if len(token) > self._longest.get(token[0], 0):
                self._longest[token[0]] = len(token)

    def best(self, data: bytes) -> list[tuple[int, int]]:
        """Return the end of each part and its id, -1 for a character that is none.

        Of equally good paths to a place, the one whose last part is longest; sums are made from left to right.
        """
        n, token_of, scores = len(data), self._tokens.get, self._scores
        sums, starts, ids = [0.0] + [-float("inf")] * n, [0] * (n + 1), [-1] * (n + 1)
        start = 0
        while start < n:
            after = min(n, start + _length(data[start]))
            unknown = True
            for end in range(start + 1, min(n, start + self._longest.get(data[start], 0)) + 1):
                id = token_of(data[start:end], -1)
                if id >= 0:
                    unknown = unknown and end != after
                    if sums[start] + scores[id] > sums[end]:
                        sums[end], starts[end], ids[end] = sums[start] + scores[id], start, id
            if (unknown or self._always_unknown) and sums[start] + self._unknown > sums[after]:
                sums[after], starts[after], ids[after] = sums[start] + self._unknown, start, -1
            start = after
        path, end = [], n
        while end:
            path.append((end, ids[end]))
            end = starts[end]
        return path[::-1]


def _length(lead: int) -> int:
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
