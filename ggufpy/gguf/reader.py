"""Reading GGUF files: metadata, the tensor table, and read-only views of the mapped tensor data.

Pure Python; NumPy is imported only by `GGUFFile.data` and `.dequantize`. Every count, length, offset, size and type is
compared with the size of the file before use. What the metadata means for a model is not decided here.
Shapes are in NumPy order. The format is that of `docs/gguf.md` in the ggml repository, the limits are `gguf.cpp`'s.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from ggufpy.errors import ClosedError, GGUFError
from ggufpy.gguf.arrays import GGUFArray, Nested, Numbers, Strings, text
from ggufpy.gguf.format import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    INT64_MAX,
    MAGIC,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_NAME,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    VALUE_FORMATS,
    VALUE_NAMES,
    VERSIONS,
    GGMLType,
    fault,
    is_alignment,
    pad,
)

if TYPE_CHECKING:
    import numpy as np

__all__ = ["GGUFFile", "Shard", "TensorInfo"]

_U64 = struct.Struct("<Q")
_NUMBERS = {letter: struct.Struct("<" + letter) for letter in "BbHhIiQqfd"}
_TYPES = {int(type): type for type in GGMLType}
_MIN_PAIR = 8 + 1 + 4 + 1  # bytes of the smallest key-value pair: length, one letter, type, one byte
_MIN_TENSOR = 8 + 0 + 4 + 4 + 8  # bytes of the smallest tensor entry: length, no name, no dimensions, type, offset
_MIN_ARRAY = 4 + 8  # bytes of an empty array: item type, count
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describe one tensor of a file.

    `shape` is in NumPy order. `type` is a plain int, and `nbytes` 0, when the type is not in `GGMLType`. `offset`
    counts from the start of the file that is part number `shard`.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType | int
    offset: int
    nbytes: int
    shard: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Hold one mapped file (a model may be split over several): `size` bytes, tensor data from `data_offset` on."""

    path: Path
    size: int
    mapping: mmap.mmap
    data_offset: int


class _Cursor:
    """Walk through a mapped file and never past its end."""

    __slots__ = ("mapping", "path", "pos", "size")

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.mapping = mapping
        self.size = len(mapping)
        self.pos = 0

    def fault(self, reason: str) -> GGUFError:
        return fault(self.path, reason)

    def take(self, n: int, what: str) -> int:
        """Step over `n` bytes and give where they start."""
        pos = self.pos
        if n > self.size - pos:
            raise self.fault(f"{what}: needs {n} bytes at offset {pos}, the file has {self.size - pos} left")
        self.pos = pos + n
        return pos

    def number(self, letter: str, what: str) -> Any:
        number = _NUMBERS[letter]
        return number.unpack_from(self.mapping, self.take(number.size, what))[0]

    def count(self, min_size: int, what: str) -> int:
        """Read how many things of at least `min_size` bytes follow, and check that they can."""
        n: int = self.number("Q", what)
        left = self.size - self.pos
        if n * min_size > left:
            raise self.fault(f"{what}: {n} cannot fit in the {left} bytes left in the file")
        return n

    def string(self, what: str) -> bytes:
        n = self.number("Q", what)
        start = self.take(n, what)
        return self.mapping[start : start + n]

    def name(self, what: str) -> str:
        raw = self.string(what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what}: {raw[:80]!r} is not UTF-8") from None

    def value_type(self, what: str) -> str:
        code = self.number("i", what)
        if code not in VALUE_NAMES:
            raise self.fault(f"{what}: unknown value type {code}, expected 0 to {max(VALUE_NAMES)}")
        return VALUE_NAMES[code]

    def value(self, type: str, what: str) -> Any:
        if type == "str":
            return text(self.string(what))
        if type == "arr":
            return self.array(what, MAX_DEPTH)
        if type == "bool":
            return self.bools(1, what)[0]
        return self.number(VALUE_FORMATS[type], what)

    def array(self, what: str, depth: int) -> GGUFArray:
        if depth == 0:
            raise self.fault(f"{what}: arrays are nested deeper than {MAX_DEPTH}")
        type = self.value_type(what)
        if type == "str":
            return self.strings(self.count(8, what), what)
        if type == "arr":
            n = self.count(_MIN_ARRAY, what)
            return Nested([self.array(what, depth - 1) for _ in range(n)])
        n = self.count(struct.calcsize(VALUE_FORMATS[type]), what)
        return Numbers(type, self.bools(n, what) if type == "bool" else self.view(n, VALUE_FORMATS[type], what))

    def view(self, n: int, letter: Any, what: str) -> Any:
        size = n * struct.calcsize(letter)
        start = self.take(size, what)
        return memoryview(self.mapping)[start : start + size].cast(letter)

    def bools(self, n: int, what: str) -> Any:
        view = self.view(n, "B", what)
        if n and max(view) > 1:
            raise self.fault(f"{what}: a bool is {max(view)}, expected 0 or 1")
        return view.cast("?")

    def strings(self, n: int, what: str) -> GGUFArray:
        """Step over `n` strings without building them: with a large vocabulary, most of the time to open a file."""
        data, start, unpack = self.mapping, self.pos, _U64.unpack_from
        i, pos = 0, start
        try:
            for i in range(n):  # noqa: B007
                pos += 8 + unpack(data, pos)[0]
            whole = pos <= self.size
        except (struct.error, OverflowError):
            whole = False
        if not whole:
            raise self.fault(f"{what}: the file ends before string {i} of {n} is complete")
        self.pos = pos
        return Strings(data, start, pos, n)


@dataclass(frozen=True, slots=True)
class _Part:
    """Hold what one file says, before the parts of a split model are put together."""

    shard: Shard
    version: int
    alignment: int
    metadata: dict[str, Any]
    metadata_types: dict[str, str]
    tensors: list[TensorInfo]


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a FIFO that nobody writes to would block for ever


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0, opener=_open_nonblocking)
    except ValueError as error:  # NUL, or a surrogate that stands for no byte
        raise fault(path, f"no file can have this name ({error})") from None


def _map(path: Path) -> mmap.mmap:
    """Map a regular file for reading. OSError passes through; anything else that cannot be mapped is a GGUFError."""
    with _open(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise fault(path, "not a regular file")
        if status.st_size == 0:
            raise fault(path, "the file is empty")
        if sys.version_info >= (3, 13) and os.name == "posix":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(cursor: _Cursor) -> int:
    """Check the magic and give the version."""
    if sys.byteorder != "little":
        raise cursor.fault("ggufpy reads GGUF on little-endian machines only")
    magic = cursor.mapping[:4]
    if magic != MAGIC:
        raise cursor.fault(f"not a GGUF file: expected it to start with {MAGIC!r}, found {magic!r}")
    cursor.pos = 4
    version: int = cursor.number("I", "version")
    if version and version & 0xFFFF == 0:
        raise cursor.fault("big-endian GGUF; ggufpy reads little-endian files only")
    if version not in VERSIONS:
        raise cursor.fault(f"GGUF version {version}, expected one of {VERSIONS}")
    return version


def _read_metadata(cursor: _Cursor, n: int) -> tuple[dict[str, Any], dict[str, str]]:
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    for i in range(n):
        key = cursor.name(f"key {i}")
        if not key:
            raise cursor.fault(f"key {i} is empty")
        if key in metadata:
            raise cursor.fault(f"{key}: the key occurs twice")
        type = cursor.value_type(key)
        metadata[key] = value = cursor.value(type, key)
        types[key] = f"arr[{value.type}]" if type == "arr" else type
    return metadata, types


def _read_alignment(path: Path, metadata: Mapping[str, Any], types: Mapping[str, str]) -> int:
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT
    alignment = metadata[ALIGNMENT_KEY]
    if types[ALIGNMENT_KEY] != "u32" or not is_alignment(alignment):
        raise fault(
            path, f"{ALIGNMENT_KEY}: expected a power of two (u32), found {alignment!r} ({types[ALIGNMENT_KEY]})"
        )
    return alignment  # type: ignore[no-any-return]


def _read_tensor(cursor: _Cursor, i: int, shard: int) -> TensorInfo:
    """Read one entry of the tensor table; its offset still counts from the start of the tensor data."""
    name = cursor.name(f"name of tensor {i}")
    if len(name.encode()) > MAX_NAME or "\0" in name:
        raise cursor.fault(f"tensor {i}: expected a name of at most {MAX_NAME} bytes without NUL, found {name[:80]!r}")
    n_dims = cursor.number("I", name)
    if n_dims > MAX_DIMS:
        raise cursor.fault(f"{name}: expected at most {MAX_DIMS} dimensions, found {n_dims}")
    shape = tuple(cursor.number("Q", name) for _ in range(n_dims))[::-1]
    if prod(max(n, 1) for n in shape) > INT64_MAX:
        raise cursor.fault(f"{name}: shape {list(shape)} has more elements than fit in 63 bits")
    code = cursor.number("i", name)
    type = _TYPES.get(code)
    try:
        nbytes = type.nbytes(shape) if type is not None else 0
    except GGUFError as error:
        raise cursor.fault(f"{name}: {error}") from None
    return TensorInfo(name, shape, code if type is None else type, cursor.number("Q", name), nbytes, shard)


def _place(cursor: _Cursor, tensors: list[TensorInfo], data_offset: int, alignment: int) -> list[TensorInfo]:
    """Check that tensors follow each other as ggml demands and lie inside the file; make their offsets absolute."""
    placed: list[TensorInfo] = []
    expected = 0
    known = True
    for tensor in tensors:
        # nothing tells where a tensor of unknown type ends, so the next one may start at any aligned place after it
        after_unknown = not known and tensor.offset >= expected and tensor.offset % alignment == 0
        if tensor.offset != expected and not after_unknown:
            raise cursor.fault(f"{tensor.name}: expected at data offset {expected}, found at {tensor.offset}")
        start = data_offset + tensor.offset
        if start + tensor.nbytes > cursor.size and tensor.nbytes:
            have = max(cursor.size - start, 0)
            raise cursor.fault(
                f"{tensor.name}: needs {tensor.nbytes} bytes at offset {start}, the file has {have} there "
                f"({cursor.size} in all); is the download complete?"
            )
        placed.append(replace(tensor, offset=start))
        expected = tensor.offset + pad(tensor.nbytes, alignment)
        known = isinstance(tensor.type, GGMLType)
    return placed


def _read_part(path: Path, number: int) -> _Part:
    mapping = _map(path)
    cursor = _Cursor(path, mapping)
    version = _read_header(cursor)
    n_tensors = cursor.count(_MIN_TENSOR, "tensor count")
    n_pairs = cursor.count(_MIN_PAIR, "key count")
    metadata, types = _read_metadata(cursor, n_pairs)
    alignment = _read_alignment(path, metadata, types)
    tensors = [_read_tensor(cursor, i, number) for i in range(n_tensors)]
    data_offset = pad(cursor.pos, alignment) if tensors else cursor.pos
    tensors = _place(cursor, tensors, data_offset, alignment)
    return _Part(Shard(path, cursor.size, mapping, data_offset), version, alignment, metadata, types, tensors)


def _split_value(part: _Part, key: str) -> int:
    value = part.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise fault(part.shard.path, f"{key}: expected an integer, found {value!r}")
    return value


def _read_parts(path: Path) -> list[_Part]:
    """Read the file, and when it is one part of a split model all other parts, in order."""
    opened = _read_part(path, 0)
    n_parts = _split_value(opened, SPLIT_COUNT) if SPLIT_COUNT in opened.metadata else 1
    if n_parts <= 1:
        return [opened]
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != n_parts:
        raise fault(path, f"{SPLIT_COUNT} is {n_parts}: expected a name that ends in -0000N-of-{n_parts:05}.gguf")
    parts = []
    for i in range(n_parts):
        part_path = path.with_name(f"{match[1]}-{i + 1:05}-of-{n_parts:05}.gguf")
        part = opened if i == 0 and part_path == path else _read_part(part_path, i)
        for key, expected in ((SPLIT_NO, i), (SPLIT_COUNT, n_parts)):
            if _split_value(part, key) != expected:
                raise fault(part_path, f"{key}: expected {expected}, found {part.metadata[key]}")
        parts.append(part)
    return parts


def _join_tensors(parts: list[_Part]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise fault(part.shard.path, f"{tensor.name}: the tensor occurs twice")
            tensors[tensor.name] = tensor
    if len(parts) > 1 and SPLIT_TENSORS in parts[0].metadata:
        expected = _split_value(parts[0], SPLIT_TENSORS)
        if len(tensors) != expected:
            raise fault(parts[0].shard.path, f"{SPLIT_TENSORS}: expected {expected}, the parts hold {len(tensors)}")
    return tensors


class GGUFFile:
    """Open a GGUF file, or all parts of a split one from any of them, and map it read-only.

    `metadata` maps keys to Python values (`GGUFArray` for arrays), those of the first part; `metadata_types` maps the
    same keys to type names such as `"u32"` or `"arr[str]"`. `tensors` maps names to `TensorInfo` in file order. Bytes
    of a string that are not UTF-8 are kept as surrogate escapes. A context manager.

    Raises `OSError` when a file cannot be opened and `GGUFError`, with `path` and `reason`, when it is not valid GGUF.
    Cutting a file short while it is mapped kills the process on the next access (SIGBUS); replacing it by a rename does
    no harm.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        parts = _read_parts(self.path)
        first = parts[0]
        self.version = first.version
        self.alignment = first.alignment
        self.metadata: Mapping[str, Any] = MappingProxyType(first.metadata)
        self.metadata_types: Mapping[str, str] = MappingProxyType(first.metadata_types)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_join_tensors(parts))
        self._shards: tuple[Shard, ...] | None = tuple(part.shard for part in parts)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Give the mapped files in order. ClosedError after `close()`."""
        if self._shards is None:
            raise ClosedError(f"{self.path} is closed")
        return self._shards

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Give a tensor's bytes as a flat read-only uint8 view of the mapping, which it keeps alive.

        The view outlives `close()`. Raises `GGUFError` for an unknown name or tensor type, `ClosedError` when closed.
        """
        import numpy as np

        shards = self.shards
        tensor = self._tensor(name)
        if not isinstance(tensor.type, GGMLType):
            raise fault(shards[tensor.shard].path, f"{name}: type {tensor.type} is not supported by this ggml")
        view = memoryview(shards[tensor.shard].mapping)[tensor.offset : tensor.offset + tensor.nbytes]
        return np.frombuffer(view, np.uint8)

    def dequantize(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Give a tensor as a new float32 array of its shape, converted by ggml. Raises as `data` does."""
        data, tensor = self.data(name), self._tensor(name)
        from ggufpy.types import dequantize

        return dequantize(data, GGMLType(tensor.type), tensor.shape)

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise fault(self.path, f"no tensor is named {name!r}")
        return self.tensors[name]

    def close(self) -> None:
        """Let go of the mapping, which ends with its last view, array or `Shard`. Metadata and tensor table stay."""
        self._shards = None

    def __enter__(self) -> GGUFFile:
        _ = self.shards  # refuses a closed file
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {str(self.path)!r}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"
