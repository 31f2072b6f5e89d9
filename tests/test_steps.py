"""One token more of the same sequences takes a shorter way through a session: it has to lead to the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufpy import BackendError, ClosedError, Model, Session

Tiny = Callable[..., Path]
Rows = np.ndarray

N_SEQ = 3
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "unified": ("llama", {}, {"kv_unified": True}),
    "rotated": ("llama", {}, {"type_k": "q8_0", "type_v": "q8_0"}),
    "no flash": ("llama", {}, {"flash_attn": False}),
    "window": ("gemma3", {"n_swa": 16, "n_layer": 3, "swa_pattern": 3}, {}),
    "small window": ("gemma3", {"n_swa": 16, "n_layer": 3, "swa_pattern": 3}, {"swa_full": False, "n_ubatch": 32}),
    "alibi": ("bloom", {}, {}),
    "states": ("lfm2", {}, {}),
    "four planes": ("qwen2vl", {}, {}),
    "position temperature": ("mistral4", {}, {}),
}


def bits(rows: Rows) -> list[int]:
    return rows.view(np.uint32).ravel().tolist()


@pytest.fixture(params=KINDS, scope="module")
def pair(request: pytest.FixtureRequest, tiny: Tiny) -> Any:
    """Two sessions of a model: in the second no step is short, as rows are asked for by number."""
    name, variant, options = KINDS[request.param]
    with Model.load(tiny(name, **variant)) as model:
        options = {"n_ctx": 768, "n_seq_max": N_SEQ, "n_threads": 1, **options}
        with model.session(**options) as short, model.session(**options) as long:
            yield short, long


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_lead_to_the_same_bits(seed: int, pair: tuple[Session, Session]) -> None:
    """Whatever comes between steps, and for any of the sequences, rows and tokens are those of the long way."""
    short, long = pair
    short.clear()
    long.clear()
    rng, n_short = random.Random(seed), 0
    for _ in range(50):
        choice, seq_id = rng.random(), rng.randrange(N_SEQ)
        if choice < 0.15:
            ids = [rng.randrange(2, 64) for _ in range(rng.choice([1, 2, 5, 40]))]
            if short.n_past(seq_id) + len(ids) < short.n_ctx_seq:
                assert bits(short.decode(ids, seq_id=seq_id)) == bits(
                    long.decode(ids, seq_id=seq_id, logits=[-1 + len(ids)])
                )
        elif choice < 0.2:
            for session in pair:
                session.clear(seq_id)
        elif choice < 0.25:
            other = rng.randrange(N_SEQ)
            for session in pair:
                session.fork(seq_id, other)
        elif choice < 0.3 and short.n_past(seq_id) and "lfm2" not in repr(short):
            keep = short.n_past(seq_id) - rng.randrange(2)
            for session in pair:
                session.trim(seq_id, keep)
        else:
            chosen = sorted(rng.sample(range(N_SEQ), rng.choice([1, 1, 2, 3])))
            for _ in range(rng.randrange(1, 12)):
                ids = [rng.randrange(2, 64) for _ in chosen]
                if max(short.n_past(s) for s in chosen) >= short.n_ctx_seq:
                    break
                n_short += short._step is not None
                ours = short.decode_batch([(s, [i], "last") for s, i in zip(chosen, ids, strict=True)])
                theirs = long.decode_batch([(s, [i], [0]) for s, i in zip(chosen, ids, strict=True)])
                assert [bits(rows) for rows in ours] == [bits(rows) for rows in theirs]
        for seq_id in range(N_SEQ):
            assert short.tokens(seq_id) == long.tokens(seq_id)
    if short.options.flash_attn:
        assert n_short > 20


def test_steps_go_on_to_the_end_of_the_context(tiny: Tiny) -> None:
    """A sequence takes as many tokens as its context has, and the next is refused."""
    with (
        Model.load(tiny("llama")) as model,
        model.session(n_ctx=512, n_threads=1) as short,
        model.session(n_ctx=512, n_threads=1) as long,
    ):
        for session in (short, long):
            session.decode([5] * 250)
        for i in range(250, 512):
            assert bits(short.decode([2 + i % 60])) == bits(long.decode([2 + i % 60], logits=[0]))
        for session in (short, long):
            with pytest.raises(Exception, match="do not fit its context of 512"):
                session.decode([5])


def test_a_step_that_is_stopped_is_undone(tiny: Tiny) -> None:
    """A computation that stops half-way leaves the sequence as it was, and the next gives the same bits."""
    with Model.load(tiny("llama")) as model, model.session(n_ctx=256, n_threads=1) as session:
        for token in (5, 6, 7):
            session.decode([token])
        expected = session.decode([8])
        session.trim(0, 3)
        session.decode_batch([(0, [8], "last")])
        session.trim(0, 2)
        session.decode([7])
        assert session._step is not None
        session._scheduler.cancel()
        with pytest.raises(BackendError, match="stopped"):
            session.decode([8])
        assert session.tokens() == [5, 6, 7]
        assert bits(session.decode([8])) == bits(expected)


def test_rows_without_a_copy_are_the_sessions(tiny: Tiny) -> None:
    """With copy=False a row cannot be written to, shows the next computation, and outlives the session."""
    with Model.load(tiny("llama")) as model, model.session(n_ctx=256, n_threads=1) as session:
        session.decode([5])
        kept = session.decode([6])
        row = session.decode([7], copy=False)
        own = row.copy()
        with pytest.raises(ValueError, match="read-only"):
            row[0, 0] = 1
        assert bits(session.decode([8])) != bits(own)
        assert bits(row) != bits(own)
        assert kept.flags.writeable
        batch = session.decode_batch([(0, [9, 10], "all")], copy=False)
        assert batch[0].shape == (2, session.n_vocab)
        assert not batch[0].flags.writeable
    assert np.isfinite(row).all()
    assert np.isfinite(batch[0]).all()
    with pytest.raises(ClosedError):
        session.decode([5], copy=False)


def test_the_memory_of_graphs_is_used_again(tiny: Tiny) -> None:
    """A graph of another shape takes the memory of the one before, unless somebody still looks into it."""
    with Model.load(tiny("llama")) as model, model.session(n_ctx=256, n_threads=1) as session:
        session.decode([5] * 8)
        before = session._scheduler._ptr
        for n in (1, 3, 1, 1, 5):
            session.decode([5] * n, copy=False)
        assert session._scheduler._ptr is before
        row = session.decode([5] * 5, copy=False)
        values = row.copy()
        session.decode([5])
        assert bits(row) == bits(values)
        session.decode([5] * 4)
        assert session._scheduler._ptr is not before
        assert bits(row) == bits(values)
