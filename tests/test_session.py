"""Sessions: what decode returns, what the cache keeps, and that neither misuse nor a stop half-way changes it."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewrite import rewrite
from helpers.rows import ids, near, same
from helpers.scripts import IN_THREADS, run

from ggufpy import BackendError, ClosedError, ContextLengthError, Model, Session, StoppedError
from ggufpy.backend import physical_cores
from ggufpy.session import CACHE_TYPES, MAX_CELLS

Tiny = Callable[..., Path]
Rows = np.ndarray
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
STREAMS = pytest.mark.parametrize("unified", [False, True], ids=["streams", "unified"])


@pytest.fixture(scope="module")
def windowed(tiny: Tiny) -> Iterator[Model]:
    """Two layers with a window of 16 and one without."""
    with Model.load(tiny("gemma3", n_swa=16, n_layer=3, swa_pattern=3)) as model:
        yield model


def fresh(model: Model, token_ids: list[int], **options: Any) -> Rows:
    """The last row of a new session."""
    with model.session(**{**SMALL, **options}) as session:
        return session.decode(token_ids)


# ---------------------------------------------------------------------------------------------------------- misuse

TOKENS = [
    True, 3, None, "abc", b"ab", {1: 2}, iter([1]), [], [True], [1.0], ["a"], [None], [[1, 2]], [[1], [2, 3]],
    np.zeros((1, 2), int), np.zeros(0, int), np.array(3), np.array([1.5]), np.array([True]),
    [-1], [64], [1, 2, 64], [2**31], [2**32 + 1], [2**63], [2**64], [-(2**70)],
]  # fmt: skip
SEQUENCES = [-1, 2, True, False, 0.0, "0", None, 2**70, np.int64(2), np.bool_(True), np.array([0]), [0]]
WANTED = [
    "first", "", None, 0, True, 1.5, [3], [-1], [0, 0], [True], [0.5], ["all"], [[0]], [2**70],
    np.array([True, False, True]), np.zeros((1, 1), int),
]  # fmt: skip
COUNTS = [-1, True, 1.5, "1", None, 2**70, np.float64(1), [1]]

MISUSE: list[Any] = [
    *(pytest.param(lambda s, x=x: s.decode(x), "token_ids|sequence", id=f"token_ids {x!r:.20}") for x in TOKENS),
    *(pytest.param(lambda s, x=x: s.decode([1], seq_id=x), "seq_id", id=f"seq_id {x!r:.20}") for x in SEQUENCES),
    *(pytest.param(lambda s, x=x: s.n_past(x), "seq_id", id=f"n_past {x!r:.20}") for x in SEQUENCES),
    *(pytest.param(lambda s, x=x: s.tokens(x), "seq_id", id=f"tokens {x!r:.20}") for x in SEQUENCES),
    *(pytest.param(lambda s, x=x: s.trim(x, 0), "seq_id", id=f"trim {x!r:.20}") for x in SEQUENCES),
    *(pytest.param(lambda s, x=x: s.fork(x, 0), "seq_id", id=f"fork from {x!r:.20}") for x in SEQUENCES),
    *(pytest.param(lambda s, x=x: s.fork(0, x), "seq_id", id=f"fork to {x!r:.20}") for x in SEQUENCES),
    *(pytest.param(lambda s, x=x: s.clear(x), "seq_id", id=f"clear {x!r:.20}") for x in SEQUENCES if x is not None),
    *(pytest.param(lambda s, x=x: s.decode([1, 2, 3], logits=x), "logits", id=f"logits {x!r:.20}") for x in WANTED),
    *(pytest.param(lambda s, x=x: s.trim(0, x), "n: expected", id=f"trim to {x!r:.20}") for x in COUNTS),
    pytest.param(
        lambda s: s.decode_batch([(0, [1], "last"), (0, [2], "last")]), "once in a batch", id="sequence twice"
    ),
    pytest.param(lambda s: s.decode_batch([(1, [1], "last"), (0, [64], "last")]), "token_ids", id="second part wrong"),
    pytest.param(lambda s: s.decode_batch([(1, [1], "last"), (0, [6], [1])]), "logits", id="second part's logits"),
]


@pytest.mark.parametrize(("call", "named"), MISUSE)
def test_what_is_asked_wrongly_changes_nothing(call: Callable[[Session], object], named: str, llama: Model) -> None:
    """An argument that is no id, no count, no sequence or no selection is named, and the session goes on as before."""
    with llama.session(**SMALL, n_seq_max=2) as session, llama.session(**SMALL, n_seq_max=2) as other:
        for each in (session, other):
            each.decode(ids(5))
        with pytest.raises(ValueError, match=named):
            call(session)
        assert (5, 0) == (session.n_past(0), session.n_past(1))
        assert ids(5) == session.tokens(0)
        assert same(other.decode([7]), session.decode([7]))


@pytest.mark.parametrize("item", [5, "abc", (0,), (0, [1]), (0, [1], "last", 3)], ids=repr)
def test_batches_are_triples(item: Any, llama: Model) -> None:
    """Anything else is named by its place, and changes nothing."""
    with llama.session(**SMALL) as session:
        with pytest.raises(ValueError, match=r"batch\[1\]: expected \(seq_id, token_ids, logits\), got"):
            session.decode_batch([(0, [1], "last"), item])
        assert 0 == session.n_past()


def test_numpys_integers_are_integers(llama: Model) -> None:
    """Ids, sequences, counts and options may come out of arrays of any integer type."""
    expected = fresh(llama, [1, 2, 3])
    options = {"n_ctx": np.int64(256), "n_threads": np.int32(1), "n_seq_max": np.uint8(2)}
    with llama.session(**options) as session:
        assert (256, 1, 2) == (session.options.n_ctx, session.n_threads, session.options.n_seq_max)
        assert type(session.options.n_ctx) is int
        for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64):
            session.clear(np.int64(1))
            assert same(
                expected, session.decode(np.array([1, 2, 3], kind), seq_id=np.int64(1), logits=np.array([2], kind))
            )
        session.fork(np.int64(1), np.uint8(0))
        session.trim(np.int16(0), np.int64(2))
        assert (2, 3) == (session.n_past(np.int64(0)), session.n_past(1))
        assert [1, 2] == session.tokens(np.uint64(0))
    for other in ((1, 2, 3), range(1, 4), [np.int64(1), 2, np.uint8(3)]):
        assert same(expected, fresh(llama, other))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name in ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "n_threads", "n_threads_batch")
          for value in (0, -1, True, 1.0, "1", 2**31, 2**70)),
        {"n_ctx": MAX_CELLS + 1}, {"n_seq_max": 257}, {"n_seq_max": None}, {"n_batch": None}, {"n_threads": 513},
        *({name: value} for name in ("flash_attn", "kv_unified", "swa_full") for value in (0, 1, None, "yes")),
        *({name: value} for name in ("type_k", "type_v") for value in ("q3_k", "Q8_0", "", None, 1, ["f16"])),
        *({"type_v": type, "flash_attn": False} for type in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")),
    ],
    ids=str,
)  # fmt: skip
def test_options_are_checked_by_name(options: dict[str, Any], llama: Model) -> None:
    """The first option that cannot be is named, with its range or choices."""
    with pytest.raises(ValueError, match=rf"^{next(iter(options))}"):
        llama.session(**options)


def test_unknown_options_are_refused(llama: Model) -> None:
    """A misspelt option is not swallowed."""
    with pytest.raises(TypeError, match="n_cxt"):
        llama.session(n_cxt=512)


SIZES: list[tuple[dict[str, Any], int, int, int, int]] = [
    ({}, 1024, 1024, 1024, 512),
    ({"n_ctx": 1}, 256, 256, 1, 1),
    ({"n_ctx": 300}, 512, 512, 300, 300),
    ({"n_ctx": 512, "n_batch": 100}, 512, 512, 100, 100),
    ({"n_ctx": 512, "n_batch": 100, "n_ubatch": 64}, 512, 512, 100, 64),
    ({"n_ctx": 512, "n_ubatch": 1000}, 512, 512, 512, 512),
    ({"n_ctx": 512, "n_seq_max": 2}, 512, 256, 512, 512),
    ({"n_ctx": 512, "n_seq_max": 3}, 768, 256, 512, 512),
    ({"n_ctx": 1000, "n_seq_max": 3}, 1536, 512, 1000, 512),
    ({"n_ctx": 256, "n_seq_max": 4}, 1024, 256, 256, 256),
    ({"n_ctx": 1000, "n_seq_max": 3, "kv_unified": True}, 1024, 1024, 1000, 512),
    ({"n_ctx": 1024, "n_batch": 2048, "n_ubatch": 2048}, 1024, 1024, 1024, 1024),
]


@pytest.mark.parametrize(("options", "n_ctx", "n_ctx_seq", "n_batch", "n_ubatch"), SIZES)
def test_sizes_are_rounded(
    options: dict[str, Any], n_ctx: int, n_ctx_seq: int, n_batch: int, n_ubatch: int, llama: Model
) -> None:
    """Contexts are padded to 256 cells, shared out between streams; batches are no larger than the context."""
    with llama.session(**options) as session:
        assert (n_ctx, n_ctx_seq) == (session.n_ctx, session.n_ctx_seq)
        assert (n_batch, n_ubatch) == (session.n_batch, session.n_ubatch)


def test_sizes_are_rounded_as_llama_cpp_rounds_them(tiny: Tiny) -> None:
    """The table above holds for both."""
    llama_cpp = pytest.importorskip("llama_cpp")
    from reference.llama import ReferenceModel

    names = ("llama_n_ctx", "llama_n_ctx_seq", "llama_n_batch", "llama_n_ubatch")
    with ReferenceModel(tiny("llama")) as theirs:
        for options, *expected in SIZES:
            with theirs.session(**{"n_ctx": 0, **options}) as session:
                assert expected == [getattr(llama_cpp, name)(session.pointer) for name in names]


def test_threads_default_to_the_cores_there_are(llama: Model) -> None:
    """Physical ones that this process may use; the batch's number follows the other."""
    with llama.session() as session:
        assert (physical_cores(),) * 2 == (session.n_threads, session.n_threads_batch)
    with llama.session(n_threads=3) as session:
        assert (3, 3) == (session.n_threads, session.n_threads_batch)
    with llama.session(n_threads=1, n_threads_batch=2) as session:
        assert (1, 2) == (session.n_threads, session.n_threads_batch)


def test_a_context_beyond_training_warns_the_caller(llama: Model) -> None:
    """The warning points at the line that asked for it."""
    with pytest.warns(UserWarning, match="2048 tokens, the model was trained on 1024") as caught:
        llama.session(n_ctx=2000).close()
    assert __file__ == caught[0].filename


def test_an_absurd_context_length_asks_for_n_ctx(tiny: Tiny, tmp_path: Path) -> None:
    """A file may claim 2^31 - 1 tokens; a session of that size would only eat memory."""
    path = rewrite(tiny("llama"), tmp_path / "x.gguf", {"llama.context_length": 2**31 - 1})
    with Model.load(path) as model:
        with pytest.raises(ContextLengthError, match=r"context_length is 2147483647.*give n_ctx"):
            model.session()
        with model.session(n_ctx=256) as session:
            assert (1, 64) == session.decode([1, 2]).shape


@pytest.mark.parametrize("name", ["type_k", "type_v"])
def test_cache_blocks_have_to_divide_the_heads(name: str, tiny: Tiny) -> None:
    """As in llama.cpp: heads of 48 values do not fill whole blocks of 32."""
    with (
        Model.load(tiny("llama", n_embd=96, n_head=2, n_head_kv=1)) as model,
        pytest.raises(ValueError, match=rf"{name}='q8_0': its blocks of 32 do not divide this model's heads of 48"),
    ):
        model.session(**SMALL, **{name: "q8_0"})


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_untouched_cells_cost_no_memory(llama: Model) -> None:
    """A context of a million tokens is mapped, not filled; forking a short sequence copies only what it has."""

    def resident_mb() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    fresh(llama, [1, 2])
    before = resident_mb()
    with pytest.warns(UserWarning, match="trained on"):
        session = llama.session(n_ctx=2**20, n_seq_max=2, n_threads=1)
    with session:
        assert session.memory_nbytes > 2**29
        session.decode(ids(20))
        session.fork(0, 1)
        assert same(session.decode([5], seq_id=0), session.decode([5], seq_id=1))
        assert resident_mb() - before < 64


# ------------------------------------------------------------------------------------------------------ logits rows


def test_rows_asked_for_are_rows_of_all(llama: Model) -> None:
    """Whatever is asked for, in any order, is what "all" has there, but for the order of sums."""
    tokens = ids(9)

    def rows(wanted: Any) -> Rows:
        with llama.session(**SMALL) as session:
            return session.decode(tokens, logits=wanted)

    every = rows("all")
    assert (9, 64) == every.shape
    assert np.float32 == every.dtype
    assert near(every[-1:], rows("last"))
    assert same(rows("last"), rows([8]))
    assert same(every, rows(range(9)))
    assert near(every[[6, 2, 0]], rows([6, 2, 0]))
    assert same(rows([0, 2, 6])[[2, 1, 0]], rows([6, 2, 0]))
    assert (0, 64) == rows([]).shape


def test_rows_of_several_micro_batches_come_in_the_order_asked(llama: Model) -> None:
    """Indices are into the tokens given, however they are cut."""
    tokens = ids(23)
    with llama.session(**SMALL, n_ubatch=4) as session:
        every = session.decode(tokens, logits="all")
        session.clear()
        assert near(every[[21, 3, 4, 0, 22]], session.decode(tokens, logits=[21, 3, 4, 0, 22]))
        session.clear()
        assert near(every[-1:], session.decode(tokens))
        session.clear()
        assert (0, 64) == session.decode(tokens, logits=[]).shape
        assert near(fresh(llama, [*tokens, 5]), session.decode([5]))


class Unsearched(np.ndarray):
    """A row that cannot be searched by NumPy."""

    argmax = None  # type: ignore[assignment]


def test_argmax_is_numpys(llama: Model) -> None:
    """Of rows of every length and more threads than rows: the lowest place among equals, or the first NaN's."""
    state = np.random.RandomState(0)
    cases = [(n, n_rows) for n in (1, 2, 31, 32, 33, 64, 1000, 4099) for n_rows in (1, 2, 5)]
    batches = [state.randint(-9, 9, (n_rows, n)).astype(np.float32) for n, n_rows in cases]
    zeros, ends, broken = np.full((2, 70), -1, np.float32), np.zeros((2, 70), np.float32), np.zeros((3, 70), np.float32)
    zeros[0, [7, 40]], zeros[1, [7, 40]] = (0.0, -0.0), (-0.0, 0.0)
    ends[0, -1], ends[1, 31:33] = 1, 1
    broken[0, 0] = broken[1, [20, 50]] = broken[2, -1] = np.nan
    broken[1:, 5] = 3
    batches += [zeros, ends, broken, np.full((2, 70), -np.inf, np.float32)]
    expected = [rows.argmax(1).tolist() for rows in batches]
    with llama.session(n_threads=3) as session:
        backend = session._backends[-1]
        assert expected == [session.argmax(list(rows.view(Unsearched))) for rows in batches]
        backend._stop[0] = 1  # cancelled
        assert expected == [session.argmax(rows) for rows in batches]
        backend._stop[0] = 0
        assert [] == session.argmax([])


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0]],
        [np.zeros(3)],
        [np.zeros((1, 3), np.float32)],
        [np.zeros(0, np.float32)],
        [np.zeros(6, np.float32)[::2]],
        [np.zeros(3, np.float32), np.zeros(4, np.float32)],
    ],
)
def test_argmax_refuses_what_are_no_rows(rows: Any, llama: Model) -> None:
    """The row is named, and nothing is read."""
    with llama.session() as session, pytest.raises(ValueError, match=rf"rows\[{len(rows) - 1}\]: expected"):
        session.argmax(rows)


def test_rows_belong_to_the_caller(llama: Model) -> None:
    """They may be written to, and later computations leave them alone."""
    with llama.session(**SMALL) as session:
        first = session.decode([1])
        kept = first.copy()
        session.decode([2])
        assert same(kept, first)
        first[:] = 0
        session.trim(0, 1)
    assert not first.any()


@pytest.mark.parametrize("n_layer", [1, 3])
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_wanting_no_rows_computes_the_cache_alone(n_layer: int, flash_attn: bool, type_k: str, tiny: Tiny) -> None:
    """The next token's logits are as if the rows had been wanted; also where the last layer is the only one."""
    options = {**SMALL, "flash_attn": flash_attn, "type_k": type_k}
    with (
        Model.load(tiny("llama", n_layer=n_layer, n_head=2)) as model,
        model.session(**options) as session,
        model.session(**options) as other,
    ):
        session.decode(ids(6), logits=[])
        other.decode(ids(6))
        assert same(other.decode([3]), session.decode([3]))


# ---------------------------------------------------------------------------------------------------- reproducible


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_at_once_or_step_by_step(name: str, flash_attn: bool, tiny: Tiny) -> None:
    """Case E3: chunks of any size agree but for the order of sums; two identical runs agree to the last bit."""
    tokens = ids(64)
    with Model.load(tiny(name, n_swa=16) if name == "gemma3" else tiny(name)) as model:
        runs = []
        for n_ubatch in (64, 64, 32, 7, 1):
            with model.session(n_ctx=256, n_threads=2, n_ubatch=n_ubatch, flash_attn=flash_attn) as session:
                cold = session.decode(tokens, logits="all")
                session.clear()
                assert same(cold, session.decode(tokens, logits="all"))
                runs.append(cold)
        with model.session(n_ctx=256, n_threads=1, n_batch=7, flash_attn=flash_attn) as session:
            assert same(runs[3], session.decode(tokens, logits="all"))
        assert same(runs[0], runs[1])
        assert all(near(runs[0], run) for run in runs[2:])


TEXT = {  # the beginning of the same text about lighthouses
    "smollm2_path": [
        504, 1463, 282, 260, 33059, 5634, 351, 9935, 1150, 335, 13083, 33959, 288, 7432, 22088, 282, 5177, 7739, 30,
        3636, 260, 5034, 623, 9935, 592, 7233, 411, 17310, 282, 5692, 28, 3449, 20067, 11785, 3180, 28, 965, 2664, 28,
        284, 5087, 2811, 30, 4104, 768, 303, 11935, 10483, 1658, 335, 4866, 284, 737, 787, 40061, 418, 511, 28, 564,
        701, 1361, 3048, 601, 288,
    ],
    "gemma3_path": [
        2, 818, 4083, 529, 506, 63937, 12502, 607, 29371, 10035, 580, 17971, 71133, 531, 12582, 74703, 529, 13588,
        17240, 236761, 7178, 506, 24744, 1239, 29371, 964, 12043, 684, 41037, 529, 10810, 236764, 5769, 36352, 30494,
        3863, 236764, 1299, 4446, 236764, 532, 6861, 4314, 236761, 10950, 1346, 537, 16101, 18814, 1845, 580, 14855,
        532, 1202, 951, 64222, 657, 784, 236764, 840, 1331, 2036, 3517, 1091,
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", TEXT)
def test_batch_sizes_move_real_logits_little(path: str, request: pytest.FixtureRequest) -> None:
    """Case E3 on the real models: the top token's log-probability moves little, and near-ties apart it stays on top.

    Activations are rounded to 8 bits there, so single rows move by up to 0.2, in llama.cpp bit for bit the same.
    """
    tokens, runs = TEXT[path], []
    with Model.load(request.getfixturevalue(path)) as model:
        for n_batch, n_threads in ((64, 2), (64, 1), (7, 2)):
            with model.session(n_ctx=256, n_batch=n_batch, n_threads=n_threads) as session:
                rows = session.decode(tokens, logits=range(3, 64, 4)).astype(np.float64)
                runs.append(rows - np.logaddexp.reduce(rows, axis=1)[:, None])
    assert np.array_equal(runs[0], runs[1])  # the number of threads makes no difference below 512 cells
    best = runs[0].argmax(axis=1)[:, None]
    gaps = np.abs(np.take_along_axis(runs[2] - runs[0], best, axis=1))
    assert gaps[-1] < 0.1
    assert gaps.mean() < 0.1
    assert (runs[2].argmax(axis=1)[:, None] == best).mean() > 0.9


# -------------------------------------------------------------------------------------------- trim, fork, clear, order


@pytest.mark.parametrize("options", [{}, {"flash_attn": False}, {"type_k": "q8_0"}, {"n_ubatch": 3}], ids=str)
def test_trimming_and_decoding_again_gives_the_same_bits(options: dict[str, Any], llama: Model) -> None:
    """What was cut off leaves no trace."""
    with llama.session(**SMALL, **options) as session:
        session.decode(ids(12))
        expected = session.decode(ids(5, 1), logits="all")
        session.decode(ids(9, 2))
        session.trim(0, 12)
        assert (12, ids(12)) == (session.n_past(), session.tokens())
        assert same(expected, session.decode(ids(5, 1), logits="all"))
        session.trim(0, 100)
        assert 17 == session.n_past()
        session.trim(0, 0)
        assert (0, []) == (session.n_past(), session.tokens())
        assert same(fresh(llama, ids(12), **options), session.decode(ids(12)))


@STREAMS
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_forks_go_their_own_ways(name: str, flash_attn: bool, unified: bool, request: pytest.FixtureRequest) -> None:
    """A copy continues as the original would, neither sees what the other adds, and what the target had is gone."""
    model: Model = request.getfixturevalue(name)
    options = {"n_ctx": 1024, "n_threads": 1, "flash_attn": flash_attn}
    prompt, left, right = ids(30), ids(6, 1), ids(6, 2)
    with model.session(**options, n_seq_max=3, kv_unified=unified) as session, model.session(**options) as alone:
        session.decode(ids(8, 3), seq_id=2)
        session.decode(prompt, seq_id=0)
        session.fork(0, 2)
        assert prompt == session.tokens(2)
        found = [[session.decode([a]), session.decode([b], seq_id=2)] for a, b in zip(left, right, strict=True)]
        assert ([*prompt, *left], [*prompt, *right], []) == tuple(session.tokens(s) for s in (0, 2, 1))
        for which, tokens in enumerate((left, right)):
            alone.clear()
            alone.decode(prompt)
            for token, rows in zip(tokens, found, strict=True):
                assert near(alone.decode([token]), rows[which])
        session.clear(0)
        session.trim(2, 30)
        alone.trim(0, 30)
        assert near(alone.decode([9]), session.decode([9], seq_id=2))


def test_forking_to_itself_changes_nothing(llama: Model) -> None:
    """The tokens stay."""
    with llama.session(**SMALL) as session:
        session.decode([1, 2, 3])
        session.fork(0, 0)
        assert [1, 2, 3] == session.tokens()


@STREAMS
def test_what_a_fork_replaces_makes_room(unified: bool, llama: Model) -> None:
    """Cells that only the target had are free again."""
    with llama.session(**SMALL, n_seq_max=2, kv_unified=unified) as session:
        session.decode(ids(20))
        for _ in range(4):
            session.decode(ids(100), seq_id=1)
            session.fork(0, 1)
            session.trim(1, 0)
        assert near(fresh(llama, ids(100)), session.decode(ids(100), seq_id=1))


@pytest.mark.parametrize("options", [{}, {"swa_full": False, "n_ubatch": 8}, {"kv_unified": True}], ids=str)
def test_a_cleared_session_is_as_good_as_new(options: dict[str, Any], windowed: Model) -> None:
    """To the last bit, wherever the cells' next free place was."""
    with windowed.session(**SMALL, n_seq_max=2, **options) as session:
        for seed in range(3):
            session.decode(ids(70, seed), seq_id=seed % 2)
        session.trim(0, 60)
        session.clear()
        assert (0, 0, [], []) == (*(session.n_past(s) for s in (0, 1)), *(session.tokens(s) for s in (0, 1)))
        with windowed.session(**SMALL, n_seq_max=2, **options) as other:
            for seed in (5, 6):
                rows = [each.decode(ids(100, seed), seq_id=seed % 2, logits="all") for each in (session, other)]
                assert same(*rows)


def test_clearing_one_sequence_leaves_the_others(llama: Model) -> None:
    """Only that one is forgotten."""
    with llama.session(**SMALL, n_seq_max=2) as session, llama.session(**SMALL, n_seq_max=2) as other:
        for each in (session, other):
            each.decode(ids(5), seq_id=1)
        session.decode(ids(9))
        session.clear(0)
        assert (0, 5) == (session.n_past(0), session.n_past(1))
        assert same(other.decode([4], seq_id=1), session.decode([4], seq_id=1))


@STREAMS
@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_sequences_do_not_see_each_other(name: str, unified: bool, request: pytest.FixtureRequest) -> None:
    """Interleaved, in batches and alone, each sequence has the logits of its own tokens."""
    model: Model = request.getfixturevalue(name)
    prompts = [ids(n, n) for n in (20, 7, 33)]
    with model.session(n_ctx=1024, n_threads=1, n_seq_max=3, kv_unified=unified, n_ubatch=16) as session:
        rows = session.decode_batch([(s, prompt, "all") for s, prompt in enumerate(prompts)])
        steps = [session.decode_batch([(s, [5 + s + i], "last") for s in (2, 0, 1)]) for i in range(4)]
        assert [prompts[s] + [5 + s + i for i in range(4)] for s in range(3)] == [session.tokens(s) for s in range(3)]
    for at, s in enumerate((2, 0, 1)):
        with model.session(**SMALL) as alone:
            assert near(alone.decode(prompts[s], logits="all"), rows[s])
            for i, step in enumerate(steps):
                assert near(alone.decode([5 + s + i]), step[at])


def test_streams_alone_or_interleaved_give_the_same_bits(llama: Model) -> None:
    """With a stream of its own a sequence lies in the same cells as alone."""
    with llama.session(n_ctx=512, n_threads=1, n_seq_max=2) as session, llama.session(**SMALL) as alone:
        session.decode(ids(11, 1), seq_id=1)
        for token in ids(4):
            session.decode([token + 1], seq_id=1)
            assert same(alone.decode([token]), session.decode([token], seq_id=0))


def test_a_batch_may_be_an_iterator_that_asks_the_session(llama: Model) -> None:
    """All of the batch is taken before any of it is looked at."""

    def batch() -> Iterator[Any]:
        yield 0, [1 + session.n_past(0)], "last"
        session.decode([7], seq_id=0)
        yield 1, [7, 1 + session.n_past(1)], "last"

    with llama.session(**SMALL, n_seq_max=2) as session:
        rows = session.decode_batch(batch())
        assert [[7, 1], [7, 1]] == [session.tokens(s) for s in range(2)]
        assert near(rows[0], rows[1])
        assert [] == session.decode_batch(iter([]))


# ----------------------------------------------------------------------------------------------------------- windows


@STREAMS
@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_window_sees_the_same_in_a_small_cache(flash_attn: bool, unified: bool, windowed: Model) -> None:
    """Windowed layers with a full cache and with one that forgets agree, past many windows and in any chunks."""
    tokens = ids(700)
    options = {"n_ctx": 1024, "n_threads": 2, "n_ubatch": 32, "flash_attn": flash_attn, "kv_unified": unified}
    with windowed.session(**options) as full, windowed.session(**options, swa_full=False) as small:
        assert small.memory_nbytes < full.memory_nbytes
        for start, stop in ((0, 300), (300, 301), (301, 420), (420, 690)):
            assert near(full.decode(tokens[start:stop]), small.decode(tokens[start:stop]))
        for token in tokens[690:]:
            assert near(full.decode([token]), small.decode([token]))


def test_a_small_window_cache_cannot_go_back_far(windowed: Model) -> None:
    """What a trim would need and the cache has dropped is a typed error, and the session goes on."""
    with windowed.session(n_ctx=1024, n_threads=1, n_ubatch=32, swa_full=False) as session:
        session.decode(ids(600))
        with pytest.raises(ContextLengthError, match="windowed layers"):
            session.trim(0, 100)
        assert 600 == session.n_past()
        session.trim(0, 598)
        session.decode(ids(3, 1))
        assert 601 == session.n_past()
        session.trim(0, 0)
        assert near(fresh(windowed, ids(9)), session.decode(ids(9)))


# ------------------------------------------------------------------------------------------------- random histories


class History:
    """A random series of decodes, trims, forks and clears, on options drawn with it."""

    def __init__(self, seed: int, *, one_micro_batch: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.n_seq = rng.choice([1, 1, 2, 3])
        self.options: dict[str, Any] = {
            "n_ctx": rng.choice([256, 300, 512, 1024]), "n_seq_max": self.n_seq, "kv_unified": rng.random() < 0.5,
            "swa_full": rng.random() < 0.4, "flash_attn": rng.random() < 0.6, "n_threads": rng.choice([1, 2]),
            "n_ubatch": rng.choice([512, 64, 16, 7]),
        }  # fmt: skip
        self.limit = self.options["n_ubatch"] if one_micro_batch else 200

    def batch(self) -> list[tuple[int, list[int], Any]]:
        rng = self.rng
        items: list[tuple[int, list[int], Any]] = []
        for seq_id in rng.sample(range(self.n_seq), rng.randint(1, self.n_seq)):
            n = min(rng.choice([1, 1, 1, 2, 5, 17, 40, 100]), self.limit // self.n_seq)
            wanted = rng.choice(["last", "all", sorted(rng.sample(range(n), rng.randint(0, n)))])
            items.append((seq_id, [rng.randrange(64) for _ in range(n)], wanted))
        return items

    def change(self, session: Session) -> tuple[Any, ...]:
        """Draw something else than a decode: the method's name and its arguments."""
        rng, seq_id = self.rng, self.rng.randrange(self.n_seq)
        n_past = session.n_past(seq_id)
        fork = ("fork", seq_id, (seq_id + 1) % self.n_seq) if self.n_seq > 1 else ("clear", 0)
        trim = ("trim", seq_id, rng.choice([n_past, max(0, n_past - rng.choice([1, 3, 20])), rng.randint(0, n_past)]))
        return rng.choice([trim, trim, fork, ("clear", seq_id), ("clear",)])


@pytest.mark.parametrize("seed", range(16))
def test_random_histories_give_what_each_sequence_gives_alone(seed: int, llama: Model, windowed: Model) -> None:
    """Whatever happened before, to whomever: the rows are those of the sequence's own tokens in a fresh session.

    llama.cpp does worse here: in a cache with windows, trying whether several micro-batches fit already drops cells.
    """
    model, history = (llama, windowed)[seed % 4 > 0], History(seed, one_micro_batch=False)
    with model.session(**history.options) as session:
        for _ in range(12):
            try:
                batch = history.batch()
                found = session.decode_batch(batch)
                name, *arguments = history.change(session)
                before = [session.tokens(s) for s in range(history.n_seq)]
                getattr(session, name)(*arguments)
            except ContextLengthError:
                continue
            for (seq_id, ids, wanted), rows in zip(batch, found, strict=True):
                first = len(before[seq_id]) - len(ids)
                places = {"last": [len(ids) - 1], "all": range(len(ids))}[wanted] if isinstance(wanted, str) else wanted
                with model.session(n_ctx=1024, n_threads=2, flash_attn=history.options["flash_attn"]) as alone:
                    assert near(alone.decode(before[seq_id], logits=[first + i for i in places]), rows)


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_give_llama_cpps_bits(seed: int, tiny: Tiny, llama: Model, windowed: Model) -> None:
    """To the last bit, as long as llama.cpp's own cache is sound: one micro-batch at a time, and never full."""
    pytest.importorskip("llama_cpp")
    from reference.llama import ReferenceModel

    history = History(seed, one_micro_batch=True)
    model = (llama, windowed)[seed % 2]
    path = tiny("gemma3", n_swa=16, n_layer=3, swa_pattern=3) if seed % 2 else tiny("llama")
    with (
        ReferenceModel(path) as reference,
        reference.session(**history.options) as theirs,
        model.session(**history.options) as ours,
    ):
        for _ in range(25):
            try:
                batch = history.batch()
                found = ours.decode_batch(batch)
                name, *arguments = history.change(ours)
                getattr(ours, name)(*arguments)
            except ContextLengthError:
                break
            for rows, expected in zip(found, theirs.decode_batch(batch), strict=True):
                assert same(expected, rows)
            getattr(theirs, name)(*arguments)
            assert [theirs.n_past(s) for s in range(history.n_seq)] == [ours.n_past(s) for s in range(history.n_seq)]


# ----------------------------------------------------------------------------------------------------- a full context


@pytest.mark.parametrize("options", [{}, {"n_ubatch": 8}, {"n_batch": 8}], ids=str)
def test_what_does_not_fit_changes_nothing(options: dict[str, Any], llama: Model) -> None:
    """One token too many is refused before anything is computed; what fits still fits."""
    with llama.session(**SMALL, **options) as session:
        with pytest.raises(ContextLengthError, match="257 more do not fit its context of 256"):
            session.decode(ids(257))
        assert 0 == session.n_past()
        session.decode(ids(250))
        with pytest.raises(ContextLengthError, match="has 250 tokens; 7 more"):
            session.decode(ids(7))
        assert (250, ids(250)) == (session.n_past(), session.tokens())
        session.decode(ids(6))
        with pytest.raises(ContextLengthError):
            session.decode([1])
        session.trim(0, 10)
        assert near(fresh(llama, [*ids(250)[:10], 3]), session.decode([3]))


@pytest.mark.parametrize("n_ubatch", [512, 16])
def test_sequences_share_a_unified_cache(n_ubatch: int, llama: Model) -> None:
    """There is room for all together as for one; a batch that does not fit is refused whole."""
    with llama.session(**SMALL, n_seq_max=3, kv_unified=True, n_ubatch=n_ubatch) as session:
        session.decode(ids(200), seq_id=0)
        with pytest.raises(ContextLengthError, match="no room for 60 more tokens in the cache of 256"):
            session.decode_batch([(1, ids(40), "last"), (2, ids(20), "last")])
        assert (200, 0, 0) == tuple(session.n_past(s) for s in range(3))
        session.decode_batch([(1, ids(36), "last"), (2, ids(20), "last")])
        with pytest.raises(ContextLengthError):
            session.decode([1], seq_id=2)
        session.trim(0, 100)
        assert near(fresh(llama, [*ids(20), 1]), session.decode([1], seq_id=2))


# ------------------------------------------------------------------------------------------------- stopped half-way


class Stop:
    """Stands in for `Scheduler.compute` and fails at the n-th call in one of the ways it can."""

    def __init__(self, session: Session, at: int, how: BaseException | bool) -> None:
        self.compute, self.left, self.how = session._scheduler.compute, at, how

    def __call__(self, graph: Any) -> bool:
        self.left -= 1
        if self.left:
            return self.compute(graph)
        if isinstance(self.how, BaseException):
            raise self.how
        return False


@pytest.mark.parametrize("options", [{}, {"swa_full": False}, {"kv_unified": True, "swa_full": False}], ids=str)
@pytest.mark.parametrize("how", [False, BackendError("broken"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("at", [1, 3])
def test_a_stopped_computation_leaves_what_was_computed(
    at: int, how: BaseException | bool, options: dict[str, Any], windowed: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches that were done stay, the one that was not leaves nothing, and going on gives the same bits."""
    options = {"n_ctx": 512, "n_threads": 1, "n_seq_max": 2, "n_ubatch": 16, **options}
    with windowed.session(**options) as session, windowed.session(**options) as other:
        for each in (session, other):
            each.decode(ids(100, 1))
            each.decode(ids(30, 2), seq_id=1)
        monkeypatch.setattr(session._scheduler, "compute", Stop(session, at, how))
        with pytest.raises(type(how) if isinstance(how, BaseException) else BackendError):
            session.decode(ids(80))
        monkeypatch.undo()
        done = 16 * (at - 1)
        assert (100 + done, 30) == (session.n_past(0), session.n_past(1))
        assert ids(100, 1) + ids(80)[:done] == session.tokens()
        if done:
            other.decode(ids(80)[:done])
        for tokens, seq_id in ((ids(80)[done:], 0), (ids(3), 1), ([5], 0)):
            rows = [each.decode(tokens, seq_id=seq_id, logits="all") for each in (session, other)]
            assert same(*rows)


def test_an_interrupt_between_placing_and_computing_is_undone(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an exception comes from, no cell keeps a token that was not computed."""
    with llama.session(**SMALL) as session, llama.session(**SMALL) as other:
        for each in (session, other):
            each.decode([1, 2, 3])
        for name in ("_compute", "_build"):

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(session, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    session.decode([4, 5])
            assert 3 == session.n_past()
        assert same(other.decode([4, 5]), session.decode([4, 5]))


CHANGES: list[Callable[[Session], object]] = [
    lambda s: s.trim(0, 20), lambda s: s.trim(0, 0), lambda s: s.clear(0), lambda s: s.clear(), lambda s: s.fork(1, 0),
    lambda s: s.shift(0, 5, 10), lambda s: s.decode([7]), lambda s: s.decode(ids(20)),
    lambda s: s.decode_batch([(0, [7], "last"), (1, [8], "last")]),
]  # fmt: skip


@STREAMS
@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_an_interrupt_at_any_line_leaves_cells_and_tokens_in_agreement(
    change: int, unified: bool, llama: Model
) -> None:
    """Ctrl-C comes between any two lines: each sequence goes on with what it says it holds, and no cell is lost."""
    files = {name for name in sys.modules if name in ("ggufpy.session", "ggufpy.memory", "ggufpy.cells")}
    at, n_lines = 0, 1
    options = {"n_ctx": 512, "n_threads": 1, "n_seq_max": 2, "kv_unified": unified}
    with llama.session(**options) as session:
        while at < n_lines:
            session.clear()
            session.decode_batch([(0, ids(40), "last"), (1, ids(30, 1), "last")])
            session.decode_batch([(0, [5], "last"), (1, [6], "last")])
            n_lines, left = 0, at

            def trace(frame: Any, event: str, _: object) -> Any:
                nonlocal n_lines, left
                if frame.f_globals.get("__name__") not in files or left < 0:
                    return None
                if event == "line":
                    n_lines, left = n_lines + 1, left - 1
                    if left < 0:
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                CHANGES[change](session)
            except KeyboardInterrupt:
                n_lines += 1
            finally:
                sys.settrace(before)
            agree(session)
            at += 1 + n_lines // 30  # of many lines some
    assert at >= 5


def agree(session: Session) -> None:
    """Check that cells and tokens say the same."""
    (cache,) = session._memory.caches
    for seq_id in range(session.n_seq_max):
        stream, row = cache.stream_row(seq_id)
        cells = cache.cells[stream]
        assert list(range(session.n_past(seq_id))) == sorted(cells.pos[cells.has[row]].tolist())
    for cells in cache.cells:
        used = np.flatnonzero(cells.pos >= 0)
        assert used.tolist() == np.flatnonzero(cells.has.any(axis=0)).tolist()
        assert len(used) == cells.used
        assert not len(used) or used[-1] < cells.end


@pytest.mark.parametrize("pooling", [None, "mean"])
def test_a_stopped_embedding_leaves_its_sequence_empty(
    pooling: Any, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be asked for again, and its neighbour has noticed nothing."""
    with llama.session(**SMALL, n_seq_max=2) as session, llama.session(**SMALL, n_seq_max=2) as other:
        for each in (session, other):
            each.decode(ids(5))
        expected = other.embed(ids(9), seq_id=1, pooling=pooling)
        monkeypatch.setattr(session._scheduler, "compute", Stop(session, 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            session.embed(ids(9), seq_id=1, pooling=pooling)
        monkeypatch.undo()
        assert (5, 0) == (session.n_past(0), session.n_past(1))
        assert same(expected, session.embed(ids(9), seq_id=1, pooling=pooling))
        assert same(other.decode([3]), session.decode([3]))


def test_a_cancelled_computation_is_a_typed_error(llama: Model) -> None:
    """What ggml's abort callback stops can be decoded again."""
    with llama.session(**SMALL) as session:
        session.decode([1, 2, 3])
        session._scheduler.cancel()
        with pytest.raises(StoppedError, match="stopped"):
            session.decode([4])
        assert 3 == session.n_past()
        assert near(fresh(llama, [1, 2, 3, 4]), session.decode([4]))


def test_cancelling_when_nothing_computes_does_nothing(llama: Model) -> None:
    """Calls that begin later are not stopped: prompts, short steps and embeddings."""
    with llama.session(**SMALL) as session, llama.session(**SMALL) as other:
        for tokens in (ids(9), [4], [5], [6]):
            session.cancel()
            assert same(other.decode(tokens), session.decode(tokens))
        session.trim(0, 0)
        session.cancel()
        assert (3, 128) == session.embed([1, 2, 3]).shape
    session.cancel()


@pytest.mark.parametrize("options", [{}, {"kv_unified": True, "n_seq_max": 2}], ids=str)
def test_a_prompt_is_cancelled_between_its_micro_batches(
    options: dict[str, Any], llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed stays, to the last bit, and the rest can be given again."""
    options = {"n_ctx": 512, "n_threads": 1, "n_ubatch": 16, **options}
    with llama.session(**options) as session, llama.session(**options) as other:
        compute, computed = session._compute_graph, []

        def computing(*arguments: Any) -> None:
            compute(*arguments)
            computed.append(1)
            if len(computed) == 3:
                session.cancel()

        monkeypatch.setattr(session, "_compute_graph", computing)
        with pytest.raises(StoppedError, match="the computation was stopped"):
            session.decode(ids(200))
        assert (48, ids(200)[:48]) == (session.n_past(), session.tokens())
        other.decode(ids(200)[:48])
        assert same(other.decode(ids(200)[48:]), session.decode(ids(200)[48:]))


def test_another_thread_cancels_a_prompt_in_the_middle(smollm2_path: Path) -> None:
    """Long before it would have ended, and the thread that waits for its turn is not stopped."""
    with Model.load(smollm2_path) as model, model.session(n_ctx=2048, n_ubatch=64, n_threads=1, n_seq_max=2) as session:
        prompt, raised, row = np.random.default_rng(0).integers(2, 40000, 900).tolist(), [], []

        def compute() -> None:
            try:
                session.decode(prompt)
            except StoppedError as error:
                raised.append(error)

        worker = threading.Thread(target=compute)
        worker.start()
        while not session._runs:  # nothing computes yet
            time.sleep(0.001)
        waiting = threading.Thread(target=lambda: row.append(session.decode([5], seq_id=1)))
        waiting.start()
        time.sleep(0.05)
        session.cancel()
        worker.join(20)
        waiting.join(20)
        assert (1, 1) == (len(raised), len(row))
        n_past = session.n_past()
        assert n_past < 900
        assert 0 == n_past % 64
        assert prompt[:n_past] == session.tokens()
        assert 1 == session.n_past(1)
        session.decode(prompt[n_past : n_past + 3])
        assert n_past + 3 == session.n_past()


# ------------------------------------------------------------------------------------------------- a cache in a file


def test_a_cache_in_a_file_gives_the_same_bits(llama: Model, windowed: Model, tmp_path: Path) -> None:
    """The file has no name, is mapped, and goes with the session."""
    gc.collect()  # what earlier tests left open must not be closed in between
    n_files = len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0
    for model in (llama, windowed):
        with model.session(**SMALL, n_seq_max=2, kv_cache_dir=tmp_path) as session:
            with model.session(**SMALL, n_seq_max=2) as other:
                for each in (session, other):
                    each.decode(ids(40))
                    each.fork(0, 1)
                assert all(same(other.decode([i], seq_id=1), session.decode([i], seq_id=1)) for i in range(2, 9))
            assert [] == list(tmp_path.iterdir())
            if sys.platform == "linux":
                assert str(tmp_path) in Path("/proc/self/maps").read_text()
        del session
        if sys.platform == "linux":
            assert str(tmp_path) not in Path("/proc/self/maps").read_text()
            assert n_files == len(list(Path("/proc/self/fd").iterdir()))


def test_a_folder_for_the_cache_has_to_be_one(llama: Model, tmp_path: Path) -> None:
    """It is asked for by its name, and opened at once."""
    with pytest.raises(ValueError, match="kv_cache_dir: expected a folder's path or None, got 3"):
        llama.session(**SMALL, kv_cache_dir=3)
    with pytest.raises(FileNotFoundError):
        llama.session(**SMALL, kv_cache_dir=tmp_path / "nowhere")


FULL = """
import resource, sys
from ggufpy import BackendError, Model
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
model = Model.load(sys.argv[1])
model.session(n_ctx=256, kv_cache_dir=sys.argv[2]).decode([1, 2, 3])
try:
    model.session(n_ctx=8192, kv_cache_dir=sys.argv[2])
except BackendError as error:
    print(error)
"""


def test_a_disk_without_room_is_an_error_before_anything_is_written(tiny: Tiny, tmp_path: Path) -> None:
    """It names the folder, what is needed and what is free; no signal comes later."""
    told = run(FULL, tiny("llama", n_ctx_train=8192), tmp_path)
    assert told.startswith(f"{tmp_path}: expected room for a file of ")
    assert "are free (File too large)" in told


# --------------------------------------------------------------------------------------------------- types of caches


@pytest.mark.parametrize("name", ["llama", "windowed"])
@pytest.mark.parametrize("type", CACHE_TYPES)
def test_caches_of_every_type_are_close_to_exact(type: str, name: str, request: pytest.FixtureRequest) -> None:
    """Coarser keys and values move the logits, but not far; and fewer bits take less memory."""
    model: Model = request.getfixturevalue(name)
    tokens = ids(40)
    with model.session(**SMALL, type_k="f32", type_v="f32") as exact:
        expected, nbytes = exact.decode(tokens, logits="all"), exact.memory_nbytes
    limit = {"f32": 0, "f16": 1e-5, "bf16": 1e-3, "q8_0": 1e-3}.get(type, 0.2)
    for options in ({"type_k": type}, {"type_v": type}, {"type_k": type, "type_v": type}):
        with model.session(**SMALL, **options) as session:
            found = session.decode(tokens, logits="all")
            assert np.square(found - expected).sum() <= limit * np.square(expected).sum()
            assert session.memory_nbytes < nbytes or type == "f32"
    with model.session(**SMALL, type_k=type, flash_attn=False) as session:
        found = session.decode(tokens, logits="all")
        assert np.square(found - expected).sum() <= max(limit, 1e-5) * np.square(expected).sum()


# ---------------------------------------------------------------------------------------------------------- lifetime


def test_a_closed_session_refuses_everything_but_closing(llama: Model) -> None:
    """Case E6: a second close does nothing, any other use names the fault."""
    session = llama.session(**SMALL)
    session.decode([1])
    session.close()
    session.close()
    calls: list[Callable[[], object]] = [
        lambda: session.decode([1]), lambda: session.decode_batch([(0, [1], "last")]), session.n_past, session.tokens,
        lambda: session.argmax([np.zeros(1, np.float32)]),
        lambda: session.trim(0, 0), lambda: session.fork(0, 0), lambda: session.embed([1]), session.clear,
        session.__enter__,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError, match="the session is closed"):
            call()
    assert "closed" in repr(session)
    assert 64 == session.n_vocab


def test_sessions_outlive_their_model(tiny: Tiny) -> None:
    """What a session needs stays until it is closed too."""
    model = Model.load(tiny("llama"))
    expected = fresh(model, [1, 2, 3])
    with model.session(**SMALL) as session:
        model.close()
        del model
        assert same(expected, session.decode([1, 2, 3]))


def test_a_session_closes_with_its_block(llama: Model) -> None:
    """Also where the block ends with an exception."""
    with pytest.raises(ZeroDivisionError), llama.session(**SMALL) as session:
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        session.decode([1])


# ---------------------------------------------------------------------------------------------------------- threads


PRELUDE = f"""{IN_THREADS}
import numpy as np
def greedy(session, token, n, seq_id=0):
    made = []
    for _ in range(n):
        token = int(session.decode([token], seq_id=seq_id)[0].argmax())
        made.append(token)
    return made
"""


def test_sessions_run_side_by_side(tiny: Tiny) -> None:
    """Case E4: four threads with a session each on one model get what they get alone."""
    script = """
def job(i):
    with model.session(n_threads=1) as session:
        found[i] = greedy(session, 10 + i, 40)
found = {}
for i in range(4):
    job(i)
expected = dict(found)
found.clear()
assert in_threads(*(lambda i=i: job(i) for i in range(4))) == []
assert found == expected, (found, expected)
"""
    run(PRELUDE + script, tiny("llama"))


def test_threads_queue_for_a_session(tiny: Tiny) -> None:
    """Case E4: a session shared by four threads does one thing at a time; each sequence is as if alone."""
    script = """
expected = {i: greedy(model.session(n_threads=1), 10 + i, 30) for i in range(4)}
with model.session(n_threads=1, n_seq_max=4) as session:
    found = {}
    def job(i):
        found[i] = greedy(session, 10 + i, 30, i)
    assert in_threads(*(lambda i=i: job(i) for i in range(4))) == []
    assert found == expected, (found, expected)
    assert [session.n_past(i) for i in range(4)] == [30] * 4
"""
    run(PRELUDE + script, tiny("llama"))


def test_closing_waits_for_a_running_computation(tiny: Tiny) -> None:
    """Case E4: a thread that closes the session of another ends it cleanly between two computations."""
    script = """
for _ in range(10):
    session = model.session(n_threads=1)
    started = threading.Event()
    def work():
        while True:
            session.trim(0, 0)
            session.decode(list(range(2, 60)), logits="all")
            started.set()
    def close():
        started.wait(30)
        session.close()
    errors = in_threads(work, close)
    assert [type(e) for e in errors] == [ClosedError], errors
"""
    run(PRELUDE + script, tiny("llama"))


def test_two_models_run_side_by_side(tiny: Tiny) -> None:
    """Case E4: different models in different threads do not disturb each other."""
    script = """
other = Model.load(sys.argv[2])
def job(m):
    with m.session(n_threads=1) as session:
        found[m] = greedy(session, 10, 40)
found = {}
job(model), job(other)
expected = dict(found)
found.clear()
assert in_threads(lambda: job(model), lambda: job(other)) == []
assert found == expected and found[model] != found[other]
"""
    run(PRELUDE + script, tiny("llama"), tiny("gemma3"))


# ----------------------------------------------------------------------------------------------- weights gone wrong


def test_broken_weights_cannot_crash(tiny: Tiny, tmp_path: Path) -> None:
    """NaN, infinities and noise as weights, in every type of model and cache, come out as numbers, if strange ones."""
    script = """
import itertools
rng = np.random.default_rng(0)
for path in sys.argv[2:]:
    raw = np.fromfile(path, np.uint8)
    start = GGUFFile(path).shards[0].data_offset
    for fill in (0x7E, 0x7C, 0xFF, None):
        broken = raw.copy()
        at = start + np.flatnonzero(rng.random(len(raw) - start) < (0.02 if fill else 1))
        broken[at] = rng.integers(0, 256, len(at)) if fill is None else fill
        broken.tofile(path + ".broken")
        with Model.load(path + ".broken") as model:
            for flash, kind in itertools.product((True, False), ("f16", "q8_0", "q4_0", "q5_1", "iq4_nl")):
                types = {"type_k": kind, "type_v": kind if flash else "f16"}
                with model.session(n_ctx=256, n_threads=1, flash_attn=flash, **types) as s:
                    assert s.decode(list(range(2, 20)), logits="all").shape == (18, 64)
                    s.decode([5])
            try:
                model.generate([2, 3], max_tokens=3)
            except SamplingError as error:
                assert "NaN" in str(error) or "left" in str(error)
"""
    paths = []
    for i, options in enumerate(
        [{}, {"n_expert": 64, "n_expert_used": 8, "n_ff": 32}, {"type": "q4_k"}, {"type": "mxfp4"}]
    ):
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(tiny("llama", n_layer=2, **options).read_bytes())
    run(PRELUDE + script, tiny("llama"), *paths)


def test_sorting_experts_with_nan_is_harmless(tiny: Tiny) -> None:
    """Rows of the router with NaN in any number and place still sort into each expert once."""
    script = """
from ggufpy.backend import Backend, Scheduler, cpu_device
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context
rng = np.random.default_rng(0)
for n in (2, 15, 16, 17, 33, 64, 128, 1024):
    g = Context(8)
    x, graph = g.input(GGMLType.F32, n, 256), g.new_graph()
    order = g.argsort(x, 1)
    g.output(order)
    graph.expand(order)
    scheduler = Scheduler([Backend(cpu_device())], 64)
    scheduler.alloc(graph)
    for i in range(20):
        rows = rng.standard_normal((256, n)).astype(np.float32)
        rows = np.round(rows) if i % 2 else rows
        rows[rng.random((256, n)) < rng.random((256, 1)) ** 3] = np.nan
        x.set(rows)
        assert scheduler.compute(graph)
        assert (np.sort(order.get(), axis=1) == np.arange(n)).all()
"""
    run(PRELUDE + script, tiny("llama"))
