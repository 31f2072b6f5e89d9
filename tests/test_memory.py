"""Cells follow llama.cpp's rules, checked against a plain retelling of them, cell by cell."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ggufpy.cells import Cells, Window
from ggufpy.graph import NO_LIMIT, mask_writer
from ggufpy.memory import _hadamard, _largest_rotation

SIZE, ROWS = 48, 3


class Retold:
    """The same rules as `Cells`, one cell at a time and without any shortcut."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, set[int]]] = [(-1, set()) for _ in range(SIZE)]
        self.head = 0

    def max_pos(self, row: int) -> int:
        return max((pos for pos, has in self.cells if row in has), default=-1)

    def find(self, n: int, n_swa: int) -> list[int] | None:
        used = sum(bool(has) for _, has in self.cells)
        at = 0 if self.head > used + 2 * n else self.head
        found = []
        for _ in range(SIZE):
            at %= SIZE
            pos, has = self.cells[at]
            if not has or (n_swa and len(has) == 1 and self.max_pos(min(has)) + 1 - pos >= n_swa):
                found.append(at)
                if len(found) == n:
                    return found
            at += 1
        return None

    def place(self, cells: list[int], positions: list[int], row: int) -> None:
        lost: dict[int, int] = {}
        for at, pos in zip(cells, positions, strict=True):
            old, has = self.cells[at]
            for owner in has:
                lost[owner] = max(lost.get(owner, -1), old)
            self.cells[at] = (pos, {row})
        for owner, last in lost.items():
            self.remove(owner, 0, last + 1)
        self.head = cells[-1] + 1

    def remove(self, row: int, p0: int, p1: int) -> None:
        freed = []
        for at, (pos, has) in enumerate(self.cells):
            if row in has and p0 <= pos < p1:
                has.discard(row)
                if not has:
                    self.cells[at] = (-1, has)
                    freed.append(at)
        if freed and freed[0] < self.head:
            self.head = freed[0]


def state(cells: Cells) -> list[tuple[int, set[int]]]:
    return [(int(p), {int(r) for r in np.flatnonzero(cells.has[:, i])}) for i, p in enumerate(cells.pos)]


@pytest.mark.parametrize("n_swa", [0, 8])
@pytest.mark.parametrize("seed", range(20))
def test_cells_follow_the_rules(seed: int, n_swa: int) -> None:
    """Whatever is placed, trimmed, shared and dropped, cells, owners and head are those of the plain retelling."""
    rng = random.Random(seed)
    cells, retold = Cells(SIZE, ROWS), Retold()
    n_found = 0
    for _ in range(120):
        row = rng.randrange(ROWS)
        choice = rng.random()
        if choice < 0.7:
            n = rng.choice([1, 1, 2, 5, 9])
            found, expected = cells.find(n, Window(n_swa) if n_swa else None), retold.find(n, n_swa)
            assert (None if found is None else found.tolist()) == expected
            if expected is None:
                continue
            n_found += 1
            positions = np.arange(n, dtype=np.int32) + retold.max_pos(row) + 1
            cells.place(found, positions, [(row, n)])
            retold.place(expected, positions.tolist(), row)
        elif choice < 0.9:
            keep = rng.randrange(retold.max_pos(row) + 2)
            cells.remove(row, keep, 2**31 - 1)
            retold.remove(row, keep, 2**31 - 1)
        else:
            other = (row + 1) % ROWS
            cells.remove(other, 0, 2**31 - 1)
            retold.remove(other, 0, 2**31 - 1)
            cells.has[other] = cells.has[row]
            for _, has in retold.cells:
                has |= {other} if row in has else set()
        assert state(cells) == retold.cells
        assert cells.head == retold.head
        assert cells.used == sum(bool(has) for _, has in retold.cells)
        assert cells.end == max((i + 1 for i, (_, has) in enumerate(retold.cells) if has), default=0)
        assert [cells.max_pos(r) for r in range(ROWS)] == [retold.max_pos(r) for r in range(ROWS)]
    assert n_found > 20


def visible(
    cells: Cells,
    row: int,
    positions: list[int],
    *,
    n_cells: int = 8,
    before: int = NO_LIMIT,
    after: int = 0,
    chunk: int = 0,
) -> list[list[int]]:
    """Return 1 for each cell that a position of the row sees, with all kinds of mask agreeing."""
    seen = []
    for dtype in (np.float16, np.float32):
        for alibi in (False, True):
            mask = np.full((len(positions), n_cells), np.nan, dtype)
            owned, wanted = cells.has[row], np.array(positions, np.int32)
            mask_writer(mask, cells.pos, owned, wanted, before, after, chunk, alibi)()
            distance = np.abs(cells.pos[:n_cells] - np.array(positions)[:, None]) if alibi else 0
            assert np.array_equal(mask, np.where(np.isneginf(mask), -np.inf, -distance * 1.0))
            seen.append((~np.isneginf(mask)).astype(int).tolist())
    assert all(other == seen[0] for other in seen)
    return seen[0]


def test_a_mask_may_look_both_ways() -> None:
    """Where tokens see behind them, they see as far as they are told to."""
    cells = Cells(8, 1)
    cells.place(np.arange(5), np.arange(5, dtype=np.int32), [(0, 5)])
    assert visible(cells, 0, [2], before=1, after=1) == [[0, 1, 1, 1, 0, 0, 0, 0]]
    assert visible(cells, 0, [0], after=NO_LIMIT) == [[1, 1, 1, 1, 1, 0, 0, 0]]


def test_visible_is_causal_windowed_and_of_one_sequence() -> None:
    """A position sees its own sequence up to itself, and of that no more than the window."""
    cells = Cells(8, 2)
    cells.place(np.arange(4), np.arange(4, dtype=np.int32), [(0, 4)])
    cells.place(np.arange(4, 6), np.arange(2, dtype=np.int32), [(1, 2)])
    seen = visible(cells, 0, [2, 3])
    assert seen == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    seen = visible(cells, 0, [3], before=1)
    assert seen == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert visible(cells, 1, [1]) == [[0, 0, 0, 0, 1, 1, 0, 0]]


def test_chunked_windows_begin_at_multiples_of_their_size() -> None:
    """A position sees what its chunk has of it, and cells of finished chunks are free for the next token."""
    cells, window = Cells(8, 1), Window(4, chunked=True)
    cells.place(np.arange(6), np.arange(6, dtype=np.int32), [(0, 6)])
    seen = visible(cells, 0, [3, 4, 5], n_cells=6, chunk=4)
    assert seen == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]]
    found = cells.find(6, window)
    assert found is not None
    assert found.tolist() == [6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize(("width", "n"), [(64, 64), (128, 128), (192, 64), (256, 256), (320, 64)])
def test_rotation_is_the_largest_that_divides_the_head(width: int, n: int) -> None:
    """The rotation's order is 64·2^k, and its matrix undoes itself."""
    assert n == _largest_rotation(width)
    h = _hadamard(n)
    np.testing.assert_allclose(h @ h, np.eye(n), atol=1e-5)
    assert set(np.abs(h).ravel().tolist()) == {float(np.float32(1) / np.sqrt(np.float32(n)))}
