"""Tests for ggufpy.reference: the four file formats, the statistics, the replay, and the committed dumps."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ggufpy.errors import DumpError
from ggufpy.reference import (
    Comparison,
    Dump,
    Limits,
    LogProbs,
    compare,
    compare_model,
    read_dump,
    replay,
)

N_VOCAB = 11
STEPS = (
    ("decode", ((0, (1, 2, 3), "all"),)),
    ("fork", 0, 1),
    ("decode", ((0, (4,), "last"), (1, (5, 6), (0,)))),
    ("trim", 0, 2),
    ("clear", 1),
    ("decode", ((0, (7, 8), "last"),)),
    ("clear", None),
)
N_ROWS = 6


class FakeSession:
    """Makes a row from the sequence's history, so that a wrong replay gives other rows."""

    def __init__(self, n_vocab: int, shift: float = 0.0, **options: Any) -> None:
        self.n_vocab, self.shift, self.options = n_vocab, shift, options
        self.past: dict[int, list[int]] = {}

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def decode(self, ids: list[int], *, seq_id: int = 0, logits: Any = "last") -> np.ndarray:
        rows = []
        for token in ids:
            self.past.setdefault(seq_id, []).append(token)
            seed = [len(self.past[seq_id]), *self.past[seq_id]]
            row = np.random.default_rng(seed).normal(size=self.n_vocab) + self.shift * np.arange(self.n_vocab)
            rows.append(row.astype(np.float32))
        if isinstance(logits, str):
            logits = range(len(ids)) if logits == "all" else [len(ids) - 1]
        return np.stack([rows[i] for i in logits])

    def decode_batch(self, items: Any) -> list[np.ndarray]:
        return [self.decode(list(ids), seq_id=seq_id, logits=logits) for seq_id, ids, logits in items]

    def trim(self, seq_id: int, n: int) -> None:
        del self.past[seq_id][n:]

    def fork(self, src: int, dst: int) -> None:
        self.past[dst] = list(self.past[src])

    def clear(self, seq_id: int | None = None) -> None:
        self.past = {} if seq_id is None else {k: v for k, v in self.past.items() if k != seq_id}


def fake_model(n_vocab: int = N_VOCAB, shift: float = 0.0, add_bos: bool = False) -> Any:
    made: list[dict[str, Any]] = []

    def session(**options: Any) -> FakeSession:
        made.append(options)
        return FakeSession(n_vocab, shift)

    tokenizer = SimpleNamespace(add_bos=add_bos, bos_token_id=1)
    return SimpleNamespace(config=SimpleNamespace(n_vocab=n_vocab), session=session, tokenizer=tokenizer, made=made)


def rows_of(steps: Any, n_vocab: int = N_VOCAB) -> np.ndarray:
    return np.concatenate(list(replay(FakeSession(n_vocab), steps)))


def save(path: Path, n_vocab: int = N_VOCAB, **fields: Any) -> Path:
    Dump.record(path, STEPS, rows_of(STEPS, n_vocab), **fields).save()
    return path


# our own files


def test_a_narrow_dump_comes_back_whole(tmp_path: Path) -> None:
    """Every row, step, option and note of a small vocabulary survives the file."""
    dump = read_dump(save(tmp_path / "d.npz", options={"n_ctx": 256, "flash_attn": False}, meta={"cpu": "x"}))
    assert isinstance(dump, Dump)
    assert (
        dump.n_vocab,
        dump.steps,
        dump.options,
        dump.meta,
    ) == (N_VOCAB, STEPS, {"n_ctx": 256, "flash_attn": False}, {"cpu": "x"})
    assert dump.columns is None
    assert np.array_equal(rows_of(STEPS), dump.logits)
    assert dump.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_wide_dump_keeps_some_columns_and_still_proves_identity(tmp_path: Path) -> None:
    """A large vocabulary is reduced, yet one changed bit in a column that is not kept is found."""
    n_vocab = 20_000
    dump = read_dump(save(tmp_path / "d.npz", n_vocab))
    assert isinstance(dump, Dump)
    assert dump.columns is not None
    assert dump.logits.shape[1] < 400
    rows = rows_of(STEPS, n_vocab)
    assert Comparison(N_ROWS, N_ROWS, 0.0, 0.0, 0.0, 1.0) == dump.compare(rows)
    dropped = int(np.setdiff1d(np.arange(n_vocab), dump.columns)[0])
    rows[2, dropped] = np.nextafter(rows[2, dropped], np.float32(9))
    assert dump.compare(rows).identical_rows == N_ROWS - 1


def test_a_wide_dumps_divergence_is_a_close_lower_bound(tmp_path: Path) -> None:
    """KL over the kept columns and the rest is at most the true one."""
    n_vocab = 2_000
    dump = read_dump(save(tmp_path / "d.npz", n_vocab))
    assert isinstance(dump, Dump)
    theirs = rows_of(STEPS, n_vocab)
    ours = theirs + np.random.default_rng(0).normal(scale=0.1, size=theirs.shape).astype(np.float32)
    assert 0 < dump.compare(ours).mean_kl <= compare(ours, theirs).mean_kl + 1e-12


def edit_head(**changes: Any) -> Any:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays["head"] = np.array(json.dumps({**json.loads(str(arrays["head"])), **changes}))

    return edit


def put(name: str, value: Any) -> Any:
    return lambda arrays: arrays.__setitem__(name, value)


BAD = {
    "no head": (lambda arrays: arrays.pop("head"), "head"),
    "head is not JSON": (put("head", np.array("{")), "not a dump"),
    "head is a list": (put("head", np.array("[]")), "format"),
    "another format": (edit_head(format="ggufpy-dump-9"), "format"),
    "no vocabulary": (edit_head(n_vocab=0), "n_vocab"),
    "unknown option": (edit_head(options={"n_ctxt": 1}), "options"),
    "no steps": (edit_head(steps=None), "step 0"),
    "no rows": (edit_head(steps=[["trim", 0, 1]]), "no logits"),
    "unknown step": (edit_head(steps=[["close"]]), "step 0"),
    "negative trim": (edit_head(steps=[["trim", 0, -1]]), "step 0"),
    "id above the vocabulary": (edit_head(steps=[["decode", [[0, [N_VOCAB], "last"]]]]), "step 0"),
    "row beyond the tokens": (edit_head(steps=[["decode", [[0, [1], [1]]]]]), "step 0"),
    "empty decode": (edit_head(steps=[["decode", []]]), "step 0"),
    "fewer rows than asked": (put("logits", np.zeros((N_ROWS - 1, N_VOCAB), np.float32)), "logits"),
    "another type": (put("logits", np.zeros((N_ROWS, N_VOCAB))), "float64"),
    "columns without digests": (put("columns", np.arange(N_VOCAB, dtype=np.int32)), "digests"),
    "unknown array": (put("extra", np.zeros(1)), "extra"),
    "pickled": (put("logits", np.array([{}], dtype=object)), "not a dump"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_dump_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Each fault is a DumpError that names the file and what is wrong."""
    change, reason = BAD[name]
    path = save(tmp_path / "d.npz")
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    change(arrays)
    np.savez(path, **arrays)
    with pytest.raises(DumpError, match=reason) as raised:
        read_dump(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("columns", [[3, 2, 1], [0, 0, 1], [-1, 0, 1], [0, 1, 20_000]])
def test_columns_must_be_ascending_token_ids(columns: list[int], tmp_path: Path) -> None:
    """Columns index our rows, so they are checked."""
    path = save(tmp_path / "d.npz", 20_000)
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    arrays["columns"], arrays["logits"] = np.array(columns, np.int32), np.zeros((N_ROWS, 3), np.float32)
    np.savez(path, **arrays)
    with pytest.raises(DumpError, match="columns"):
        read_dump(path)


def test_a_cut_dump_is_refused(tmp_path: Path) -> None:
    """A download that broke off is not a dump, wherever it was cut."""
    path = save(tmp_path / "d.npz")
    data = path.read_bytes()
    for length in range(4, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(DumpError):
            read_dump(path)


@pytest.mark.parametrize("data", [b"", b"<html>", b"\x00" * 64])
def test_a_foreign_file_is_refused(data: bytes, tmp_path: Path) -> None:
    """What is no file of logits is said to be none."""
    path = tmp_path / "page.txt"
    path.write_bytes(data)
    with pytest.raises(DumpError, match="neither"):
        read_dump(path)


def test_a_missing_file_stays_an_os_error(tmp_path: Path) -> None:
    """Errors of the system are not dressed up."""
    with pytest.raises(FileNotFoundError):
        read_dump(tmp_path / "none.npz")


# llama.cpp's files


def results_file(path: Path, tokens: np.ndarray, logits: np.ndarray) -> Path:
    """Write what llama-results --output writes: ne of logits is [n_tokens, n_vocab] although a row is a token's."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, 2, 1)
    key, value = b"path_model", b"m.gguf"
    head += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    n_tokens, n_vocab = logits.shape
    first = tokens.astype("<i4").tobytes()
    first += b"\0" * (-len(first) % 32)
    head += struct.pack("<Q6sIQIQ", 6, b"tokens", 1, n_tokens, 26, 0)
    head += struct.pack("<Q6sIQQIQ", 6, b"logits", 2, n_tokens, n_vocab, 0, len(first))
    head += b"\0" * (-len(head) % 32)
    data = logits.astype("<f4").tobytes()
    path.write_bytes(head + first + data + b"\0" * (-len(data) % 32))
    return path


def test_llama_results_files_are_read(tmp_path: Path) -> None:
    """All rows of one prompt, decoded in one call."""
    steps = [("decode", ((0, (1, 2, 3, 4), "all"),))]
    dump = read_dump(results_file(tmp_path / "r.gguf", np.array([1, 2, 3, 4]), rows_of(steps)))
    assert isinstance(dump, Dump)
    assert dump.tokens.tolist() == [1, 2, 3, 4]
    assert compare_model(fake_model(), dump).identical_rows == 4


@pytest.mark.parametrize("change", [(b"tokens", b"tokenz"), (struct.pack("<IQ", 26, 0), struct.pack("<IQ", 0, 0))])
def test_llama_results_files_without_their_tensors_are_refused(change: tuple[bytes, bytes], tmp_path: Path) -> None:
    """A GGUF file of something else is no dump."""
    path = results_file(tmp_path / "r.gguf", np.array([1, 2]), np.zeros((2, N_VOCAB)))
    path.write_bytes(path.read_bytes().replace(*change, 1))
    with pytest.raises(DumpError, match=r"r\.gguf: tensor tokens"):
        read_dump(path)


def test_llama_debug_files_are_read(tmp_path: Path) -> None:
    """The last row, its tokens from the file beside it."""
    steps = [("decode", ((0, (5, 6, 7), "last"),))]
    rows_of(steps).tofile(tmp_path / "llamacpp-m.bin")
    np.array([5, 6, 7], "<i4").tofile(tmp_path / "llamacpp-m-tokens.bin")
    dump = read_dump(tmp_path / "llamacpp-m.bin")
    assert isinstance(dump, Dump)
    assert dump.logits.shape == (1, N_VOCAB)
    model = fake_model()
    assert compare_model(model, dump, n_ctx=512).identical_rows == 1
    assert model.made == [{"n_ctx": 512, "swa_full": False}]
    with pytest.raises(DumpError, match="tokens"):
        read_dump(tmp_path / "llamacpp-m-tokens.bin")
    (tmp_path / "llamacpp-m.bin").write_bytes(b"\1" * 15)
    with pytest.raises(DumpError, match="15 bytes"):
        read_dump(tmp_path / "llamacpp-m.bin")
    (tmp_path / "llamacpp-m-tokens.bin").unlink()
    with pytest.raises(DumpError, match="beside"):
        read_dump(tmp_path / "llamacpp-m.bin")


def quantized_log_probs(row: np.ndarray) -> bytes:
    """Round one row as tools/perplexity does: 65,535 steps above the larger of the minimum and the maximum − 16."""
    top, low = row.max(), max(row.min(), row.max() - 16)
    norm = float(top) + math.log(np.exp((row - top).astype(np.float64)).sum())
    scale = np.float32((top - low) / 65535)
    steps = np.where(row > low, np.rint((row - low) / scale), 0).astype("<u2").tobytes()
    return struct.pack("<ff", scale, low - norm) + steps + b"\0\0" * (len(row) % 2)


def log_probs_file(path: Path, tokens: np.ndarray, bos: int | None = None) -> Path:
    n_chunks, n_ctx = tokens.shape
    data = struct.pack("<8sIii", b"_logits_", n_ctx, N_VOCAB, n_chunks) + tokens.astype("<i4").tobytes()
    for ids in tokens.tolist():
        if bos is not None:
            ids[0] = bos
        data += b"".join(map(quantized_log_probs, FakeSession(N_VOCAB).decode(ids, logits="all")[n_ctx // 2 : -1]))
    path.write_bytes(data)
    return path


TOKENS = np.array([[3, 4, 5, 6, 7, 8, 9, 10], [2, 2, 4, 4, 6, 6, 8, 8]])


@pytest.mark.parametrize("add_bos", [False, True])
def test_llama_perplexity_files_are_read(add_bos: bool, tmp_path: Path) -> None:
    """The same model diverges by no more than the rounding, and the two perplexities agree; BOS opens each chunk."""
    dump = read_dump(log_probs_file(tmp_path / "kl.dat", TOKENS, 1 if add_bos else None))
    assert isinstance(dump, LogProbs)
    assert np.array_equal(TOKENS, dump.tokens)
    found = compare_model(fake_model(add_bos=add_bos), dump)
    assert (
        found.n_rows,
        found.identical_rows,
        found.max_abs_diff,
        found.nmse,
        found.top1_agreement,
    ) == (6, None, None, None, 1.0)
    assert abs(found.mean_kl) < 1e-5
    assert found.reference_perplexity == pytest.approx(found.perplexity, rel=1e-4)
    other = compare_model(fake_model(shift=0.3, add_bos=add_bos), dump)
    assert other.mean_kl > 0.1
    assert found.reference_perplexity == other.reference_perplexity != other.perplexity


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:15], "header"),
        (lambda data: data[:-1], "bytes"),
        (lambda data: data + b"\0", "bytes"),
        (lambda data: data[:8] + struct.pack("<I", 2) + data[12:], "no sense"),
        (lambda data: data[:12] + struct.pack("<i", -5) + data[16:], "no sense"),
        (lambda data: data[:16] + struct.pack("<i", 2**31 - 1) + data[20:], "bytes"),
        (lambda data: data[:20] + struct.pack("<i", N_VOCAB) + data[24:], "tokens"),
    ],
)
def test_damaged_llama_perplexity_files_are_refused(change: Any, reason: str, tmp_path: Path) -> None:
    """Every count is held against the file's size before it is used."""
    path = log_probs_file(tmp_path / "kl.dat", TOKENS)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DumpError, match=reason):
        read_dump(path)


# comparing


def test_the_statistics_are_the_textbook_ones() -> None:
    """Two rows small enough to work out by hand."""
    theirs = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    ours = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    found = compare(ours, theirs)
    assert found.identical_rows == 1
    assert found.max_abs_diff == pytest.approx(math.log(2))
    assert found.nmse == pytest.approx(2 * math.log(2) ** 2 / float(np.square(theirs).sum()))
    assert found.mean_kl == pytest.approx(0.25 * math.log(2) / 2, rel=1e-5)
    assert found.top1_agreement == 0.5


def test_infinite_and_missing_numbers_do_not_hide() -> None:
    """Equal infinities are no difference; a NaN is the largest one."""
    theirs = np.array([[0, -np.inf, 1]], np.float32)
    assert compare(theirs.copy(), theirs).max_abs_diff == 0
    broken = compare(np.array([[0, -np.inf, np.nan]], np.float32), theirs)
    assert math.inf == broken.max_abs_diff
    assert broken.faults(Limits(nmse=1e-6, mean_kl=1.0))


@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (0, 4)])
def test_shapes_must_agree(shape: tuple[int, int]) -> None:
    """Rows of another count or vocabulary are an error, not a number."""
    with pytest.raises(ValueError, match="logits: expected"):
        compare(np.zeros(shape, np.float32), np.zeros((2, 4) if shape[0] else (0, 4), np.float32))


def test_limits_say_what_is_exceeded() -> None:
    """One line a limit; what a file cannot tell is never within a limit."""
    found = Comparison(10, 9, 0.5, 1e-3, 0.01, 0.9)
    assert found.faults(Limits()) == []
    assert found.faults(Limits(max_abs_diff=0.5, nmse=1e-3, mean_kl=0.01, top1_agreement=0.9)) == []
    everything = Limits(True, 0.4, 1e-4, 1e-3, 0.95)
    assert [line.partition(":")[0] for line in found.faults(everything)] == [
        "identical rows",
        "max_abs_diff",
        "nmse",
        "mean_kl",
        "top1_agreement",
    ]
    unknown = Comparison(10, None, None, None, 0.0, 1.0)
    assert len(unknown.faults(everything)) == 3


def test_a_dump_is_replayed_with_its_options(tmp_path: Path) -> None:
    """compare_model makes the session that the dump describes; what the caller gives goes before."""
    dump = read_dump(save(tmp_path / "d.npz", options={"n_ctx": 256, "n_threads": 1}))
    model = fake_model()
    assert Comparison(N_ROWS, N_ROWS, 0.0, 0.0, 0.0, 1.0) == compare_model(model, dump, n_threads=2)
    assert model.made == [{"n_ctx": 256, "n_threads": 2}]
    assert compare_model(fake_model(shift=0.1), dump).identical_rows == 0
    with pytest.raises(DumpError, match="n_vocab"):
        compare_model(fake_model(N_VOCAB + 1), dump)
