"""What one call asks for, and how its tokens are cut into micro-batches, with llama.cpp's rules: they decide bits.

This file knows neither models nor caches; arrays are NumPy's. A `Part` is what a call asks of one sequence, a `Piece` a
run of a part's tokens, a `MicroBatch` the pieces that are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "FloatArray",
    "IntArray",
    "MicroBatch",
    "Part",
    "Piece",
    "Wanted",
    "integers",
    "micro_batch",
    "split",
    "wanted_rows",
]

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

Indices = range | npt.NDArray[np.int64]
"""Indices of tokens, ascending."""

Wanted = Literal["last", "all"] | Sequence[int]
"""Which tokens' logits are wanted: of the last one, of all, or of those with these indices."""


class Piece(NamedTuple):
    """A run of one part's tokens: ids[start:stop]."""

    part: int
    start: int
    stop: int


@dataclass(slots=True)
class Part:
    """What a call asks of one sequence, and the rows it gets."""

    seq_id: int
    ids: IntArray
    n_past: int
    wanted: Indices
    order: npt.NDArray[np.int64] | None  # how the caller listed them, where that was not ascending
    rows: FloatArray | None = None  # [n_wanted, n_vocab or n_embd], as far as they are known
    n_rows: int = 0

    def wanted_in(self, start: int, stop: int) -> Indices:
        """Return the wanted indices from start to stop."""
        wanted = self.wanted
        if start == 0 and stop == len(self.ids):
            return wanted
        if isinstance(wanted, range):
            return range(max(start, wanted.start), max(start, min(stop, wanted.stop)))
        return wanted[(wanted >= start) & (wanted < stop)]

    def add(self, rows: FloatArray, *, copy: bool = True) -> None:
        """Take the next rows, out of memory that the next computation overwrites unless they are all and no copy."""
        if len(rows) == len(self.wanted):
            self.rows = rows.copy() if copy else rows
            return
        if self.rows is None:
            self.rows = np.empty((len(self.wanted), rows.shape[1]), np.float32)
        self.rows[self.n_rows : self.n_rows + len(rows)] = rows
        self.n_rows += len(rows)

    def result(self) -> FloatArray:
        """Return the rows as the caller listed them."""
        assert self.rows is not None
        return self.rows if self.order is None else self.rows[self.order]


@dataclass(slots=True)
class MicroBatch:
    """Tokens that are computed together: all of the first sequence, then all of the second, and so on."""

    tokens: IntArray  # [n_tokens]
    positions: IntArray  # [n_tokens]
    runs: list[tuple[int, int]]  # each sequence and its number of tokens, the same for all unless the cache is unified
    out_ids: IntArray  # [n_outputs], the tokens whose logits are wanted


def integers(values: Any, expected: str) -> npt.NDArray[Any]:
    """Return a sequence of integers as an array, [n]. ValueError, which says what was expected, for anything else."""
    try:
        array = np.asarray(values)
    except ValueError:  # sequences of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(f"{expected}, got {values!r:.60}")
    return array


def wanted_rows(wanted: Wanted, n: int) -> tuple[Indices, npt.NDArray[np.int64] | None]:
    """Return the indices of the wanted tokens of n, ascending, and how the caller listed them if that differs.

    Raises ValueError for indices that are not different numbers from 0 to n - 1.
    """
    if isinstance(wanted, str):
        if wanted not in ("last", "all"):
            raise ValueError(f'logits: expected "last", "all" or indices, got {wanted!r}')
        return range(n - 1 if wanted == "last" else 0, n), None
    indices = integers(wanted, 'logits: expected "last", "all" or indices')
    ordered, order = np.unique(indices, return_inverse=True)
    if len(ordered) < len(indices) or (len(ordered) and not 0 <= ordered[0] <= ordered[-1] < n):
        raise ValueError(f"logits: expected different indices from 0 to {n - 1}, got {wanted!r:.60}")
    return ordered.astype(np.int64), None if np.array_equal(ordered, indices) else order


def split(
    parts: Sequence[Part], *, n_batch: int, n_ubatch: int, evenly: bool, neighbours: bool = True
) -> list[list[Piece]]:
    """Cut a call into micro-batches: in runs, or evenly over the sequences.

    Each needs that which has its own stream, and then its `neighbours` by number only, or a state.
    """
    whole = [Piece(i, 0, len(part.ids)) for i, part in enumerate(parts)]
    if len(parts) == 1 and len(parts[0].ids) <= n_ubatch:
        return [whole]
    slices = _cut(whole, n_batch)
    if not evenly:
        return [pieces for cut in slices for pieces in _cut(cut, n_ubatch)]
    seq_ids = [part.seq_id for part in parts] if neighbours else None
    return [pieces for cut in slices for pieces in _cut_evenly(cut, seq_ids, n_ubatch)]


def _cut(pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
    """Cut tokens into runs of at most `limit` (llama_batch_allocr::split_simple)."""
    run: list[Piece] = []
    room = limit
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            n = min(room, piece.stop - start)
            run.append(Piece(piece.part, start, start + n))
            start, room = start + n, room - n
            if not room:
                yield run
                run, room = [], limit
    if run:
        yield run


def _cut_evenly(pieces: list[Piece], seq_ids: list[int] | None, limit: int) -> Iterator[list[Piece]]:
    """Cut into equally many tokens of some sequences, neighbours if numbered (llama_batch_allocr::split_equal)."""
    left = list(pieces)
    while left:
        chosen: list[Piece] = []
        for piece in left:
            if not chosen or not seq_ids or seq_ids[piece.part] == seq_ids[chosen[-1].part] + 1:
                chosen.append(piece)
                if len(chosen) > limit:
                    break
        n = min(max(1, limit // len(chosen)), *(piece.stop - piece.start for piece in chosen))
        yield [Piece(piece.part, piece.start, piece.start + n) for piece in chosen]
        rest = {piece.part: Piece(piece.part, piece.start + n, piece.stop) for piece in chosen}
        left = [piece for old in left if (piece := rest.get(old.part, old)).start < piece.stop]


def micro_batch(parts: Sequence[Part], pieces: Sequence[Piece]) -> MicroBatch:
    """Put the pieces one behind the other."""
    if len(pieces) == 1:
        return _alone(parts, pieces[0], 0)
    made, n = [], 0
    for piece in pieces:
        made.append(_alone(parts, piece, n))
        n += piece.stop - piece.start
    join = np.concatenate
    return MicroBatch(
        join([m.tokens for m in made]), join([m.positions for m in made]), [m.runs[0] for m in made],
        join([m.out_ids for m in made]),
    )  # fmt: skip


def _alone(parts: Sequence[Part], piece: Piece, before: int) -> MicroBatch:
    """Make a micro-batch of one piece, which stands behind so many tokens of others."""
    i, start, stop = piece
    part = parts[i]
    first = part.n_past + start
    positions = np.arange(first, part.n_past + stop, dtype=np.int32)
    out_ids = _shifted(part.wanted_in(start, stop), before - start)
    return MicroBatch(part.ids[start:stop], positions, [(part.seq_id, stop - start)], out_ids)


def _shifted(indices: Indices, by: int) -> IntArray:
    if isinstance(indices, range):
        return np.arange(indices.start + by, indices.stop + by, dtype=np.int32)
    return (indices + by).astype(np.int32)
