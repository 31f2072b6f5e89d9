"""Sessions on disk: what a session, or one of its sequences, holds, as a file that is written whole or not at all.

A file is, in this order and in little-endian byte order: MAGIC, the version (u32), the length of the header (u32) and
of the file (u64); the header, JSON that says whose file it is and what it holds; tokens and cells, i32; keys, values
and states, raw, of the cells in use only; and a BLAKE2b checksum of all before it. A file is read twice: once for the
checksum, and once that is right, into the session. This file knows the format; what memory means is memory.py's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ggufpy.cells import Cells
from ggufpy.errors import ContextLengthError, SnapshotError
from ggufpy.gguf import GGUFFile
from ggufpy.graph import Tensor
from ggufpy.memory import KVCache, Memory
from ggufpy.states import StateCache

__all__ = ["MAGIC", "VERSION", "Subject", "fingerprint", "load", "save"]

MAGIC = b"GGUFPYS\n"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ")
_CHECKSUM = 16
_CHUNK = 2**20
_N_SAMPLES, _SAMPLE = 16, 256
OF_WHOLE = ("n_seq_max", "n_stream")
"""Options that a file of one sequence does not depend on."""

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]


def fingerprint(file: GGUFFile) -> str:
    """Tell models apart at little cost: hyper-parameters, the tensor table, and a few bytes of a few tensors.

    Names, tokens and templates do not count: what a cache holds does not depend on them.
    """
    metadata, digest = file.metadata, hashlib.blake2b(digest_size=_CHECKSUM)
    prefix = f"{metadata['general.architecture']}."
    for key in sorted(key for key in metadata if key.startswith(prefix)):
        value = metadata[key]
        digest.update(repr((key, value if isinstance(value, (str, int, float)) else list(value))).encode())
    names = sorted(file.tensors)
    for name in names:
        info = file.tensors[name]
        digest.update(repr((name, tuple(info.shape), int(info.type))).encode())
    for name in names[:: max(1, len(names) // _N_SAMPLES)]:
        data = file.data(name)
        digest.update(data[len(data) // 2 :][:_SAMPLE].tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Subject:
    """The session that a file is made of, or read into."""

    memory: Memory
    tokens: list[list[int]]  # of each sequence
    model: Mapping[str, str]
    options: Mapping[str, Any]  # what decides how memory is laid out
    n_ctx_seq: int
    n_vocab: int


# ------------------------------------------------------------------------------------------------------------ writing


def save(path: str | os.PathLike[str], subject: Subject, seq_id: int | None) -> None:
    """Write all sequences, or one. OSError where that fails; a file that was there before is then as it was."""
    memory, tokens = subject.memory, subject.tokens if seq_id is None else [subject.tokens[seq_id]]
    arrays: list[npt.NDArray[Any]] = [np.asarray(ids, "<i4") for ids in tokens]
    caches: list[Any] = []
    held: list[Any] = []
    for cache in memory.caches:
        if isinstance(cache, StateCache):
            rows = cache.rows if seq_id is None else [cache.rows[seq_id]]
            caches.append({"rows": [None if row == cache.empty else row for row in rows]})
            held.append(_rows_in_use(rows, cache.empty))
        else:
            streams = _streams(cache, seq_id)
            caches.append({"streams": [{"n_cells": len(kept.at), "head": kept.head} for _, kept in streams]})
            for _, kept in streams:
                arrays += [kept.at.astype("<i4"), kept.pos.astype("<i4"), kept.has.astype(np.uint8)]
            held.append([(stream, kept.at) for stream, kept in streams])
    header = json.dumps(
        {
            "model": dict(subject.model),
            "options": dict(subject.options),
            "whole": seq_id is None,
            "n_tokens": [len(ids) for ids in tokens],
            "caches": caches,
        }
    ).encode()
    size = _HEAD.size + len(header) + sum(a.nbytes for a in arrays) + _CHECKSUM
    size += sum(_nbytes(cache, where) for cache, where in zip(memory.caches, held, strict=True))
    with _replacing(Path(os.path.realpath(path))) as file:
        digest = hashlib.blake2b(digest_size=_CHECKSUM)

        def write(data: Any) -> None:
            digest.update(data)
            file.write(data)

        write(_HEAD.pack(MAGIC, VERSION, len(header), size))
        write(header)
        for array in arrays:
            write(np.ascontiguousarray(array))
        for cache, where in zip(memory.caches, held, strict=True):
            for part in _parts(cache, where):
                part.write(write)
        file.write(digest.digest())
        assert file.tell() == size


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes a path's place once it is complete and on the disk."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    with contextlib.suppress(OSError):  # not every system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# ------------------------------------------------------------------------------------------------- what is in memory


@dataclass(frozen=True, slots=True)
class _Kept:
    """The cells in use of a stream, or those of one sequence in it."""

    at: Ints  # the cells, ascending
    pos: Ints
    has: npt.NDArray[np.bool_]  # [rows, cells]
    head: int


def _streams(cache: KVCache, seq_id: int | None) -> list[tuple[int, _Kept]]:
    """Return what a file is to have of a cache: all streams, or one sequence."""
    if seq_id is None:
        return [(stream, _kept(cells, slice(None))) for stream, cells in enumerate(cache.cells)]
    stream, row = cache.stream_row(seq_id)
    return [(stream, _kept(cache.cells[stream], slice(row, row + 1)))]


def _kept(cells: Cells, rows: slice) -> _Kept:
    at = np.flatnonzero(cells.has[rows, : cells.end].any(axis=0)).astype(np.int32)
    return _Kept(at, cells.pos[at], cells.has[rows][:, at], cells.head)


def _rows_in_use(rows: Sequence[int], empty: int) -> list[int]:
    """Return the rows of states in the order in which a file has them."""
    return sorted({row for row in rows if row != empty})


def _nbytes(cache: KVCache | StateCache, where: Any) -> int:
    """Return how many bytes of keys, values or states a file has of a cache."""
    if isinstance(cache, StateCache):
        return len(where) * 4 * sum(tensor.ne[0] for tensor in cache.tensors.values())
    each = sum(t.type.row_nbytes(t.ne[0]) for tensors in (cache.k, cache.v) for t in tensors.values())
    return each * sum(len(at) for _, at in where)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some cells' bytes of one tensor. `transposed`: [.., cells, width of one] instead of [cells, bytes of each]."""

    tensor: Tensor
    shape: tuple[int, ...]  # [streams, ...] of the tensor
    stream: int
    at: Ints | list[int]
    transposed: bool = False

    def write(self, write: Any) -> None:
        """Hand the bytes to a function."""
        if len(self.at):
            bytes, index = self._look(self._data(writable=False)), self._index()
            write(np.ascontiguousarray(bytes[:, index] if self.transposed else bytes[index]))

    def read(self, readinto: Any) -> None:
        """Let a function write bytes to where they belong."""
        if not len(self.at):
            return
        data = self._data(writable=True)
        bytes, index = self._look(data), self._index()
        chosen = bytes[:, index] if self.transposed else bytes[index]
        if chosen.flags.c_contiguous and np.shares_memory(chosen, bytes):
            readinto(chosen)
        else:
            chosen = np.empty(chosen.shape, np.uint8)
            readinto(chosen)
            if self.transposed:
                bytes[:, index] = chosen
            else:
                bytes[index] = chosen
        if not self.tensor.is_host:
            self.tensor.set(data)

    def _data(self, *, writable: bool) -> npt.NDArray[Any]:
        return self.tensor.numpy_view(writable=writable) if self.tensor.is_host else self.tensor.get()

    def _look(self, data: npt.NDArray[Any]) -> Bytes:
        """View the stream's bytes: [cells, bytes], or, transposed, [width, cells, bytes of a value]."""
        shaped = data.reshape(self.shape)[self.stream]
        bytes: Bytes = shaped[..., None].view(np.uint8) if self.transposed else shaped.view(np.uint8)
        return bytes

    def _index(self) -> Any:
        first, last = int(self.at[0]), int(self.at[-1])
        return slice(first, last + 1) if last - first == len(self.at) - 1 else np.asarray(self.at)


def _parts(cache: KVCache | StateCache, where: Any) -> Iterator[_Part]:
    """List what a file has of a cache, in its order: streams and their cells, or the rows of states."""
    if isinstance(cache, StateCache):
        for tensor in cache.tensors.values():
            yield _Part(tensor, (1, tensor.ne[1], -1), 0, where)
        return
    for stream, at in where:
        for tensors, transposed in ((cache.k, False), (cache.v, cache.transposed_v)):
            for tensor in tensors.values():
                middle = -1 if transposed else cache.size
                shape = (cache.n_stream, middle, cache.size if transposed else -1)
                yield _Part(tensor, shape, stream, at, transposed)


# ------------------------------------------------------------------------------------------------------------ reading


class _Reader:
    """A file that has been found whole, from behind its fixed head on."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size, self.n_header = self._check()
        file.seek(0)
        self.digest = hashlib.blake2b(digest_size=_CHECKSUM)
        self._take(bytearray(_HEAD.size))

    def _check(self) -> tuple[int, int]:
        head = self.file.read(_HEAD.size)
        if head[: len(MAGIC)] != MAGIC:
            raise self.refused(f"expected a saved session, which starts with {MAGIC!r}, found {head[: len(MAGIC)]!r}")
        if len(head) < _HEAD.size:
            raise self.refused(f"truncated: expected at least {_HEAD.size} bytes, found {len(head)}")
        _, version, n_header, size = _HEAD.unpack(head)
        if version != VERSION:
            raise self.refused(f"expected version {VERSION}, found {version}; another release of ggufpy wrote it")
        found = os.fstat(self.file.fileno()).st_size
        if found != size:
            raise self.refused(f"truncated or damaged: expected {size} bytes, found {found}")
        if _HEAD.size + n_header + _CHECKSUM > size:
            raise self.refused(f"damaged: a header of {n_header} bytes does not fit a file of {size}")
        digest, left = hashlib.blake2b(head, digest_size=_CHECKSUM), size - _HEAD.size - _CHECKSUM
        while left > 0 and (chunk := self.file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
        self.checksum = self.file.read(_CHECKSUM)
        if left or self.checksum != digest.digest():
            raise self.refused(f"damaged: expected checksum {self.checksum.hex()}, found {digest.hexdigest()}")
        return size, n_header

    def _take(self, into: Any) -> Any:
        view = memoryview(into)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if len(view) and self.file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise self.refused("it was changed while it was read")
        self.digest.update(view)
        return into

    def header(self) -> Any:
        """Read the header."""
        return json.loads(self._take(bytearray(self.n_header)))

    def ints(self, n: int) -> Ints:
        """Read some integers."""
        if not 0 <= n <= self.size:
            raise self.refused(f"unsound: it cannot have {n} integers")
        array: Ints = self._take(np.empty(n, "<i4")).astype(np.int32)
        return array

    def bools(self, n_rows: int, n: int) -> npt.NDArray[np.bool_]:
        """Read which rows have which cells."""
        array: npt.NDArray[np.bool_] = self._take(np.empty((n_rows, n), np.uint8)) != 0
        return array

    def readinto(self, array: Bytes) -> None:
        """Read the bytes of an array."""
        self._take(array)

    def done(self) -> None:
        """Make sure that what was read is what was checked."""
        if self.file.tell() != self.size - _CHECKSUM or self.digest.digest() != self.checksum:
            raise self.refused("it was changed while it was read")

    def refused(self, why: str) -> SnapshotError:
        """Make the error for this file."""
        error = SnapshotError(f"{self.path}: {why}")
        error.path = self.path
        return error


def load(path: str | os.PathLike[str], subject: Subject, seq_id: int | None) -> None:
    """Read all sequences, or one into `seq_id`, in the place of what is there.

    Raises OSError, SnapshotError and ContextLengthError, and nothing has changed. Only where a file that was found good
    can no longer be read, what it was to replace is lost.
    """
    caches = subject.memory.caches
    with Path(path).open("rb") as file:
        reader = _Reader(Path(path), file)
        try:
            header = reader.header()
            _check_header(reader, header, subject, seq_id)
            tokens = [reader.ints(int(n)).tolist() for n in header["n_tokens"]]
            _check_tokens(reader, tokens, subject, seq_id)
            pairs = zip(caches, header["caches"], strict=True)
            plan = [_plan(reader, cache, kept, seq_id, [len(ids) for ids in tokens]) for cache, kept in pairs]
            size = file.tell() + _CHECKSUM + sum(_nbytes(c, where) for c, (_, where) in zip(caches, plan, strict=True))
        except (SnapshotError, ContextLengthError):
            raise
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise reader.refused(f"unsound: {error!r}") from error
        if size != reader.size:
            raise reader.refused(f"unsound: expected {size} bytes, found {reader.size}")
        _take_over(reader, subject, seq_id, plan, tokens)


def _take_over(reader: _Reader, subject: Subject, seq_id: int | None, plan: Any, tokens: list[list[int]]) -> None:
    """Let the session hold what the file has."""
    memory, numbers = subject.memory, range(len(subject.tokens)) if seq_id is None else (seq_id,)
    for cache, (after, _) in zip(memory.caches, plan, strict=True):
        cache.restore(after)
    try:
        for cache, (_, where) in zip(memory.caches, plan, strict=True):
            for part in _parts(cache, where):
                part.read(reader.readinto)
        reader.done()
        for number, ids in zip(numbers, tokens, strict=True):
            subject.tokens[number][:] = ids
    except BaseException:
        for number in numbers:
            memory.trim(number, 0)
            subject.tokens[number].clear()
        raise


def _check_header(reader: _Reader, header: Any, subject: Subject, seq_id: int | None) -> None:
    """Refuse what belongs to another model or to another kind of session."""
    whole = header["whole"]
    if whole and seq_id is not None:
        raise reader.refused("it holds a whole session: expected no seq_id to load it into")
    if not whole and seq_id is None:
        raise reader.refused("it holds one sequence: expected the seq_id that it is to become")
    for name, expected in subject.model.items():
        if header["model"][name] != expected:
            raise reader.refused(f"another model's: expected {name} {expected!r}, found {header['model'][name]!r:.80}")
    for name, expected in subject.options.items():
        found = header["options"][name]
        if found != expected and (whole or name not in OF_WHOLE):
            raise reader.refused(f"another kind of session's: expected {name} {expected!r}, found {found!r:.80}")


def _check_tokens(reader: _Reader, tokens: list[list[int]], subject: Subject, seq_id: int | None) -> None:
    n_seq = len(subject.tokens) if seq_id is None else 1
    if len(tokens) != n_seq:
        raise reader.refused(f"unsound: expected {n_seq} sequences, found {len(tokens)}")
    for ids in tokens:
        if len(ids) > subject.n_ctx_seq:
            raise ContextLengthError(
                f"{reader.path}: a sequence of {len(ids)} tokens does not fit a context of {subject.n_ctx_seq}"
            )
        if ids and not 0 <= min(ids) <= max(ids) < subject.n_vocab:
            raise reader.refused(f"unsound: expected ids from 0 to {subject.n_vocab - 1}")


def _plan(reader: _Reader, cache: KVCache | StateCache, kept: Any, seq_id: int | None, n: list[int]) -> Any:
    """Return what a cache's `restore` is to be given, and where its data go; `n` counts each sequence's tokens."""
    if isinstance(cache, StateCache):
        return _plan_states(reader, cache, kept["rows"], seq_id, n)
    n_stream, n_rows = (cache.n_stream, len(cache.cells[0].has)) if seq_id is None else (1, 1)
    if len(kept["streams"]) != n_stream:
        raise reader.refused(f"unsound: expected {n_stream} streams, found {len(kept['streams'])}")
    streams = []
    for i, stream in enumerate(kept["streams"]):
        at, pos = reader.ints(int(stream["n_cells"])), reader.ints(int(stream["n_cells"]))
        streams.append(_Kept(at, pos, reader.bools(n_rows, len(at)), int(stream["head"])))
        _check_cells(reader, cache, streams[-1], n[i * n_rows : (i + 1) * n_rows])
    return _plan_whole(reader, cache, streams) if seq_id is None else _plan_sequence(reader, cache, streams[0], seq_id)


def _check_cells(reader: _Reader, cache: KVCache, kept: _Kept, n: list[int]) -> None:
    """Check that each sequence has one cell for each position that its continuation looks at."""
    at, pos = kept.at, kept.pos
    checks = [len(n) == len(kept.has), kept.head >= 0, kept.has.any(axis=0).all(), (np.diff(at, prepend=-1) > 0).all()]
    for has, n_tokens in zip(kept.has, n, strict=False):
        mine = np.sort(pos[has])
        needed = max(0, cache.window.first(n_tokens)) if cache.window else 0
        checks += [(np.diff(mine, prepend=-1) > 0).all(), np.array_equal(mine[mine >= needed], range(needed, n_tokens))]
    if not all(checks):
        raise reader.refused("unsound: its cells are not those of its tokens")


def _plan_whole(reader: _Reader, cache: KVCache, streams: list[_Kept]) -> Any:
    after = [Cells(cache.size, len(kept.has)) for kept in streams]
    for cells, kept in zip(after, streams, strict=True):
        if len(kept.at) and kept.at[-1] >= cache.size:
            raise ContextLengthError(
                f"{reader.path}: its {int(kept.at[-1]) + 1} cells do not fit a cache of {cache.size}"
            )
        cells.fill(kept.at, kept.pos, kept.has)
        cells.head = min(kept.head, cache.size)
    return after, [(stream, kept.at) for stream, kept in enumerate(streams)]


def _plan_sequence(reader: _Reader, cache: KVCache, kept: _Kept, seq_id: int) -> Any:
    """Let a sequence have the cells it had, where nobody else has them; otherwise others, in the same order."""
    after, (stream, row), at = cache.snapshot(), cache.stream_row(seq_id), kept.at
    cells = after[stream]
    cells.remove(row, 0, 2**31 - 1)
    alone = not cells.used
    if len(at) and (at[-1] >= cache.size or (cells.pos[at] >= 0).any()):
        found = cells.find(len(at), None)
        if found is None:
            raise ContextLengthError(f"{reader.path}: no room for {len(at)} cells in a cache of {cache.size}")
        at, alone = found.astype(np.int32), False
    has = np.zeros((len(cells.has), len(at)), np.bool_)
    has[row] = True
    cells.fill(at, kept.pos, has)
    if alone:
        cells.head = min(kept.head, cache.size)
    return after, [(stream, at)]


def _plan_states(reader: _Reader, cache: StateCache, rows: Any, seq_id: int | None, n: list[int]) -> Any:
    kept = [cache.empty if row is None else int(row) for row in rows]
    limit = 2**31 if seq_id is not None else cache.empty
    if len(kept) != len(n) or any(
        row != cache.empty and not 0 <= row < limit if count else rows[i] is not None
        for i, (row, count) in enumerate(zip(kept, n, strict=True))
    ):
        raise reader.refused("unsound: its states are not those of its sequences")
    if seq_id is None:
        return (kept, list(n)), _rows_in_use(kept, cache.empty)
    after, n_past = cache.snapshot()
    after[seq_id], n_past[seq_id] = cache.empty, n[0]
    if not n[0]:
        return (after, n_past), []
    after[seq_id] = next(row for row in range(cache.empty) if row not in after)
    return (after, n_past), [after[seq_id]]
