"""How a call is cut into micro-batches: in which order, how large, and which rows are wanted of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ggufpy.batch import Part, Piece, Wanted, micro_batch, split, wanted_rows


def part(seq_id: int, n: int, wanted: Wanted = "last", n_past: int = 0) -> Part:
    return Part(seq_id, np.arange(n, dtype=np.int32) + 100 * seq_id, n_past, *wanted_rows(wanted, n))


def cut(parts: Sequence[Part], n_batch: int, n_ubatch: int, evenly: bool = False) -> list[list[tuple[int, int, int]]]:
    plan = split(parts, n_batch=n_batch, n_ubatch=n_ubatch, evenly=evenly)
    return [[tuple(piece) for piece in pieces] for pieces in plan]


def test_what_fits_is_computed_at_once() -> None:
    """One sequence's tokens stay together up to the size of a micro-batch."""
    assert [[(0, 0, 4)]] == cut([part(0, 4)], 8, 4)
    assert [[(0, 0, 4)], [(0, 4, 5)]] == cut([part(0, 5)], 8, 4)


def test_a_slice_ends_a_micro_batch() -> None:
    """n_batch cuts first, and what is left of a slice is not filled up from the next one."""
    assert [[(0, 0, 4)], [(0, 4, 6)], [(0, 6, 10)], [(0, 10, 12)]] == cut([part(0, 12)], 6, 4)


def test_runs_go_across_sequences() -> None:
    """In a cache that sequences share, a micro-batch takes what comes, whoever's it is."""
    assert [[(0, 0, 3), (1, 0, 1)], [(1, 1, 3)]] == cut([part(0, 3), part(1, 3)], 8, 4)


def test_streams_are_cut_evenly() -> None:
    """With streams of their own, neighbouring sequences get equally many tokens, a gap in their numbers parts them."""
    expected = [[(0, 0, 2), (1, 0, 2)], [(0, 2, 3)]]
    assert expected == cut([part(0, 3), part(1, 2)], 8, 4, evenly=True)
    assert [[(0, 0, 1)], [(1, 0, 1)]] == cut([part(0, 1), part(2, 1)], 8, 4, evenly=True)


@pytest.mark.parametrize("evenly", [False, True])
def test_every_token_is_in_one_micro_batch(evenly: bool) -> None:
    """Nothing is lost, doubled or put in another order, whatever the sizes."""
    random = np.random.default_rng(0)
    for _ in range(200):
        parts = [part(i, int(n)) for i, n in enumerate(random.integers(1, 20, random.integers(1, 5)))]
        n_ubatch = int(random.integers(1, 12))
        plan = cut(parts, n_ubatch + int(random.integers(0, 12)), n_ubatch, evenly)
        seen: list[list[int]] = [[] for _ in parts]
        for pieces in plan:
            for number, start, stop in pieces:
                seen[number] += range(start, stop)
        assert [list(range(len(p.ids))) for p in parts] == seen
        if not evenly:
            assert max(sum(stop - start for _, start, stop in pieces) for pieces in plan) <= n_ubatch


def test_a_micro_batch_knows_positions_and_outputs() -> None:
    """Positions go on from the sequence's own, and the wanted rows are counted within the micro-batch."""
    parts = [part(0, 4, [3, 1], n_past=7), part(1, 2, "all")]
    made = micro_batch(parts, [Piece(0, 1, 4), Piece(1, 0, 2)])
    assert [1, 2, 3, 100, 101] == made.tokens.tolist()
    assert [8, 9, 10, 0, 1] == made.positions.tolist()
    assert made.runs == [(0, 3), (1, 2)]
    assert [0, 2, 3, 4] == made.out_ids.tolist()


def test_rows_come_back_as_they_were_asked_for() -> None:
    """Rows are computed in ascending order, in any number of pieces, and given in the caller's."""
    asked = part(0, 4, [3, 0, 2])
    asked.add(np.array([[0.0]], np.float32))
    asked.add(np.array([[2.0], [3.0]], np.float32))
    assert [[3.0], [0.0], [2.0]] == asked.result().tolist()


@pytest.mark.parametrize("wanted", ["first", [0, 0], [4], [-1], [[0]], [0.5]])
def test_rows_that_are_not_there_are_refused(wanted: Wanted) -> None:
    """Only "last", "all" and different indices within the tokens are rows."""
    with pytest.raises(ValueError, match="logits: expected"):
        wanted_rows(wanted, 4)
