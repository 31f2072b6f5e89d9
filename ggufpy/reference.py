"""Reads logits that llama.cpp computed and compares ggufpy's with them.

Owns the file formats (our own `.npz`, and three that llama.cpp's tools write), the statistics and the replay of a dump
through a session. Does not run llama.cpp: `tests/reference` does. Arrays are in NumPy order, a row is one token's
logits over the whole vocabulary.

A dump is a list of *steps*, so that any state of the cache can be reached again:

    ("decode", ((seq_id, token_ids, rows), …))   one call of `Session.decode_batch`; rows is "last", "all" or indices
    ("trim", seq_id, n)   ("fork", src, dst)   ("clear", seq_id or None)

To stay small, a dump of a real model keeps every row's SHA-256, which proves that a row is the same bit for bit, and
the values of some columns (the likeliest tokens among them), from which the distances are computed.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ggufpy.errors import DumpError
from ggufpy.gguf import GGMLType, GGUFFile

if TYPE_CHECKING:
    from ggufpy.model import Model

__all__ = ["Comparison", "Dump", "Limits", "LogProbs", "compare", "compare_model", "read_dump", "replay"]

FORMAT = "ggufpy-dump-1"
MAGIC_NPZ, MAGIC_GGUF, MAGIC_LOG_PROBS = b"PK\x03\x04", b"GGUF", b"_logits_"
SIZES = ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "n_threads", "n_threads_batch")
OPTIONS = {*SIZES, "flash_attn", "type_k", "type_v", "kv_unified", "swa_full"}
N_SPREAD, N_LIKELIEST = 256, 8  # columns kept of a wide row: spread over the vocabulary, and every row's likeliest

Step = tuple[Any, ...]


class Decoder(Protocol):
    """What a replay needs of a session."""

    def decode_batch(self, items: Any, /) -> list[np.ndarray]: ...
    def trim(self, seq_id: int, n: int, /) -> None: ...
    def fork(self, src: int, dst: int, /) -> None: ...
    def clear(self, seq_id: int | None = None, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How far apart two sets of logits may be; None sets no limit."""

    identical: bool = False
    max_abs_diff: float | None = None
    nmse: float | None = None
    mean_kl: float | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far our logits are from a reference's.

    identical_rows    rows equal bit for bit, of n_rows
    max_abs_diff      the largest difference of two logits
    nmse              mean squared difference over the reference's mean square (as in llama.cpp's llama-results)
    mean_kl           mean Kullback-Leibler divergence from the reference, in nats; where a dump keeps only some
                      columns, of the distribution over those and the rest taken together, which is a lower bound
    top1_agreement    share of rows with the same likeliest token
    perplexity, reference_perplexity   only where the file tells which token came next

    What a file does not tell is None.
    """

    n_rows: int
    identical_rows: int | None
    max_abs_diff: float | None
    nmse: float | None
    mean_kl: float
    top1_agreement: float
    perplexity: float | None = None
    reference_perplexity: float | None = None

    def faults(self, limits: Limits) -> list[str]:
        """Return one line for each limit that is exceeded, or that the file cannot tell about."""
        faults = []
        if limits.identical and self.identical_rows != self.n_rows:
            faults.append(f"identical rows: expected {self.n_rows}, found {self.identical_rows}")
        for name in ("max_abs_diff", "nmse", "mean_kl"):
            limit, found = getattr(limits, name), getattr(self, name)
            if limit is not None and not (found is not None and found <= limit):
                faults.append(f"{name}: expected at most {limit:g}, found {_show(found)}")
        if limits.top1_agreement is not None and not self.top1_agreement >= limits.top1_agreement:
            faults.append(f"top1_agreement: expected at least {limits.top1_agreement:g}, found {self.top1_agreement:g}")
        return faults


def _show(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


@dataclass(frozen=True, slots=True, eq=False)
class Dump:
    """Reference logits and the steps that lead to them.

    logits      float32 [n_rows, n_columns], in the order the steps ask for them
    columns     the token ids that the columns stand for, ascending int32; None means all of the vocabulary
    digests     uint8 [n_rows, 32], SHA-256 of each whole row, little-endian; None where the rows are whole
    log_norm    float64 [n_rows], log of the sum of exp over each whole row; None where the rows are whole
    options     what `Model.session` is to be called with
    meta        how the dump was made: llama.cpp's commit, CPU, the model's hash, …
    """

    path: Path
    n_vocab: int
    steps: tuple[Step, ...]
    logits: np.ndarray
    columns: np.ndarray | None = None
    digests: np.ndarray | None = None
    log_norm: np.ndarray | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> np.ndarray:
        """All decoded token ids in the order of the steps, int32."""
        ids = [ids for name, *arguments in self.steps if name == "decode" for _, ids, _ in arguments[0]]
        return np.concatenate([np.asarray(part, np.int32) for part in ids]) if ids else np.empty(0, np.int32)

    @classmethod
    def record(cls, path: str | Path, steps: Iterable[Step], rows: np.ndarray, **fields: Any) -> Dump:
        """Make a dump of whole rows, float32 [n_rows, n_vocab]; wide ones are reduced to some columns."""
        n_rows, n_vocab = rows.shape
        dump = cls(Path(path), n_vocab, tuple(steps), rows, **fields)
        if n_vocab <= N_SPREAD * 2:
            return dump
        likeliest = np.argpartition(rows, -N_LIKELIEST, axis=1)[:, -N_LIKELIEST:]
        columns = np.union1d(likeliest, np.linspace(0, n_vocab - 1, N_SPREAD, dtype=np.int64)).astype(np.int32)
        digests = np.frombuffer(b"".join(map(_digest, rows)), np.uint8).reshape(n_rows, 32)
        log_norm = np.array([_log_norm(row.astype(np.float64)) for row in rows])
        return cls(Path(path), n_vocab, dump.steps, rows[:, columns], columns, digests, log_norm, **fields)

    def save(self) -> None:
        """Write the dump to its path as `.npz`."""
        head = {"format": FORMAT, "n_vocab": self.n_vocab, "steps": self.steps, "options": dict(self.options)}
        arrays = {"columns": self.columns, "digests": self.digests, "log_norm": self.log_norm}
        given: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
        text = np.array(json.dumps({**head, "meta": dict(self.meta)}))
        np.savez_compressed(self.path, head=text, logits=self.logits, **given)

    def compare(self, rows: np.ndarray) -> Comparison:
        """Compare our whole rows, float32 [n_rows, n_vocab], with the dump's."""
        return compare(rows, self.logits, columns=self.columns, digests=self.digests, log_norm=self.log_norm)


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """The log-probabilities that `llama-perplexity --kl-divergence-base` writes, 16 bits each and clipped at −16.

    tokens      int32 [n_chunks, n_ctx]; the first of each chunk stands for BOS if the vocabulary adds one
    records     uint16 [n_chunks, n_scored, 4 + n_vocab rounded up to even]: scale and offset as float32, then the
                steps above the offset, for the tokens from the middle of each chunk on (tools/perplexity)
    """

    path: Path
    n_vocab: int
    tokens: np.ndarray
    records: np.ndarray

    def log_probs(self, chunk: int, index: int) -> np.ndarray:
        """Return the log-probabilities after one scored token, float32 [n_vocab]."""
        record = self.records[chunk, index]
        scale, offset = np.frombuffer(record[:4].tobytes(), "<f4")
        return np.asarray(scale * record[4 : 4 + self.n_vocab] + offset, np.float32)


def read_dump(path: str | Path) -> Dump | LogProbs:
    """Read a file of reference logits; the kind is told from its first bytes.

    Our own `.npz`; the GGUF file of `llama-results --output`; the `.bin` file of `llama-debug --save-logits`, beside
    which lies its `-tokens.bin`; the file of `llama-perplexity --kl-divergence-base`.

    Raises DumpError (GGUFError for a damaged GGUF file) with the file's name and the reason; OSError as it comes.
    """
    path = Path(path)
    with path.open("rb") as file:
        magic = file.read(8)
    if magic.startswith(MAGIC_NPZ):
        return _read_npz(path)
    if magic.startswith(MAGIC_GGUF):
        return _read_results(path)
    if magic == MAGIC_LOG_PROBS:
        return _read_log_probs(path)
    if path.suffix == ".bin":
        return _read_debug(path)
    raise DumpError(f"{path}: neither .npz nor one of llama.cpp's files of logits (it begins with {magic!r})")


def replay(session: Decoder, steps: Iterable[Step]) -> Iterator[np.ndarray]:
    """Run steps on a session and yield the logits of each item, float32 [n_outputs, n_vocab]."""
    for name, *arguments in steps:
        if name == "decode":
            yield from session.decode_batch([tuple(item) for item in arguments[0]])
        else:
            getattr(session, name)(*arguments)


def compare(
    ours: np.ndarray,
    theirs: np.ndarray,
    *,
    columns: np.ndarray | None = None,
    digests: np.ndarray | None = None,
    log_norm: np.ndarray | None = None,
) -> Comparison:
    """Compare our rows, float32 [n, n_vocab], with a reference's, float32 [n, n_vocab or n_columns].

    The keywords are a dump's fields of the same names. Raises ValueError if the shapes do not agree.
    """
    expected = (len(theirs), theirs.shape[-1] if columns is None else ours.shape[-1])
    if ours.ndim != 2 or ours.shape != expected or not len(ours):
        raise ValueError(f"logits: expected {expected}, ours have {ours.shape}")
    identical = agree = 0
    largest = error = power = divergence = 0.0
    for i, (whole, reference) in enumerate(zip(ours, theirs, strict=True)):
        row = (whole if columns is None else whole[columns]).astype(np.float64)
        base = reference.astype(np.float64)
        same = whole.tobytes() == reference.tobytes() if digests is None else _digest(whole) == digests[i].tobytes()
        difference = np.subtract(row, base, out=np.zeros_like(row), where=row != base)  # equal infinities do not differ
        best = int(base.argmax())
        identical += same
        largest = max(largest, float(np.nan_to_num(np.abs(difference), nan=np.inf).max()))
        error += float(np.square(difference).sum())
        power += float(np.square(base[np.isfinite(base)]).sum())
        agree += int(whole.argmax()) == (best if columns is None else int(columns[best]))
        norm = _log_norm(base) if log_norm is None else float(log_norm[i])
        divergence += _divergence(base - norm, row - _log_norm(whole.astype(np.float64)))
    n = len(ours)
    nmse = error / power if power else float(error > 0)
    return Comparison(n, identical, largest, nmse, divergence / n, agree / n)


def compare_model(model: Model, dump: Dump | LogProbs, **options: Any) -> Comparison:
    """Replay a dump through a model, in a session made with the dump's options (overridden by those given).

    Raises DumpError if the vocabularies differ.
    """
    n_vocab = model.config.n_vocab
    if dump.n_vocab != n_vocab:
        raise DumpError(f"{dump.path}: n_vocab: the dump has {dump.n_vocab}, the model {n_vocab}")
    if isinstance(dump, LogProbs):
        return _compare_log_probs(model, dump, options)
    with model.session(**{**dump.options, **options}) as session:
        return dump.compare(np.concatenate(list(replay(session, dump.steps))))


def _compare_log_probs(model: Model, dump: LogProbs, options: Mapping[str, Any]) -> Comparison:
    n_chunks, n_ctx = dump.tokens.shape
    first, divergence, agree, ours_nll, theirs_nll = n_ctx // 2, 0.0, 0, 0.0, 0.0
    with model.session(**{"n_ctx": n_ctx, "swa_full": False, **options}) as session:
        for chunk, ids in enumerate(dump.tokens.tolist()):
            session.clear()
            start = [model.tokenizer.bos_token_id] if model.tokenizer.add_bos else ids[:1]
            logits = session.decode(start + ids[1:], logits=range(first, n_ctx))
            for index, token in enumerate(ids[first + 1 :]):
                row, base = logits[index].astype(np.float64), dump.log_probs(chunk, index).astype(np.float64)
                row -= _log_norm(row)
                kept = base > -16  # what lies below was clipped when the file was written
                divergence += float((np.exp(base[kept]) * (base[kept] - row[kept])).sum())
                agree += int(row.argmax()) == int(base.argmax())
                ours_nll -= float(row[token])
                theirs_nll -= float(base[token])
    n = n_chunks * dump.records.shape[1]
    perplexities = float(np.exp(ours_nll / n)), float(np.exp(theirs_nll / n))
    return Comparison(n, None, None, None, divergence / n, agree / n, *perplexities)


def _divergence(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Return the KL divergence of two log-distributions, what both leave out counted as one more outcome."""
    p, q = np.exp(theirs), np.exp(ours)
    kept = p > 0
    total = float((p[kept] * (theirs[kept] - ours[kept])).sum())
    p_rest, q_rest = 1 - float(p.sum()), 1 - float(q.sum())
    if p_rest > 1e-9 and q_rest > 1e-9:  # less than that is rounding
        total += p_rest * float(np.log(p_rest / q_rest))
    return max(total, 0.0)


def _log_norm(row: np.ndarray) -> float:
    top = row.max()
    return float(top + np.log(np.exp(row - top).sum()))


def _digest(row: np.ndarray) -> bytes:
    return hashlib.sha256(row.astype("<f4", copy=False).tobytes()).digest()


def _read_npz(path: Path) -> Dump:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(str(arrays.pop("head")))
    except (ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DumpError(f"{path}: not a dump: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise DumpError(f"{path}: head: expected format {FORMAT!r}")
    n_vocab, options, meta = head.get("n_vocab"), head.get("options"), head.get("meta")
    if not isinstance(n_vocab, int) or n_vocab < 1:
        raise DumpError(f"{path}: n_vocab: expected a positive number, found {n_vocab!r}")
    if not isinstance(options, dict) or not isinstance(meta, dict) or options.keys() - OPTIONS:
        raise DumpError(f"{path}: options: expected some of {', '.join(sorted(OPTIONS))}, found {options!r}")
    steps, n_rows = _read_steps(path, head.get("steps"), n_vocab)
    n_columns = len(arrays["columns"]) if "columns" in arrays and arrays["columns"].ndim == 1 else n_vocab
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"logits": ("float32", (n_rows, n_columns))}
    if "columns" in arrays:
        shapes |= {
            "columns": ("int32", (n_columns,)),
            "digests": ("uint8", (n_rows, 32)),
            "log_norm": ("float64", (n_rows,)),
        }
    found = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    if found != shapes:
        raise DumpError(f"{path}: arrays: expected {shapes}, found {found}")
    columns = arrays.get("columns")
    if columns is not None and (np.any(np.diff(columns) <= 0) or columns[0] < 0 or columns[-1] >= n_vocab):
        raise DumpError(f"{path}: columns: expected ascending token ids below {n_vocab}")
    return Dump(path, n_vocab, steps, options=options, meta=meta, **arrays)


def _read_steps(path: Path, steps: Any, n_vocab: int) -> tuple[tuple[Step, ...], int]:
    """Check the steps of a dump and count the rows they ask for."""
    checked: list[Step] = []
    n_rows = 0
    for index, step in enumerate(steps if isinstance(steps, list) else [None]):
        match step:
            case ["decode", [*items]] if items:
                read = tuple(_read_item(item, n_vocab) for item in items)
                if None not in read:
                    checked.append(("decode", read))
                    n_rows += sum({"all": len(ids), "last": 1}.get(str(rows), len(rows)) for _, ids, rows in read)
                    continue
            case ["trim" | "fork", int(a), int(b)] if a >= 0 and b >= 0:
                checked.append(tuple(step))
                continue
            case ["clear", (int() | None)]:
                checked.append(tuple(step))
                continue
        raise DumpError(f"{path}: steps: step {index} is not one that can be replayed: {str(step)[:80]}")
    if not n_rows:
        raise DumpError(f"{path}: steps: no logits are asked for")
    return tuple(checked), n_rows


def _read_item(item: Any, n_vocab: int) -> Any:
    """Return one decoded item as a tuple, or None if it is not one."""
    match item:
        case [int(seq_id), [int(), *_] as ids, rows] if seq_id >= 0 and _all_below(ids, n_vocab):
            if rows in ("all", "last"):
                return seq_id, tuple(ids), rows
            if isinstance(rows, list) and _all_below(rows, len(ids)):
                return seq_id, tuple(ids), tuple(rows)
    return None


def _all_below(numbers: list[Any], end: int) -> bool:
    return all(isinstance(number, int) and 0 <= number < end for number in numbers)


def _read_results(path: Path) -> Dump:
    """Read llama-results' GGUF file: every row of one prompt (its two dimensions are named the other way round)."""
    with GGUFFile(path) as file:
        arrays = {}
        for name, kind, dtype in (("tokens", GGMLType.I32, "<i4"), ("logits", GGMLType.F32, "<f4")):
            info = file.tensors.get(name)
            if info is None or info.type != kind:
                found = "none" if info is None else f"type {info.type}"
                raise DumpError(f"{path}: tensor {name}: expected {kind.name}, found {found}")
            arrays[name] = np.frombuffer(file.data(name).tobytes(), dtype)
    tokens, logits = arrays["tokens"], arrays["logits"]
    if not tokens.size or logits.size % tokens.size or not logits.size:
        raise DumpError(f"{path}: tensor logits: {logits.size} values cannot be rows of {tokens.size} tokens")
    return _of_prompt(path, tokens, logits.reshape(tokens.size, -1), "all")


def _read_debug(path: Path) -> Dump:
    """Read llama-debug's files: the last row of one prompt, and its tokens in a file beside it."""
    if path.stem.endswith(("-embeddings", "-tokens")):
        raise DumpError(f"{path}: expected logits, the name says {path.stem.rpartition('-')[2]}")
    beside = path.with_name(path.stem + "-tokens.bin")
    if not beside.is_file():
        raise DumpError(f"{path}: expected {beside.name} beside it")
    for part in (path, beside):
        if not part.stat().st_size or part.stat().st_size % 4:
            raise DumpError(f"{part}: expected 4-byte values, found {part.stat().st_size} bytes")
    return _of_prompt(path, np.fromfile(beside, "<i4"), np.fromfile(path, "<f4")[None], "last")


def _of_prompt(path: Path, tokens: np.ndarray, logits: np.ndarray, rows: str) -> Dump:
    n_vocab = logits.shape[1]
    if tokens.min() < 0 or tokens.max() >= n_vocab:
        raise DumpError(f"{path}: tokens: expected ids below {n_vocab}, found {tokens.min()} to {tokens.max()}")
    steps = (("decode", ((0, tuple(tokens.tolist()), rows),)),)
    # llama.cpp's tools keep a small cache for windowed layers, unlike its C API
    return Dump(path, n_vocab, steps, logits, options={"n_ctx": len(tokens), "swa_full": False})


def _read_log_probs(path: Path) -> LogProbs:
    size = path.stat().st_size
    if size < 20:
        raise DumpError(f"{path}: expected a header of 20 bytes, found {size}")
    with path.open("rb") as file:
        n_ctx, n_vocab, n_chunks = struct.unpack("<8xIii", file.read(20))
    n_scored, width = n_ctx - 1 - n_ctx // 2, 4 + n_vocab + n_vocab % 2
    if n_vocab < 1 or n_chunks < 1 or n_scored < 1:
        raise DumpError(f"{path}: header: n_ctx {n_ctx}, n_vocab {n_vocab}, n_chunks {n_chunks} make no sense")
    start = 20 + 4 * n_ctx * n_chunks
    if size != start + 2 * n_chunks * n_scored * width:
        raise DumpError(f"{path}: expected {start + 2 * n_chunks * n_scored * width} bytes, found {size}")
    tokens = np.fromfile(path, "<i4", n_ctx * n_chunks, offset=20).reshape(n_chunks, n_ctx)
    if tokens.min() < 0 or tokens.max() >= n_vocab:
        raise DumpError(f"{path}: tokens: expected ids below {n_vocab}, found {tokens.min()} to {tokens.max()}")
    records = np.memmap(path, "<u2", "r", start, (n_chunks, n_scored, width))
    return LogProbs(path, n_vocab, tokens, records)
