"""`Tensor`, and what the files of this package share: limits, flags, the error for a refused operation."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufpy._ffi.lib import C, ffi, text_of
from ggufpy.backend import Buffer
from ggufpy.errors import ClosedError, GraphError
from ggufpy.gguf import GGMLType
from ggufpy.types import NUMPY_TYPES

if TYPE_CHECKING:
    from ggufpy.graph.context import ContextBase

__all__ = ["MAX_ELEMENTS", "MAX_TENSORS", "Tensor"]

MAX_ELEMENTS = 2**40  # of one tensor
MAX_TENSORS = 2**20  # of one context
MAX_NAME = 63  # bytes: GGML_MAX_NAME less the terminating zero
INT32_MAX = 2**31 - 1

TYPES: tuple[GGMLType | None, ...] = tuple(
    GGMLType(code) if code in GGMLType._value2member_map_ else None for code in range(C.GGML_TYPE_COUNT)
)

# Tensor.layout, as the C helper computes it.
CONTIGUOUS = 1  # no gaps, no permutation
CONTIGUOUS_1 = 2  # the same, but rows may have gaps between them (ggml_is_contiguous_1)
ROWS = 4  # elements within a row are adjacent: nb[0] is the type's size
STEPS = 8  # rows, matrices and so on are evenly spaced, even where there is only one
FRESH = CONTIGUOUS | CONTIGUOUS_1 | ROWS | STEPS  # as every result of an operation that is no view

# Tensor.flags
LEAF = 1  # a tensor without operation, or a plain view of one
WRITTEN = 2  # an operation writes to it
INDEX = 4  # an operation uses its values as row numbers

_DTYPES = [np.dtype(np.uint8) if kind is None else NUMPY_TYPES.get(kind, np.dtype(np.uint8)) for kind in TYPES]
_ONES = (1, 1, 1, 1)
_unpack = struct.Struct("10q").unpack_from  # ne, nb, type, layout
NULL = ffi.NULL


def dims(ne: Sequence[int]) -> list[int]:
    """Drop trailing ones, but never the first dimension."""
    n = 4
    while n > 1 and ne[n - 1] == 1:
        n -= 1
    return list(ne[:n])


def refused(op: str, why: str, **operands: Any) -> GraphError:
    """Make the error for a refused operation: why, then each operand by role."""
    shown = ", ".join(f"{role} = {value!r}" for role, value in operands.items() if value is not None)
    return GraphError(f"{op}: {why}; {shown}" if shown else f"{op}: {why}")


class Tensor:
    """A tensor of a `Context`: shape, strides and type, copied from ggml once; data where the backend put it.

    `ne` and `nb` are the four sizes and byte strides in ggml's order. `root` is the tensor a view looks into. `limit`
    bounds integer values that an operation is known to produce: all lie in 0 … limit − 1.
    """

    __slots__ = ("buffer", "ctx", "flags", "layout", "limit", "nb", "ne", "ptr", "root", "type")

    def __init__(self, ctx: ContextBase, ptr: Any, root: Tensor | None, flags: int, limit: int | None) -> None:
        C.ggufpy_describe(ptr, ctx._shape)
        shape = _unpack(ctx._shape_bytes)
        self.ne: tuple[int, int, int, int] = shape[:4]
        self.nb: tuple[int, int, int, int] = shape[4:8]
        self.type: GGMLType = TYPES[shape[8]]
        self.layout: int = shape[9]
        self.ptr = ptr
        self.ctx = ctx
        self.root = root
        self.flags = flags
        self.limit = limit
        self.buffer: Buffer | None = None

    def __repr__(self) -> str:
        return f"{self.name!r} {self.type.label} {dims(self.ne)}"

    @property
    def name(self) -> str:
        """Give the name (`ggml_get_name`); assigning sets it, at most 63 bytes of UTF-8."""
        return text_of(C.ggml_get_name(self.ptr))

    @name.setter
    def name(self, name: str) -> None:
        text = name.encode()
        if len(text) > MAX_NAME or b"\0" in text:
            raise GraphError(f"a tensor's name has at most {MAX_NAME} bytes and no zero byte, {name!r} has {len(text)}")
        C.ggml_set_name(self.ptr, text)

    @property
    def op(self) -> str:
        """Name the operation that makes the tensor (`ggml_op_desc`), `NONE` for a leaf."""
        return text_of(C.ggml_op_desc(self.ptr))

    @property
    def n_dims(self) -> int:
        """Count the dimensions, trailing ones left out (`ggml_n_dims`)."""
        return len(dims(self.ne))

    @property
    def n_elements(self) -> int:
        """Count the elements (`ggml_nelements`)."""
        ne = self.ne
        return ne[0] * ne[1] * ne[2] * ne[3]

    @property
    def nbytes(self) -> int:
        """Give the bytes from the first to the last element (`ggml_nbytes`)."""
        return int(C.ggml_nbytes(self.ptr))

    @property
    def shape(self) -> tuple[int, ...]:
        """Give the shape in NumPy's order: outermost first, leading ones dropped."""
        return tuple(reversed(dims(self.ne)))

    @property
    def is_contiguous(self) -> bool:
        """Say whether the elements follow each other without gaps (`ggml_is_contiguous`)."""
        return bool(self.layout & CONTIGUOUS)

    @property
    def is_host(self) -> bool:
        """Say whether the data lies in memory that the CPU reads in place."""
        self._placed()
        return bool(C.ggml_backend_buffer_is_host((self.root or self).ptr.buffer))

    @property
    def address(self) -> int:
        """Give the address of the data: a pointer into host memory, or whatever the device calls one."""
        self._placed()
        return int(ffi.cast("uintptr_t", self.ptr.data))

    def set(self, array: np.ndarray[Any, Any]) -> None:
        """Copy an array of the same shape (in NumPy's order) and dtype into the tensor (`ggml_backend_tensor_set`).

        Quantized types take the raw blocks as uint8 (last axis: bytes of a row), bf16 takes uint16.
        """
        if array.dtype != _DTYPES[self.type] or not self._has_shape(array.shape):
            dtype, shape = self._numpy()
            raise GraphError(f"{self!r} takes {dtype} {list(shape)}, not {array.dtype} {list(array.shape)}")
        owner = self._placed()
        self._plain("set")
        if owner is not None and owner.readonly:
            raise GraphError(f"{self!r} lies in memory that cannot be written to")
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        C.ggml_backend_tensor_set(self.ptr, ffi.from_buffer(array), 0, array.nbytes)

    def set_bytes(self, data: Any) -> None:
        """Copy the raw bytes of the whole tensor into it: anything with the buffer protocol."""
        view = memoryview(data)
        if view.nbytes != self.nbytes or not view.c_contiguous:
            raise GraphError(f"{self!r} takes {self.nbytes} contiguous bytes, not {view.nbytes}")
        owner = self._placed()
        self._plain("set_bytes")
        if owner is not None and owner.readonly:
            raise GraphError(f"{self!r} lies in memory that cannot be written to")
        C.ggml_backend_tensor_set(self.ptr, ffi.from_buffer(data), 0, view.nbytes)

    def get(self) -> np.ndarray[Any, Any]:
        """Copy the data into a new array in NumPy's order (`ggml_backend_tensor_get`).

        The data of an intermediate node survives only until something else is computed into its place: flag it with
        `Context.output` before its graph is allocated to keep it.
        """
        dtype, shape = self._numpy()
        owner = self._placed()
        self._plain("get")
        if owner is not None and owner.packed:
            raise GraphError(f"{self!r} is stored rearranged ({owner.type.name}): it cannot be read back")
        array = np.empty(shape, dtype)
        C.ggml_backend_tensor_get(self.ptr, ffi.from_buffer(array), 0, array.nbytes)
        return array

    def numpy_view(self, *, writable: bool = False) -> np.ndarray[Any, Any]:
        """Look at the data in place, without a copy; the memory lives at least as long as the view. Host memory only.

        The view of a computed tensor shows the latest values; once the scheduler allocates another graph it keeps
        showing the last.
        """
        dtype, shape = self._numpy()
        owner = self._placed()
        holder: Any = owner if owner is not None else self.ctx._scheduler
        if not self.is_host:
            raise GraphError(f"{self!r} is not in host memory: use get()")
        if self.type.is_quantized and not self.is_contiguous:
            raise GraphError(f"{self!r} is quantized and not contiguous: no NumPy view of it exists")
        if writable and owner is not None and owner.readonly:
            raise GraphError(f"{self!r} lies in memory that cannot be written to")
        flat = np.frombuffer(holder._lend(self.ptr.data, self.nbytes), np.uint8)
        if self.is_contiguous:
            view = flat.view(dtype).reshape(shape)
        else:
            strides = tuple(reversed(self.nb[: len(shape)]))
            view = np.lib.stride_tricks.as_strided(flat[: self.nb[0]].view(dtype), shape, strides)
        view.flags.writeable = writable
        return view

    def _has_shape(self, shape: tuple[int, ...]) -> bool:
        """Say whether an array of this shape has the tensor's elements in the tensor's order."""
        ne, n = self.ne, len(shape)
        if self.type.is_quantized:
            ne = (self.type.row_nbytes(ne[0]), *ne[1:])
        return n <= 4 and shape[::-1] == ne[:n] and ne[n:] == _ONES[n:]

    def _numpy(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Give the dtype and the shape that stand for this tensor in NumPy."""
        dtype = NUMPY_TYPES.get(self.type)
        if dtype is not None:
            return dtype, self.shape
        return np.dtype(np.uint8), (*self.shape[:-1], self.type.row_nbytes(self.ne[0]))

    def _placed(self) -> Buffer | None:
        """Return the buffer that holds the data, None for the scheduler's; raise when there is no data."""
        if self.ctx._ptr is None:
            raise ClosedError(f"the context of {self!r} is closed")
        root = self.root or self
        if (root.buffer is None and not self.ctx._is_allocated()) or self.ptr.data == NULL:
            raise GraphError(f"{self!r} has no data: bind it to a buffer, or allocate a graph that uses it")
        if root.buffer is not None and root.buffer.closed:
            raise ClosedError(f"the buffer of {self!r} is closed")
        return root.buffer

    def _plain(self, what: str) -> None:
        if not self.layout & CONTIGUOUS:
            raise GraphError(f"{what}: {self!r} is a view with gaps or permuted axes; make it contiguous first (cont)")
