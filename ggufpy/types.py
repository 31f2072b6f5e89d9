"""The tensor types as the loaded ggml has them: checked against `GGMLType` at import; conversion to and from float32.

It owns quantizing and dequantizing through ggml's own functions, and which NumPy dtype stands for which type. The
table of types itself is `gguf.GGMLType`. Shapes are in NumPy's order: a row runs along the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ggufpy._ffi.lib import C, ffi, text_of
from ggufpy.errors import BuildError, GraphError
from ggufpy.gguf import GGMLType

__all__ = ["NUMPY_TYPES", "dequantize", "needs_imatrix", "quantize"]

NUMPY_TYPES: dict[GGMLType, np.dtype[Any]] = {
    GGMLType.F32: np.dtype(np.float32),
    GGMLType.F16: np.dtype(np.float16),
    GGMLType.F64: np.dtype(np.float64),
    GGMLType.I8: np.dtype(np.int8),
    GGMLType.I16: np.dtype(np.int16),
    GGMLType.I32: np.dtype(np.int32),
    GGMLType.I64: np.dtype(np.int64),
    GGMLType.BF16: np.dtype(np.uint16),  # NumPy has no bfloat16: the bits
}

# Made by kernels for their own use; ggml has no function that quantizes whole tensors to them.
_INTERNAL = (GGMLType.Q8_1, GGMLType.Q8_K)
_MAX_VALUE = 65504.0  # blocks have f16 scales
_MAX_WEIGHT = 1e9  # ggml squares and sums; its searches must not meet infinities, some of them abort


def _check_table() -> None:
    """Compare the committed table of types with the loaded ggml."""
    for kind in GGMLType:
        known = (kind.block_size, kind.type_size, kind.label)
        loaded = (C.ggml_blck_size(kind), C.ggml_type_size(kind), text_of(C.ggml_type_name(kind)))
        if known != loaded:
            raise BuildError(f"type {int(kind)}: ggufpy knows it as {known}, the loaded ggml as {loaded}")


_check_table()


def needs_imatrix(type: GGMLType | int) -> bool:
    """Say whether quantizing to a type takes an importance matrix (`ggml_quantize_requires_imatrix`)."""
    return bool(C.ggml_quantize_requires_imatrix(_kind(type)))


def _kind(type: GGMLType | int) -> GGMLType:
    try:
        return GGMLType(type)
    except ValueError:
        raise GraphError(f"this ggml has no type {type}") from None


def quantize(
    array: np.ndarray[Any, Any], type: GGMLType | int, imatrix: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Convert an array to the bytes of a ggml type: uint8 [..., bytes of a row] (`ggml_quantize_chunk`).

    Quantized types and bf16 take floats, which are rounded to float32 first; `imatrix` weighs the columns (float32
    [row length]). Raises GraphError for rows that do not fill whole blocks, a missing imatrix, values that are not
    finite or lie beyond ±65504 (block types only), integers that do not fit, and types that ggml cannot quantize to.
    """
    kind = _kind(type)
    if array.ndim == 0 or array.size == 0:
        raise GraphError(f"quantize: an array with elements expected, not the shape {list(array.shape)}")
    if kind in _INTERNAL:
        raise GraphError(f"quantize: {kind.label} is for ggml's own use")
    row, n_rows = array.shape[-1], array.size // array.shape[-1]
    if row % kind.block_size:
        raise GraphError(
            f"quantize: rows of {row} elements do not fill whole blocks of {kind.block_size} ({kind.label})"
        )
    shape = (*array.shape[:-1], kind.row_nbytes(row))
    plain = NUMPY_TYPES.get(kind)
    if plain is not None and kind is not GGMLType.BF16:
        return _convert(array, plain).view(np.uint8).reshape(shape)
    values = np.ascontiguousarray(array, np.float32)
    if kind.is_quantized and not np.abs(values).max() <= _MAX_VALUE:
        raise GraphError(f"quantize: {kind.label} takes finite values up to ±{_MAX_VALUE:g}")
    result = np.empty(shape, np.uint8)
    weights = _imatrix(kind, row, imatrix)
    C.ggml_quantize_chunk(kind, ffi.from_buffer("float[]", values), ffi.from_buffer(result), 0, n_rows, row, weights)
    return result


def _convert(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.kind == "i" and (array.dtype.kind not in "iub" or not _fits(array, dtype)):
        raise GraphError(f"quantize: {dtype} takes integers from {np.iinfo(dtype).min} to {np.iinfo(dtype).max}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype)


def _fits(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    return np.iinfo(dtype).min <= int(array.min()) and int(array.max()) <= np.iinfo(dtype).max


def _imatrix(kind: GGMLType, row: int, imatrix: np.ndarray[Any, Any] | None) -> Any:
    if imatrix is None:
        if needs_imatrix(kind):
            raise GraphError(f"quantize: {kind.label} needs an importance matrix (imatrix)")
        return ffi.NULL
    weights = np.ascontiguousarray(imatrix, np.float32)
    if weights.shape != (row,) or not (weights.min() >= 0 and weights.max() <= _MAX_WEIGHT):
        raise GraphError(f"quantize: an imatrix of {row} finite numbers from 0 to {_MAX_WEIGHT:g} expected")
    return ffi.from_buffer("float[]", weights)


def dequantize(data: Any, type: GGMLType | int, shape: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Convert the bytes of a tensor to float32 of this shape (`to_float` of the type's traits).

    `data` is anything with the buffer protocol. Raises GraphError when its size is not that of such a tensor.
    """
    kind = _kind(type)
    if any(n < 0 for n in shape) or (shape and shape[-1] % kind.block_size):
        raise GraphError(f"dequantize: no {kind.label} tensor has the shape {list(shape)}")
    view = memoryview(data)
    nbytes = kind.nbytes(shape)
    if view.nbytes != nbytes or not view.c_contiguous:
        raise GraphError(f"dequantize: {kind.label} {list(shape)} has {nbytes} contiguous bytes, not {view.nbytes}")
    if not nbytes:
        return np.zeros(shape, np.float32)
    source = np.frombuffer(data, np.uint8)
    plain = NUMPY_TYPES.get(kind)
    if plain is not None and kind is not GGMLType.BF16:
        return source.view(plain).reshape(shape).astype(np.float32)
    to_float = C.ggml_get_type_traits(kind).to_float
    if to_float == ffi.NULL:
        raise GraphError(f"dequantize: {kind.label} is for ggml's own use")
    result = np.empty(shape, np.float32)
    to_float(ffi.from_buffer(source), ffi.from_buffer("float[]", result, require_writable=True), prod(shape))
    return result
