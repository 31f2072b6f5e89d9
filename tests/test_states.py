"""States of recurrent layers: what sequences share, what cannot be undone, and that both give llama.cpp's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.forced import complete
from helpers.rows import near

from ggufpy import BackendError, ContextLengthError, GGUFError, Model, SamplingParams, Session
from ggufpy.batch import Part, Piece, split
from ggufpy.testing import write_tiny_model

SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
STREAMS = pytest.mark.parametrize("unified", [False, True], ids=["streams", "unified"])
PROMPT = [3 + i * 7919 % 61 for i in range(40)]


@pytest.fixture(scope="module")
def path(tiny: Callable[..., Path]) -> Path:
    return tiny("lfm2")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.load(path) as model:
        yield model


def test_sequences_are_kept_whole_or_forgotten(model: Model) -> None:
    """Refusing to trim changes nothing; a forgotten sequence begins anew."""
    with model.session(**SMALL) as session, model.session(**SMALL) as other:
        first = session.decode(PROMPT)
        other.decode(PROMPT)
        with pytest.raises(ContextLengthError, match=r"sequence 0 from 40 to 39 tokens.*recurrent"):
            session.trim(0, 39)
        session.trim(0, 40)
        session.trim(0, 100)
        assert PROMPT == session.tokens()
        assert np.array_equal(other.decode([5]), session.decode([5]))
        session.trim(0, 0)
        assert np.array_equal(first, session.decode(PROMPT))
        session.clear()
        assert np.array_equal(first, session.decode(PROMPT))


@STREAMS
def test_forks_go_their_own_ways(unified: bool, model: Model) -> None:
    """A state is shared until one of its sequences goes on, whichever that is, and also if one of them is forgotten."""
    with model.session(**SMALL, n_seq_max=3, kv_unified=unified) as session:
        session.decode(PROMPT)
        session.decode([9, 8], seq_id=2)
        session.fork(0, 1)
        session.fork(1, 2)
        rows = [session.decode([token], seq_id=seq_id)[0] for seq_id, token in ((1, 5), (0, 6), (2, 7))]
        session.clear(0)
        session.fork(1, 0)
        session.clear(1)
        rows += [session.decode([11], seq_id=0)[0], session.decode([12], seq_id=1)[0]]
    for row, tokens in zip(rows, ([*PROMPT, 5], [*PROMPT, 6], [*PROMPT, 7], [*PROMPT, 5, 11], [12]), strict=True):
        with model.session(**SMALL) as alone:
            assert near(alone.decode(tokens)[0], row)


@pytest.mark.parametrize("how", [BackendError("broken"), KeyboardInterrupt()], ids=repr)
def test_a_stopped_computation_leaves_its_sequence_empty(
    how: BaseException, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no way back to the state before; its neighbour has noticed nothing."""

    def stop(_: Any) -> bool:
        raise how

    with model.session(**SMALL, n_seq_max=2) as session, model.session(**SMALL, n_seq_max=2) as other:
        for each in (session, other):
            each.decode(PROMPT, seq_id=1)
        session.decode(PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(session._scheduler, "compute", stop)
            with pytest.raises(type(how)):
                session.decode([1, 2])
        assert (0, 40) == (session.n_past(0), session.n_past(1))
        assert np.array_equal(other.decode([5], seq_id=1), session.decode([5], seq_id=1))
        assert np.array_equal(other.decode(PROMPT), session.decode(PROMPT))


def test_a_batch_without_room_changes_no_state(model: Model) -> None:
    """Neither rows nor counts, though it was tried first."""
    with model.session(**SMALL, n_seq_max=2, kv_unified=True, n_ubatch=64) as session:
        session.decode(PROMPT)
        with pytest.raises(ContextLengthError, match="no room"):
            session.decode_batch([(0, PROMPT * 4, "last"), (1, PROMPT * 3, "last")])
        assert (40, 0) == (session.n_past(0), session.n_past(1))
        session.trim(0, 40)
        row = session.decode([5])
    with model.session(**SMALL) as alone:
        alone.decode(PROMPT)
        assert near(alone.decode([5]), row)


def test_generation_computes_anew_what_cannot_be_reused(model: Model) -> None:
    """A prompt that goes on where the session stands is continued, any other one begins from nothing."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with model.session(**SMALL) as session:
        first = complete(session, model.tokenizer, PROMPT, greedy)
        again = complete(session, model.tokenizer, PROMPT, greedy)
        assert (0, first.token_ids) == (again.usage.cached_tokens, again.token_ids)
        held = session.tokens()
        assert len(held) == complete(session, model.tokenizer, [*held, 5], greedy).usage.cached_tokens


def test_sequences_are_cut_evenly_though_they_are_no_neighbours() -> None:
    """With a state each and one stream for all (llama.cpp's split_equal, not sequential)."""
    none = np.arange(0)
    parts = [Part(seq_id, np.zeros(n, np.int32), 0, none, None) for seq_id, n in ((3, 5), (0, 2), (2, 4))]
    plan = split(parts, n_batch=99, n_ubatch=6, evenly=True, neighbours=False)
    assert [
        [Piece(0, 0, 2), Piece(1, 0, 2), Piece(2, 0, 2)],
        [Piece(0, 2, 4), Piece(2, 2, 4)],
        [Piece(0, 4, 5)],
    ] == list(plan)


@STREAMS
def test_sequences_of_any_length_give_llama_cpps_bits(unified: bool, path: Path, model: Model) -> None:
    """In one call and in several, with forks in between, and sequences that are forgotten."""
    pytest.importorskip("llama_cpp")
    from reference.llama import ReferenceModel, ReferenceSession

    def run(session: Session | ReferenceSession) -> list[np.ndarray]:
        rows = session.decode_batch([(2, PROMPT[:21], "all"), (0, PROMPT[5:], "all"), (1, PROMPT[::-1], "last")])
        session.fork(0, 3)
        rows += session.decode_batch([(0, PROMPT[:3], "all"), (1, PROMPT[:1], "last"), (3, PROMPT[:30], "all")])
        session.clear(1)
        session.fork(3, 1)
        rows += session.decode_batch([(3, [7], "last"), (0, [9], "last"), (1, [7, 8], "all")])
        return rows

    options = {"n_ctx": 1024, "n_threads": 1, "n_seq_max": 4, "n_ubatch": 16, "kv_unified": unified}
    with ReferenceModel(path) as theirs, theirs.session(**options) as expected, model.session(**options) as found:
        for a, b in zip(run(expected), run(found), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("lfm2", {"n_embd_head_k": 16, "n_embd_head_v": 16}, r"key_length: 4 heads of 16 do not make 128"),
        ("lfm2", {"shortconv_l_cache": 1}, r"lfm2.shortconv.l_cache: expected at least 2, found 1"),
        ("lfm2", {"causal_attn": False}, r"attention.causal"),
        ("qwen35", {"ssm_d_inner": 96}, r"ssm.inner_size: expected 4 heads of 32, found 96"),
        ("qwen3next", {"ssm_n_group": 3}, r"ssm.group_count: expected a divisor of 4"),
        ("qwen35moe", {"full_attention_interval": 0}, r"full_attention_interval: expected at least 1, found 0"),
        ("qwen35", {"is_recurrent": [True] * 3}, r"attention.recurrent_layers: expected one value or 4"),
    ],
)
def test_what_no_kernel_could_compute_is_refused(name: str, fault: Any, message: str, tmp_path: Path) -> None:
    """Hyper-parameters of recurrent layers that do not fit together, each by its name."""
    with pytest.raises(GGUFError, match=message):
        write_tiny_model(name, tmp_path / "model.gguf", **fault)
