"""Context shift: tokens leave a sequence, those behind them move up, and the logits are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rows import ids

from ggufpy import ContextLengthError, Model, Session, UnsupportedArchitectureError
from ggufpy.memory import KVCache
from ggufpy.types import dequantize

Tiny = Callable[..., Path]
LATENT: dict[str, Any] = {"n_embd_head_k_mla": 64, "n_embd_head_v_mla": 32, "n_head_kv": 1}
WINDOWED: dict[str, Any] = {"n_swa": 16, "n_layer": 3, "swa_pattern": 3}
LONG: dict[str, Any] = {"rope_attn_factor": 1.2, "n_ctx_orig_yarn": 64}
YARN: dict[str, Any] = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_ctx_orig_yarn": 64}
Q8: dict[str, Any] = {"type_k": "q8_0", "type_v": "q8_0"}


def open_session(model: Model, **options: Any) -> Session:
    return model.session(**{"n_ctx": 512, "n_threads": 1, **options})


def keys(session: Session, il: int, n: int) -> np.ndarray:
    """Return what a layer's cache has for the first n positions, float32 [n, width]."""
    (cache,) = (cache for cache in session._memory.caches if isinstance(cache, KVCache) and il in cache.k)
    cells = cache.cells[0]
    at = np.flatnonzero(cells.has[0, : cells.end])
    at = at[np.argsort(cells.pos[at])]
    assert list(range(n)) == cells.pos[at].tolist()
    k = cache.k[il]
    rows = k.get().reshape(cache.n_stream, cache.size, -1)[0][at]
    return dequantize(rows, k.type, (n, k.ne[0])) if k.type.is_quantized else rows.astype(np.float32)


@pytest.mark.parametrize(
    ("arch", "variant", "options"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"type_k": "f32"}),
        ("llama", {}, {"flash_attn": False}),
        ("llama", YARN, {"type_k": "f32"}),
        ("llama", {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, {}),
        ("llama", {"rope_factors": True}, {}),
        ("phi3", {"rope_scaling_type": "longrope", "rope_factors": True, **LONG}, {}),
        ("qwen3", {}, {}),
        ("phi2", {}, {}),
        ("deepseek2", LATENT, {}),
        ("deepseek2", YARN, {}),
        ("deepseek2", LATENT, Q8),
        ("mistral4", LATENT, Q8),
        ("phi2", {"n_embd": 384, "n_rot": 32}, Q8),
        ("llama", {}, Q8),
        ("gemma3", WINDOWED, {}),
        ("gemma3n", {}, {}),
        ("gemma4", {}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_keys_are_those_of_their_new_positions(
    arch: str, variant: dict[str, Any], options: dict[str, Any], tiny: Tiny
) -> None:
    """In the first layer, where keys depend on nothing else, they are what the remaining tokens get by themselves.

    All kinds of rotation and their scaling: llama.cpp scales what YaRN and longrope stretch once more with each shift.
    Quantized heads of which a part rotates in whole blocks, latent keys among them, end llama.cpp (GGML_ABORT).
    """
    model = Model.load(tiny(arch, **variant))
    with model, open_session(model, **options) as session, open_session(model, **options) as fresh:
        session.decode(ids(60))
        session.shift(0, 4, 20)
        assert ids(60)[:4] + ids(60)[24:] == session.tokens()
        fresh.decode(session.tokens())
        found, expected = keys(session, 0, 40), keys(fresh, 0, 40)
        limit = 2e-2 if options is Q8 else 5e-3
        assert np.abs(found - expected).max() < limit * np.abs(expected).max()


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_a_shifted_sequence_goes_on(unified: bool, type_k: str, llama: Model) -> None:
    """Its steps, fast ones too, see what is left; its neighbour keeps what it had, to the last bit unless quantized."""
    options = {"kv_unified": unified, "n_seq_max": 2, "type_k": type_k, "type_v": type_k}
    with open_session(llama, **options) as session, open_session(llama, **options) as other:
        for each in (session, other):
            each.decode(ids(100))
            each.decode(ids(30, 1), seq_id=1)
        session.decode([5])
        session.shift(0, 0, 40)
        assert (61, 30) == (session.n_past(0), session.n_past(1))
        rows = [session.decode([i]) for i in range(2, 50)]
        assert 109 == session.n_past()
        assert all(np.isfinite(row).all() for row in rows)
        neighbours = [each.decode([7], seq_id=1) for each in (session, other)]
        assert np.allclose(*neighbours, atol=0 if type_k == "f16" else 0.5, rtol=0)


def test_a_full_context_goes_on_after_a_shift(llama: Model) -> None:
    """Where no further token fits, dropping some makes room again and again."""
    with open_session(llama, n_ctx=256) as session:
        session.decode(ids(256))
        for _ in range(3):
            with pytest.raises(ContextLengthError):
                session.decode([5])
            session.shift(0, 8, 100)
            session.decode(ids(100, 1))
        assert (256, ids(8)) == (session.n_past(), session.tokens()[:8])


def test_shifting_nothing_and_all_behind(llama: Model) -> None:
    """No token less changes nothing; dropping the end is a trim, to the last bit."""
    with open_session(llama) as session, open_session(llama) as other:
        for each in (session, other):
            each.decode(ids(30))
        session.shift(0, 10, 0)
        session.shift(0, 12, 18)
        other.trim(0, 12)
        assert other.tokens() == session.tokens()
        assert np.array_equal(other.decode([5]), session.decode([5]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((2, 0, 1), "seq_id"), ((0, -1, 1), "n_keep"), ((0, 31, 0), "n_keep"), ((0, 0, 31), "n_discard"),
        ((0, 20, 11), "n_discard: expected an integer from 0 to 10"), ((0, 0, -1), "n_discard"),
        ((0, 0, True), "n_discard"), ((0, 1.5, 1), "n_keep"), ((1, 0, 1), "n_discard"),
    ],
)  # fmt: skip
def test_wrong_numbers_change_nothing(arguments: tuple[Any, Any, Any], named: str, llama: Model) -> None:
    """They are named, with the range."""
    with open_session(llama, n_seq_max=2) as session:
        session.decode(ids(30))
        with pytest.raises(ValueError, match=named):
            session.shift(*arguments)
        assert ids(30) == session.tokens()


@pytest.mark.parametrize(
    ("arch", "named"),
    [
        ("lfm2", "recurrent layers do not know positions"),
        ("qwen2vl", "a token has several positions"),
        ("gpt2", "positions are a part of what it stores"),
    ],
)
def test_memories_that_cannot_say_so(arch: str, named: str, tiny: Tiny) -> None:
    """Plainly, and nothing has changed."""
    with Model.load(tiny(arch)) as model, open_session(model) as session:
        session.decode(ids(30))
        with pytest.raises(UnsupportedArchitectureError, match=named):
            session.shift(0, 2, 5)
        assert ids(30) == session.tokens()


def test_shared_cells_are_not_moved(llama: Model) -> None:
    """A fork in a unified cache would be moved too; once it is gone, there is nothing in the way."""
    with open_session(llama, n_seq_max=2, kv_unified=True) as session:
        session.decode(ids(30))
        session.fork(0, 1)
        with pytest.raises(ContextLengthError, match="a fork shares its cells"):
            session.shift(0, 2, 5)
        session.clear(1)
        session.shift(0, 2, 5)
        assert 25 == session.n_past()


def test_a_window_that_has_lost_what_it_would_see_again(tiny: Tiny) -> None:
    """A small window cache shifts where the window stays among what it has."""
    with Model.load(tiny("gemma3", **WINDOWED)) as model, open_session(model, swa_full=False, n_ubatch=16) as session:
        session.decode(ids(400))
        with pytest.raises(ContextLengthError, match="have lost positions before 100"):
            session.shift(0, 100, 295)
        assert 400 == session.n_past()
        session.shift(0, 100, 200)
        assert np.isfinite(session.decode(ids(20))).all()


def test_a_head_that_rotates_in_part_of_a_block(tiny: Tiny) -> None:
    """Quantized blocks are rotated whole or not at all, which is known before there are any tokens."""
    refused = {"match": "16 rotating values of a head of 32 are no whole blocks of q8_0"}
    with Model.load(tiny("phi2", n_rot=16)) as model, open_session(model, type_k="q8_0") as session:
        with pytest.raises(ContextLengthError, **refused):
            session.check_shift()
        session.decode(ids(30))
        with pytest.raises(ContextLengthError, **refused):
            session.shift(0, 2, 5)
        assert ids(30) == session.tokens()


def test_a_stopped_shift_leaves_the_sequence_empty(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of which some are rotated are of no use; the neighbour goes on."""
    with open_session(llama, n_seq_max=2) as session, open_session(llama, n_seq_max=2) as other:
        for each in (session, other):
            each.decode(ids(30))
            each.decode(ids(20, 1), seq_id=1)

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(session, "_compute_graph", stop)
        with pytest.raises(KeyboardInterrupt):
            session.shift(0, 2, 5)
        monkeypatch.undo()
        assert (0, 20) == (session.n_past(0), session.n_past(1))
        assert np.array_equal(other.decode([5], seq_id=1), session.decode([5], seq_id=1))


# --------------------------------------------------------------------------------------------------------- llama.cpp

LIVE: list[Any] = [
    ("llama", {}, {}),
    ("llama", {}, {"flash_attn": False}),
    ("llama", {}, {"n_seq_max": 2}),
    ("llama", {}, {"n_seq_max": 2, "kv_unified": True}),
    ("llama", {"n_embd_head_k": 64, "n_embd_head_v": 64}, {"type_k": "q8_0", "type_v": "q4_0"}),
    ("llama", {"n_embd_head_k": 128, "n_embd_head_v": 128}, {"type_k": "q5_1", "n_seq_max": 2, "kv_unified": True}),
    ("llama", {"rope_factors": True}, {}),
    ("llama", {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, {}),
    ("qwen3", {}, {}),
    ("phi2", {}, {}),
    ("deepseek2", {}, {}),
    ("deepseek2", LATENT, {}),
    ("gemma3", WINDOWED, {}),
    ("gemma3", WINDOWED, {"swa_full": False}),
    ("bloom", {}, {}),
]
"""Quantized keys only of heads of 64 and more: with others llama.cpp crashes."""


@pytest.mark.parametrize(("arch", "variant", "options"), LIVE, ids=str)
def test_rows_after_a_shift_are_llama_cpps(
    arch: str, variant: dict[str, Any], options: dict[str, Any], tiny: Tiny
) -> None:
    """Prompts, steps and further shifts, with a neighbour in the same cache."""
    pytest.importorskip("llama_cpp")
    check_live(tiny(arch, **variant), {"n_ctx": 512, "n_ubatch": 64, **options}, 64)


@pytest.mark.parametrize("options", [{}, {"type_k": "q8_0", "type_v": "q8_0"}], ids=str)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_go_on_as_in_llama_cpp(name: str, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """The real models too."""
    pytest.importorskip("llama_cpp")
    check_live(request.getfixturevalue(f"{name}_path"), {"n_ctx": 512, **options}, 20000)


def check_live(path: Path, options: dict[str, Any], n_vocab: int) -> None:
    import llama_cpp
    from reference.llama import ReferenceModel, ReferenceSession

    def shift(session: Session | ReferenceSession, n_keep: int, n_discard: int) -> None:
        if isinstance(session, Session):
            session.shift(0, n_keep, n_discard)
        else:
            n_past, memory = session.n_past(), session.memory
            assert llama_cpp.llama_memory_seq_rm(memory, 0, n_keep, n_keep + n_discard)
            llama_cpp.llama_memory_seq_add(memory, 0, n_keep + n_discard, n_past, -n_discard)

    def run(session: Any) -> list[np.ndarray]:
        text = np.random.default_rng(3).integers(2, n_vocab, 300).tolist()
        rows = [session.decode(text[:120], logits="last")]
        if options.get("n_seq_max", 1) > 1:
            rows.append(session.decode(text[50:90], seq_id=1))
        for n_keep, n_discard in ((4, 50), (0, 31), (10, 7)):
            shift(session, n_keep, n_discard)
            rows += [session.decode([token]) for token in text[120:124]]
            rows.append(session.decode(text[130:150], logits="all"))
            if options.get("n_seq_max", 1) > 1 and not options.get("type_k", "f16").startswith("q"):
                rows.append(session.decode(text[90:93], seq_id=1))
        return rows

    with ReferenceModel(path) as theirs, theirs.session(n_threads=2, **options) as session:
        expected = run(session)
    with Model.load(path) as ours, ours.session(n_threads=2, **options) as session:
        found = run(session)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32)), f"output {i}: up to {np.abs(a - b).max()} apart"
