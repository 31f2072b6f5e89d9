"""Saved sessions: what comes back is what was there, to the last bit, and what is not sound changes nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rows import ids

from ggufpy import ClosedError, ContextLengthError, Model, Session, SnapshotError, UnsupportedArchitectureError
from ggufpy.snapshots import MAGIC

Tiny = Callable[..., Path]
Rows = np.ndarray
HEAD = struct.Struct("<8sIIQ")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "windowed": ("gemma3", {"n_swa": 16, "n_layer": 3, "swa_pattern": 3}),
    "chunked": ("llama4", {"n_swa": 16}),
    "hybrid": ("lfm2", {}),
    "latent": ("deepseek2", {"n_embd_head_k_mla": 64, "n_embd_head_v_mla": 32, "n_head_kv": 1}),
    "shared": ("gemma3n", {}),
}


@pytest.fixture(scope="module")
def models(tiny: Tiny) -> Iterator[Callable[[str], Model]]:
    opened: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in opened:
            arch, variant = MODELS[name]
            opened[name] = Model.load(tiny(arch, **variant))
        return opened[name]

    yield get
    for model in opened.values():
        model.close()


@pytest.fixture
def llama(models: Callable[[str], Model]) -> Model:
    return models("llama")


def open_session(model: Model, **options: Any) -> Session:
    return model.session(**{"n_ctx": 768, "n_threads": 1, "n_ubatch": 32, "n_seq_max": 3, **options})


def history(session: Session, seed: int = 0) -> None:
    """Fill a session with sequences of different lengths, forked, trimmed and interleaved where it can."""
    session.decode_batch([(0, ids(70, seed), "last"), (2, ids(9, seed + 1), "last")])
    if session.options.n_seq_max > 2:
        session.fork(0, 1)
        session.decode(ids(5, seed + 2), seq_id=1)
    session.decode_batch([(i, [7 + i], "last") for i in range(3)])
    session.trim(2, 0)
    session.decode(ids(12, seed + 3), seq_id=2)


def going_on(session: Session, seq_ids: tuple[int, ...] = (0, 1, 2)) -> list[Rows]:
    """Return rows of a prompt, of steps, of all sequences together, and after going back where that can be."""
    rows = [session.decode(ids(40, 9 + seq_id), seq_id=seq_id, logits="all") for seq_id in seq_ids]
    rows += [session.decode([3 + i], seq_id=seq_ids[0]) for i in range(4)]
    for i in range(3):
        rows += session.decode_batch([(seq_id, [5 + i], "last") for seq_id in seq_ids])
    return rows


def check_same(expected: list[Rows], found: list[Rows]) -> None:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.shape == b.shape
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32)), f"rows {i}: up to {np.abs(a - b).max()} apart"


KINDS = [
    *((name, {"kv_unified": unified}) for name in MODELS for unified in (False, True)),
    *(("llama", {"flash_attn": False, "kv_unified": unified}) for unified in (False, True)),
    *(("llama", {"type_k": k, "type_v": v}) for k, v in (("q8_0", "q4_0"), ("bf16", "f32"), ("iq4_nl", "q5_1"))),
    *(("windowed", {"swa_full": False, "kv_unified": unified}) for unified in (False, True)),
    ("windowed", {"swa_full": False, "flash_attn": False}),
    ("chunked", {"swa_full": False}),
]


@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_a_session_goes_on_as_if_nothing_had_happened(
    name: str, options: dict[str, Any], models: Callable[[str], Model], tmp_path: Path
) -> None:
    """All sequences come back to the last bit, whatever the new session held before."""
    path = tmp_path / "a.session"
    with open_session(models(name), **options) as session, open_session(models(name), **options) as other:
        history(session)
        session.save(path)
        other.decode(ids(100, 5))
        other.load(path)
        assert [session.tokens(i) for i in range(3)] == [other.tokens(i) for i in range(3)]
        check_same(going_on(session), going_on(other))


@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_a_sequence_becomes_another_one(
    name: str, options: dict[str, Any], models: Callable[[str], Model], tmp_path: Path
) -> None:
    """One sequence goes on elsewhere, and the neighbours there notice nothing."""
    path = tmp_path / "a.session"
    with (
        open_session(models(name), **options) as session,
        open_session(models(name), **options) as other,
        open_session(models(name), **options) as untouched,
    ):
        history(session)
        session.save(path, seq_id=1)
        for each in (other, untouched):
            each.decode(ids(20, 5))
        other.decode(ids(30, 6), seq_id=2)
        other.load(path, seq_id=2)
        assert ([*session.tokens(1)], 20, 0) == (other.tokens(2), other.n_past(0), other.n_past(1))
        row, expected = other.decode(ids(3), seq_id=2), session.decode(ids(3), seq_id=1)
        if options.get("kv_unified"):  # other cells, so sums run in another order
            assert np.abs(row - expected).max() < 2e-2 * np.abs(expected).max()
        else:
            check_same([expected], [row])
            check_same([untouched.decode(ids(3))], [other.decode(ids(3))])


def test_a_sequence_takes_the_cells_it_had_where_they_are_free(llama: Model, tmp_path: Path) -> None:
    """In a unified cache too, then, its bits come back."""
    path = tmp_path / "a.session"
    with open_session(llama, kv_unified=True) as session, open_session(llama, kv_unified=True) as other:
        session.decode(ids(50))
        session.decode(ids(60, 1), seq_id=1)
        session.save(path, seq_id=0)
        other.load(path, seq_id=2)
        check_same([session.decode([5])], [other.decode([5], seq_id=2)])


def test_empty_sequences_can_be_saved(llama: Model, tmp_path: Path) -> None:
    """They make what they are loaded into empty."""
    path = tmp_path / "a.session"
    with open_session(llama) as session:
        session.save(path, seq_id=1)
        session.decode(ids(5))
        session.load(path, seq_id=0)
        assert 0 == session.n_past()
        session.save(path)
        session.decode(ids(5))
        session.load(path)
        assert 0 == session.n_past()


def test_only_cells_in_use_are_written(llama: Model, tmp_path: Path) -> None:
    """A file is as large as what the session holds, not as its context."""
    path = tmp_path / "a.session"
    with llama.session(n_ctx=1024, n_threads=1) as session:
        session.decode(ids(16))
        session.save(path)
        per_cell = session.memory_nbytes // 1024
        assert 16 * per_cell < path.stat().st_size < 16 * per_cell + 2000


@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_another_context_length_may_do(name: str, models: Callable[[str], Model], tmp_path: Path) -> None:
    """What fits is taken, into a larger context or a smaller one; what does not is refused, and changes nothing."""
    path = tmp_path / "a.session"
    with (
        models(name).session(n_ctx=512, n_threads=1) as session,
        models(name).session(n_ctx=1024, n_threads=1) as large,
        models(name).session(n_ctx=256, n_threads=1) as small,
    ):
        session.decode(ids(200))
        session.save(path)
        rows = [session.decode([5])]
        for other in (large, small):
            other.load(path)
            check_same(rows, [other.decode([5])])
        session.decode(ids(100))
        for seq_id in (None, 0):
            session.save(path, seq_id)
            with pytest.raises(ContextLengthError, match=r"301 tokens does not fit a context of 256"):
                small.load(path, seq_id)
        assert 201 == small.n_past()


def test_a_path_may_be_a_link_and_is_replaced_whole(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link stays; where writing fails, the old file does too, and nothing else is left in its folder."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "a.session"
    link.symlink_to(tmp_path / "there" / "b.session")
    with open_session(llama) as session:
        session.decode(ids(5))
        session.save(link)
        before = (tmp_path / "there" / "b.session").read_bytes()
        assert link.is_symlink()
        session.decode(ids(5))

        def no_room(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match="No space"):
            session.save(link)
        monkeypatch.undo()
        assert before == link.read_bytes()
        assert ["b.session"] == [path.name for path in (tmp_path / "there").iterdir()]
        with pytest.raises(FileNotFoundError):
            session.save(tmp_path / "nowhere" / "a.session")
        assert 10 == session.n_past()


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture
def saved(llama: Model, tmp_path: Path) -> Path:
    with open_session(llama) as session:
        history(session)
        session.save(tmp_path / "a.session")
    return tmp_path / "a.session"


def check_refused(model: Model, path: Path, named: str, seq_id: int | None = None, **options: Any) -> None:
    """Loading raises the error, which names the file, and the session goes on as one that has not seen the file."""
    with open_session(model, **options) as session, open_session(model, **options) as other:
        for each in (session, other):
            each.decode(ids(20, 8))
        with pytest.raises(SnapshotError, match=named) as caught:
            session.load(path, seq_id)
        assert path == caught.value.path
        assert str(path) in str(caught.value)
        check_same([other.decode([5])], [session.decode([5])])
        assert other.tokens() == session.tokens()


def test_any_damaged_byte_is_found(saved: Path, llama: Model) -> None:
    """Wherever it is: in the head, the header, the cells, the data and the checksum."""
    sound = saved.read_bytes()
    start = HEAD.size + HEAD.unpack(sound[: HEAD.size])[2]
    places = [*range(HEAD.size), *range(HEAD.size, start, 37), *range(start, len(sound), len(sound) // 40), -1]
    with open_session(llama) as session:
        session.decode(ids(20, 8))
        for at in places:
            damaged = bytearray(sound)
            damaged[at] ^= 0x10
            saved.write_bytes(damaged)
            with pytest.raises(SnapshotError, match=r"damaged|expected version|expected a saved session"):
                session.load(saved)
        assert ids(20, 8) == session.tokens()


@pytest.mark.parametrize("left", [0, 3, 8, 23, 24, 200, 5000, -16, -1])
def test_a_truncated_file_is_refused(left: int, saved: Path, llama: Model) -> None:
    """At any length, with what was expected and what was found."""
    data = saved.read_bytes()
    saved.write_bytes(data[:left])
    named = "expected a saved session" if 0 <= left < 8 else f"truncated.*expected .*found {len(data[:left])}"
    check_refused(llama, saved, named)
    saved.write_bytes(data + b"x")
    check_refused(llama, saved, f"expected {len(data)} bytes, found {len(data) + 1}")


def test_foreign_and_newer_files_are_refused(saved: Path, tiny: Tiny, llama: Model) -> None:
    """Each is told apart from damage."""
    check_refused(llama, tiny("llama"), r"expected a saved session, which starts with .*, found b'GGUF")
    data = bytearray(saved.read_bytes())
    data[8] = 2
    saved.write_bytes(data)
    check_refused(llama, saved, "expected version 1, found 2; another release")


def test_another_models_file_is_refused(saved: Path, tiny: Tiny, models: Callable[[str], Model]) -> None:
    """Other weights of the same shapes are another model; a copy with another chat template is not."""
    check_refused(models("windowed"), saved, "another model's: expected architecture 'gemma3', found 'llama'")
    for variant in ({"seed": 1}, {"n_layer": 2}, {"rope_freq_base": 5000.0}):
        with Model.load(tiny("llama", **variant)) as model:
            check_refused(model, saved, "another model's: expected fingerprint '[0-9a-f]{32}', found")
    extra = {"tokenizer.chat_template": "{{ messages }}", "general.description": "other"}
    with Model.load(tiny("llama", extra=extra)) as model, open_session(model) as session:
        session.load(saved)
        assert 71 == session.n_past()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"type_k": "q8_0"}, "expected type_k 'q8_0', found 'f16'"),
        ({"type_v": "f32"}, "expected type_v 'f32', found 'f16'"),
        ({"flash_attn": False}, "expected flash_attn False, found True"),
        ({"n_seq_max": 2}, "expected n_seq_max 2, found 3"),
        ({"kv_unified": True}, "expected n_stream 1, found 3"),
    ],
)
def test_another_kind_of_session_is_refused(options: dict[str, Any], named: str, saved: Path, llama: Model) -> None:
    """What decides how memory is laid out has to be the same."""
    check_refused(llama, saved, named, **options)


def test_windowed_caches_have_to_keep_as_much(models: Callable[[str], Model], tmp_path: Path) -> None:
    """swa_full is such an option where there are windows."""
    with open_session(models("windowed")) as session:
        session.decode(ids(5))
        session.save(tmp_path / "a.session")
    check_refused(models("windowed"), tmp_path / "a.session", "expected swa_full False, found True", swa_full=False)


def test_whole_sessions_and_sequences_are_told_apart(saved: Path, llama: Model) -> None:
    """The number of a sequence is asked for where a file has one, and only there."""
    check_refused(llama, saved, "it holds a whole session: expected no seq_id", seq_id=0)
    with open_session(llama) as session:
        session.decode(ids(5))
        session.save(saved, seq_id=0)
    check_refused(llama, saved, "it holds one sequence: expected the seq_id")


def rewritten(
    data: bytes, change: Callable[[Any], None] = lambda _: None, patch: tuple[int, bytes] = (0, b"")
) -> bytes:
    """Change a file's header or some bytes behind it, and make lengths and checksum right."""
    n_header = HEAD.unpack(data[: HEAD.size])[2]
    header = json.loads(data[HEAD.size : HEAD.size + n_header])
    change(header)
    rest = bytearray(data[HEAD.size + n_header : -16])
    rest[patch[0] : patch[0] + len(patch[1])] = patch[1]
    raw = json.dumps(header).encode()
    body = HEAD.pack(MAGIC, 1, len(raw), HEAD.size + len(raw) + len(rest) + 16) + raw + rest
    return body + hashlib.blake2b(body, digest_size=16).digest()


UNSOUND: dict[str, Callable[[Any], Any]] = {
    "no caches": lambda h: h.update(caches=[]),
    "no tokens": lambda h: h.pop("n_tokens"),
    "a negative count": lambda h: h.update(n_tokens=[-1, 76, 12]),
    "a count too large": lambda h: h.update(n_tokens=[71, 76, 2**40]),
    "another count": lambda h: h.update(n_tokens=[71, 76, 13]),
    "text for a count": lambda h: h.update(n_tokens=["a", 76, 12]),
    "a sequence less": lambda h: h.update(n_tokens=[71, 76]),
    "a stream less": lambda h: h["caches"][0]["streams"].pop(),
    "more cells": lambda h: h["caches"][0]["streams"][0].update(n_cells=72),
    "no cells": lambda h: h["caches"][0]["streams"][0].update(n_cells=0),
    "cells that are null": lambda h: h["caches"][0]["streams"][0].update(n_cells=None),
    "a negative head": lambda h: h["caches"][0]["streams"][0].update(head=-5),
    "no model": lambda h: h.update(model=None),
    "no options": lambda h: h.update(options=[]),
    "states": lambda h: h.update(caches=[{"rows": [0, 1, 2]}]),
}


@pytest.mark.parametrize("change", UNSOUND.values(), ids=UNSOUND)
def test_a_crafted_header_is_refused(change: Callable[[Any], Any], saved: Path, llama: Model) -> None:
    """A right checksum is not trusted with what would be written where."""
    data = saved.read_bytes()
    saved.write_bytes(rewritten(data))
    with open_session(llama) as session:
        session.load(saved)
    saved.write_bytes(rewritten(data, change))
    check_refused(llama, saved, "unsound")


N_TOKENS = 71 + 76 + 12
CELLS = N_TOKENS * 4  # where the first stream's begin


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 64), (0, -1), (0, 2**31 - 1),  # a token
        (CELLS, -1), (CELLS + 4, 0), (CELLS + 70 * 4, 768), (CELLS + 70 * 4, 2**31 - 1),  # a cell
        (CELLS + 71 * 4, 1), (CELLS + 71 * 4, -1), (CELLS + 71 * 4, 2**31 - 1),  # its position
        (CELLS + 71 * 8, 0),  # who has it
    ],
)  # fmt: skip
def test_crafted_cells_are_refused(at: int, value: int, saved: Path, llama: Model) -> None:
    """Neither an id, nor a cell, nor a position can be one that is not there."""
    saved.write_bytes(rewritten(saved.read_bytes(), patch=(at, struct.pack("<i", value))))
    with open_session(llama) as session:
        session.decode(ids(5))
        with pytest.raises((SnapshotError, ContextLengthError), match=r"unsound|do not fit"):
            session.load(saved)
        assert ids(5) == session.tokens()


def test_a_file_that_changes_while_it_is_read_leaves_its_sequences_empty(
    saved: Path, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noticed, nothing half read is used, and the session can be used."""
    with open_session(llama) as session, open_session(llama) as other:
        session.decode(ids(20))
        monkeypatch.setattr("ggufpy.snapshots._take_over", truncating(saved))
        with pytest.raises(SnapshotError, match="changed while it was read"):
            session.load(saved)
        assert [0, 0, 0] == [session.n_past(i) for i in range(3)]
        check_same([other.decode(ids(9))], [session.decode(ids(9))])


def truncating(path: Path) -> Callable[..., None]:
    from ggufpy.snapshots import _take_over

    def take_over(*arguments: Any) -> None:
        os.truncate(path, path.stat().st_size // 2)
        _take_over(*arguments)

    return take_over


def test_what_keeps_nothing_cannot_be_saved(tiny: Tiny, tmp_path: Path) -> None:
    """Encoders say so."""
    with Model.load(tiny("bert")) as model, model.session(n_threads=1) as session:
        with pytest.raises(UnsupportedArchitectureError, match="nothing stays of a call"):
            session.save(tmp_path / "a.session")
        with pytest.raises(UnsupportedArchitectureError, match="nothing stays of a call"):
            session.load(tmp_path / "a.session")
    assert not list(tmp_path.iterdir())


def test_numbers_and_closed_sessions_are_checked(llama: Model, saved: Path, tmp_path: Path) -> None:
    """As by every other method."""
    session = open_session(llama)
    for call in (session.save, session.load):
        for seq_id in (3, -1, True, "0"):
            with pytest.raises(ValueError, match="seq_id"):
                call(tmp_path / "b.session", seq_id)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        session.load(tmp_path / "b.session")
    session.close()
    for call in (session.save, session.load):
        with pytest.raises(ClosedError):
            call(saved)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_real_answer_goes_on_in_a_new_session(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The same prompt after loading finds its prefix and gets the same answer as in a new session."""
    prompt, params = "The capital of France is", {"temperature": 0.0, "max_tokens": 16}
    with Model.load(request.getfixturevalue(f"{name}_path")) as model:
        expected = model.generate(prompt, **params)
        with model.session(n_ctx=512) as session:
            session.decode(model.tokenizer.encode(prompt))
            session.save(tmp_path / "a.session")
        with model.session(n_ctx=512) as session:
            session.load(tmp_path / "a.session")
            n_past = session.n_past()
            found = model.generate(prompt, session=session, **params)
        assert (expected.token_ids, n_past - 1) == (found.token_ids, found.usage.cached_tokens)
        assert found.usage.cache_miss_reason is None
