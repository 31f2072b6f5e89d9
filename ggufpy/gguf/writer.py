"""Writing GGUF files: metadata of every type, tensors of every type, alignment, splitting.

Pure Python: NumPy is needed only by whoever passes its arrays. Quantizing is the work of `ggufpy.types`. Files are
version 3 and appear whole or not at all: a temporary file is written next to the target and renamed. The parts of a
split model are renamed one after the other, once all are written.
"""

from __future__ import annotations

import os
import secrets
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ggufpy.errors import GGUFError
from ggufpy.gguf.arrays import GGUFArray
from ggufpy.gguf.format import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_KEY,
    MAX_NAME,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    VALUE_CODES,
    VALUE_FORMATS,
    GGMLType,
    is_alignment,
    pad,
)

__all__ = ["GGUFWriter", "write_gguf"]

_VALUE_DTYPES = {"b1": "bool", "u1": "u8", "i1": "i8", "u2": "u16", "i2": "i16", "u4": "u32", "i4": "i32",
                 "u8": "u64", "i8": "i64", "f4": "f32", "f8": "f64"}  # fmt: skip
_TENSOR_DTYPES = {"f4": GGMLType.F32, "f2": GGMLType.F16, "f8": GGMLType.F64,
                  "i1": GGMLType.I8, "i2": GGMLType.I16, "i4": GGMLType.I32, "i8": GGMLType.I64}  # fmt: skip
_INT_RANGES = {"u32": (0, 2**32), "i32": (-(2**31), 2**31), "u64": (0, 2**64), "i64": (-(2**63), 2**63)}
_INTS = ("u32", "i32", "u64", "i64")  # llama.cpp reads single integers as u32 …
_INTS_IN_LIST = ("i32", "u32", "i64", "u64")  # … and demands i32 for tokenizer.ggml.token_type
_SPLIT_KEYS = (SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: memoryview


def _type_of(value: Any) -> str:
    """Choose the value type for a Python value, as `GGUFWriter.add` documents."""
    if isinstance(value, GGUFArray):
        return f"arr[{value.type}]"
    if hasattr(value, "dtype") and value.ndim <= 1:
        name = _VALUE_DTYPES.get(value.dtype.str[1:])
        if name is None:
            raise GGUFError(f"dtype {value.dtype} is no GGUF value type")
        return f"arr[{name}]" if value.ndim else name
    value = _plain(value)
    if isinstance(value, (list, tuple)):
        return f"arr[{_common_type(value, _INTS_IN_LIST)}]"
    return _common_type([value], _INTS)


def _common_type(items: Sequence[Any], ints: Sequence[str]) -> str:
    """Choose the one value type that holds all items."""
    kinds = {_kind(item) for item in items}
    if len(kinds) != 1:
        found = " and ".join(sorted(kinds)) if kinds else "nothing"
        raise GGUFError(f"expected items of one kind, found {found}; give the type, such as arr[f32]")
    kind = kinds.pop()
    if kind != "int":
        return kind
    low, high = min(items), max(items)
    for name in ints:
        if _INT_RANGES[name][0] <= low and high < _INT_RANGES[name][1]:
            return name
    raise GGUFError(f"no integer type holds {low} to {high}")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "f32"
    if isinstance(value, (str, bytes)):
        return "str"
    if isinstance(value, (list, tuple, GGUFArray)):
        return "arr"
    raise GGUFError(f"cannot store a {type(value).__name__}")


def _plain(value: Any) -> Any:
    """Turn a NumPy array or scalar into Python values."""
    return value.tolist() if hasattr(value, "dtype") else value


def _encode(value: Any, type: str, depth: int = MAX_DEPTH) -> bytes:
    """Give the bytes of a value in the file."""
    if not type.startswith("arr"):
        return _encode_items([value], type)
    if not isinstance(value, (list, tuple, GGUFArray)):
        raise GGUFError(f"expected a sequence for {type}, found {value!r}")
    if depth == 0:
        raise GGUFError(f"arrays are nested deeper than {MAX_DEPTH}")
    item_type = (_type_of(value) if type == "arr" else type)[4:-1]
    if item_type.startswith("arr"):
        items = b"".join(_encode(item, item_type, depth - 1) for item in value)
        item_type = "arr"
    else:
        items = _encode_items(value, item_type)
    return struct.pack("<iQ", VALUE_CODES[item_type], len(value)) + items


def _encode_items(items: Sequence[Any], type: str) -> bytes:
    if type == "str":
        raws = items.rawlist() if isinstance(items, GGUFArray) else [_encode_text(item) for item in items]
        return b"".join(struct.pack("<Q", len(raw)) + raw for raw in raws)
    if type not in VALUE_FORMATS:
        raise GGUFError(f"unknown value type {type!r}, expected one of {', '.join(VALUE_CODES)} or arr[…]")
    for item in items:
        if isinstance(item, bool) != (type == "bool"):
            raise GGUFError(f"expected {type}, found {item!r}")
    try:
        return struct.pack(f"<{len(items)}{VALUE_FORMATS[type]}", *items)
    except (struct.error, OverflowError) as error:
        raise GGUFError(f"expected {type}: {error}") from None


def _encode_name(name: Any, limit: int) -> bytes:
    if not isinstance(name, str) or "\0" in name:
        raise GGUFError("expected a str without NUL")
    try:
        raw = name.encode()
    except UnicodeEncodeError as error:
        raise GGUFError(f"not encodable as UTF-8: {error.reason} at index {error.start}") from None
    if not 0 < len(raw) <= limit:
        raise GGUFError(f"expected a name of 1 to {limit} bytes, found {len(raw)}")
    return raw


def _encode_pair(key: str, value: Any, type: str) -> bytes:
    raw = _encode_name(key, MAX_KEY)
    encoded = _encode(value, type)
    code = VALUE_CODES["arr" if type.startswith("arr") else type]
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<i", code) + encoded


def _encode_text(text: Any) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise GGUFError(f"expected str, found {text!r}")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise GGUFError(f"not encodable as UTF-8: {error.reason} at index {error.start}") from None


def _tensor_type(given: GGMLType | str | None, data: Any) -> GGMLType:
    """Check the type given for tensor data, or take it from the data's dtype."""
    dtype = getattr(data, "dtype", None)
    natural = _TENSOR_DTYPES.get(dtype.str[1:]) if dtype is not None else None
    if given is None:
        if natural is None:
            raise GGUFError(f"give the tensor type of {'raw bytes' if dtype is None else dtype}")
        return natural
    try:
        type = GGMLType(given)
    except ValueError:
        raise GGUFError(f"unknown tensor type {given!r}") from None
    if natural not in (None, type):
        raise GGUFError(f"expected data of type {type.label}, found {dtype}; convert it first (ggufpy.types.quantize)")
    return type


def _tensor_shape(given: Sequence[int] | None, data: Any, type: GGMLType) -> tuple[int, ...]:
    """Check the shape given, or take it from the array, whose last axis may count bytes or elements."""
    if given is None:
        if not hasattr(data, "dtype"):
            raise GGUFError("give the shape of raw bytes")
        *rows, row = data.shape or (None,)
        given = () if row is None else (*rows, row * data.dtype.itemsize // type.type_size * type.block_size)
    shape = tuple(given)
    if len(shape) > MAX_DIMS or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise GGUFError(f"expected a shape of at most {MAX_DIMS} sizes, found {shape}")
    return shape


def _tensor_bytes(data: Any) -> memoryview:
    if hasattr(data, "dtype"):
        data = data.astype(data.dtype.newbyteorder("<"), order="C", copy=False).reshape(-1).view("u1")
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise GGUFError(f"expected an array or contiguous bytes: {error}") from None


class GGUFWriter:
    """Collect metadata and tensors, then write them to `path` as one file, or as several.

    `alignment` sets `general.alignment`. A model with more than `max_tensors`, or more than `max_bytes` of tensor data,
    is split into `NAME-0000I-of-0000N.gguf`; a tensor larger than that gets a part of its own. Tensor data is not
    copied: it must not change before `write`. As a context manager it writes at the end of the block, unless an
    exception leaves it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        alignment: int | None = None,
        max_tensors: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        if not all(limit is None or limit > 0 for limit in (max_tensors, max_bytes)):
            raise GGUFError(f"expected positive limits, found max_tensors {max_tensors}, max_bytes {max_bytes}")
        self._max_tensors = max_tensors or sys.maxsize
        self._max_bytes = max_bytes or sys.maxsize
        self._alignment = DEFAULT_ALIGNMENT
        self._pairs: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        if alignment is not None:
            self.add(ALIGNMENT_KEY, alignment)

    def add(self, key: str, value: Any, type: str | None = None) -> None:
        """Add a metadata pair under a type name such as `"u16"` or `"arr[i32]"`, as `GGUFFile.metadata_types` gives it.

        Without a type: bool is bool; an int is the first of u32, i32, u64 and i64 that holds it, ints in a list the
        first of i32, u32, i64 and u64; a float is f32; str and bytes are str; NumPy arrays and scalars go by dtype; a
        `GGUFArray` keeps its own. Raises `GGUFError` for a key or value that does not fit.
        """
        try:
            if key in _SPLIT_KEYS:
                raise GGUFError("the writer sets this key itself")
            if key in self._pairs:
                raise GGUFError("the key was added before")
            type = type or _type_of(value)
            pair = _encode_pair(key, _plain(value), type)
            if key == ALIGNMENT_KEY:
                if type != "u32" or not is_alignment(value):
                    raise GGUFError(f"expected a power of two (u32), found {value!r} ({type})")
                self._alignment = int(value)
            self._pairs[key] = pair
        except GGUFError as error:
            raise GGUFError(f"{key}: {error}") from None

    def add_tensor(
        self, name: str, data: Any, *, type: GGMLType | str | None = None, shape: Sequence[int] | None = None
    ) -> None:
        """Add a tensor: an array, or contiguous bytes with `type` and `shape` (NumPy order).

        An array of floats or signed integers has the type of its dtype. Encoded data, as `ggufpy.types.quantize` makes
        it, is uint8 with `type`; its shape follows from the bytes of a row along the last axis unless given. Raises
        `GGUFError` when name, data, type and shape do not fit together.
        """
        try:
            _encode_name(name, MAX_NAME)
            if name in self._tensors:
                raise GGUFError("the tensor was added before")
            tensor_type = _tensor_type(type, data)
            tensor_shape = _tensor_shape(shape, data, tensor_type)
            raw = _tensor_bytes(data)
            expected = tensor_type.nbytes(tensor_shape)
            if len(raw) != expected:
                what = f"{tensor_type.label} of shape {list(tensor_shape)}"
                raise GGUFError(f"{what} takes {expected} bytes, found {len(raw)}")
            self._tensors[name] = _Tensor(name, tensor_type, tensor_shape, raw)
        except GGUFError as error:
            raise GGUFError(f"{name}: {error}") from None

    def write(self) -> tuple[Path, ...]:
        """Write the file or files and give their paths. An `OSError` leaves what was there before."""
        parts = self._partition()
        paths = self._part_paths(len(parts))
        temporaries = [path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in paths]
        try:
            for i, (temporary, tensors) in enumerate(zip(temporaries, parts, strict=True)):
                with temporary.open("xb") as file:
                    self._write_part(file, self._part_pairs(i, len(parts)), tensors)
            for temporary, path in zip(temporaries, paths, strict=True):
                temporary.replace(path)
        finally:
            for temporary in temporaries:
                temporary.unlink(missing_ok=True)
        return tuple(paths)

    def _partition(self) -> list[list[_Tensor]]:
        parts: list[list[_Tensor]] = [[]]
        size = 0
        for tensor in self._tensors.values():
            nbytes = pad(len(tensor.data), self._alignment)
            if parts[-1] and (len(parts[-1]) >= self._max_tensors or size + nbytes > self._max_bytes):
                parts.append([])
                size = 0
            parts[-1].append(tensor)
            size += nbytes
        return parts

    def _part_paths(self, n: int) -> list[Path]:
        if n == 1:
            return [self.path]
        stem = self.path.name.removesuffix(".gguf")
        return [self.path.with_name(f"{stem}-{i + 1:05}-of-{n:05}.gguf") for i in range(n)]

    def _part_pairs(self, i: int, n: int) -> list[bytes]:
        """Give the pairs of part `i`: the first has all, each its number and alignment (types as in gguf-split)."""
        pairs = [pair for key, pair in self._pairs.items() if i == 0 or key == ALIGNMENT_KEY]
        if n > 1:
            pairs.append(_encode_pair(SPLIT_NO, i, "u16"))
            pairs.append(_encode_pair(SPLIT_COUNT, n, "u16"))
            pairs.append(_encode_pair(SPLIT_TENSORS, len(self._tensors), "i32"))
        return pairs

    def _write_part(self, file: BinaryIO, pairs: list[bytes], tensors: list[_Tensor]) -> None:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
        file.writelines(pairs)
        offset = 0
        for tensor in tensors:
            name, dims = tensor.name.encode(), tensor.shape[::-1]
            file.write(struct.pack("<Q", len(name)) + name)
            file.write(struct.pack(f"<I{len(dims)}QiQ", len(dims), *dims, tensor.type, offset))
            offset += pad(len(tensor.data), self._alignment)
        for tensor in tensors:
            self._pad(file)
            file.write(tensor.data)
        self._pad(file)

    def _pad(self, file: BinaryIO) -> None:
        file.write(bytes(-file.tell() % self._alignment))

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.write()


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any] | None = None,
    *,
    metadata_types: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Path, ...]:
    """Write a GGUF file in one call and give the paths written.

    A tensor is an array or `(data, type, shape)`; `metadata_types` gives the types of the keys that it names (those of
    a `GGUFFile` copy its metadata exactly); `options` are those of `GGUFWriter`.
    """
    writer = GGUFWriter(path, **options)
    types = metadata_types or {}
    for key, value in metadata.items():
        writer.add(key, value, types.get(key))
    for name, tensor in (tensors or {}).items():
        data, type, shape = tensor if isinstance(tensor, tuple) else (tensor, None, None)
        writer.add_tensor(name, data, type=type, shape=shape)
    return writer.write()
