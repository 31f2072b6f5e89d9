"""The cells of one stream of a cache: who has which position where, and which cell the next token gets.

The rules are llama.cpp's (llama_kv_cells, llama_kv_cache::find_slot): sums over a cache run in cell order, so where a
token lies decides bits. This file is NumPy only; what the cells hold is memory.py's. A "row" is a sequence's place in
its stream, a "cell" a token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufpy.batch import IntArray

__all__ = ["BoolArray", "Cells", "Window"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Window:
    """Which positions a token sees of those before it: the n last ones with its own, or all of its own run of n."""

    n: int
    chunked: bool = False

    def first(self, position: Any) -> Any:
        """Return the first position that the token at a position (or at each of an array of them) sees."""
        return position // self.n * self.n if self.chunked else position - (self.n - 1)


class Cells:
    """The cells of one stream: position and owners of each, and where the next token goes."""

    __slots__ = ("end", "has", "head", "pos", "used")

    def __init__(self, size: int, n_rows: int) -> None:
        self.pos: IntArray = np.full(size, -1, np.int32)  # -1: the cell is empty
        self.has: BoolArray = np.zeros((n_rows, size), np.bool_)
        self.head = self.used = self.end = 0

    def copy(self) -> Cells:
        other = Cells.__new__(Cells)
        other.pos, other.has = self.pos.copy(), self.has.copy()
        other.head, other.used, other.end = self.head, self.used, self.end
        return other

    def find(self, n: int, window: Window | None) -> npt.NDArray[np.int64] | None:
        """Find n cells, walking from the head round to it again: empty ones, and ones their window has left behind."""
        size = len(self.pos)
        head = 0 if self.head > self.used + 2 * n else self.head
        if self.end <= head and head + n <= size:
            return np.arange(head, head + n)
        free = self.pos < 0
        if window:
            free |= self._left_behind(window)
        cells = np.concatenate((np.flatnonzero(free[head:]) + head, np.flatnonzero(free[:head])))
        return cells[:n] if len(cells) >= n else None

    def _left_behind(self, window: Window) -> BoolArray:
        single = self.has.sum(axis=0) == 1
        left = np.zeros(len(self.pos), np.bool_)
        for row in range(len(self.has)):
            left |= single & self.has[row] & (self.pos < window.first(self.max_pos(row) + 1))
        return left

    def place(self, cells: npt.NDArray[np.int64], positions: IntArray, runs: Sequence[tuple[int, int]]) -> None:
        """Put tokens into cells, those of one row (row, number of tokens) after those of another.

        A sequence that loses a cell loses everything before it too, so it has no gaps.
        """
        first, last, n = int(cells[0]), int(cells[-1]), len(cells)
        if self.end <= first <= last:  # nothing is overwritten, and cells are neighbours
            self.pos[first : last + 1] = positions
            for row, count in runs:
                self.has[row, first : first + count] = True
                first += count
            self.used += n
            self.end = self.head = last + 1
            return
        lost = cells[self.pos[cells] >= 0]
        purge = [(row, int(self.pos[lost[has]].max())) for row, has in enumerate(self.has[:, lost]) if has.any()]
        self.has[:, lost] = False
        self.used += n - len(lost)
        self.pos[cells] = positions
        start = 0
        for row, count in runs:
            self.has[row, cells[start : start + count]] = True
            start += count
        self.end = max(self.end, int(cells.max()) + 1)
        for row, position in purge:
            self.remove(row, 0, position + 1)
        self.head = last + 1

    def fill(self, cells: IntArray, positions: IntArray, has: BoolArray) -> None:
        """Put tokens into some empty cells, in ascending order; `has` says whose they are, [rows, cells]."""
        self.pos[cells] = positions
        self.has[:, cells] = has
        self.used += len(cells)
        if len(cells):
            self.end = max(self.end, int(cells[-1]) + 1)
            self.head = int(cells[-1]) + 1

    def room_behind(self, n: int, limit: int) -> int:
        """Return how many times n tokens go behind the last cell, below the limit, as `find` would place them."""
        behind = self.head == self.end and self.head <= self.used + 2 * n
        return max(0, min(len(self.pos), limit) - self.end) // n if behind else 0

    def append(self, row: int, position: int) -> int:
        """Put a token into the cell behind the last one in use, where there is one; returns the cell."""
        cell = self.end
        self.pos[cell] = position
        self.has[row, cell] = True
        self.used += 1
        self.head = self.end = cell + 1
        return cell

    def remove(self, row: int, p0: int, p1: int) -> None:
        """Take positions p0 ≤ p < p1 from a sequence; cells that nobody has any more become empty."""
        pos = self.pos[: self.end]
        mine = np.flatnonzero(self.has[row, : self.end] & (pos >= p0) & (pos < p1))
        self.has[row, mine] = False
        freed = mine[~self.has[:, mine].any(axis=0)]
        if len(freed):
            self.pos[freed] = -1
            self.head = min(self.head, int(freed[0]))
            self._count()

    def move(self, row: int, p0: int, by: int) -> IntArray:
        """Add `by` to a sequence's positions from p0 on; returns what was added to each cell, as far as any is used."""
        pos = self.pos[: self.end]
        added: IntArray = np.where(self.has[row, : self.end] & (pos >= p0), np.int32(by), np.int32(0))
        pos += added
        self.head = 0  # as llama_kv_cache::seq_add does
        return added

    def settle(self) -> None:
        """Free the cells that nobody has and count anew, after a change that something cut short."""
        self.pos[~self.has.any(axis=0)] = -1
        self.has[:, self.pos < 0] = False
        self.end = len(self.pos)
        self._count()

    def _count(self) -> None:
        """See which cells are in use, none of them behind `end`."""
        kept = np.flatnonzero(self.pos[: self.end] >= 0)
        self.used, self.end = len(kept), int(kept[-1]) + 1 if len(kept) else 0

    def clear(self) -> None:
        """Make every cell empty and begin again with the first."""
        self.pos[: self.end] = -1
        self.has[:, : self.end] = False
        self.head = self.used = self.end = 0

    def max_pos(self, row: int) -> int:
        """Return a sequence's last position, -1 if it has none."""
        return int(self.pos[: self.end].max(where=self.has[row, : self.end], initial=-1))

    def min_pos(self, row: int) -> int:
        """Return a sequence's first position, a huge one if it has none."""
        return int(self.pos[: self.end].min(where=self.has[row, : self.end], initial=2**31 - 1))
