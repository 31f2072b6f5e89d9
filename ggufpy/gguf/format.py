"""What the GGUF format says: magic, versions, limits, metadata value types, tensor types.

Facts only; reading is `reader`'s, writing is `writer`'s. The tensor types are those of the pinned ggml (`enum
ggml_type` and its type traits); `ggufpy.types` compares the table with the loaded ggml.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Any

from ggufpy.errors import GGUFError

__all__ = ["GGMLType", "fault", "is_alignment", "pad"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the two share a layout; version 1 had 32-bit lengths
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME = 63  # GGML_MAX_NAME less the terminating zero, in bytes
MAX_KEY = 65535  # in bytes; from the GGUF specification
MAX_DEPTH = 4  # of arrays in arrays; ggml itself takes none
INT64_MAX = 2**63 - 1

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"

# Metadata value types under ggml's short names (`gguf_type_name`), and the `struct` letters of those of fixed size.
VALUE_NAMES = {0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32",
               7: "bool", 8: "str", 9: "arr", 10: "u64", 11: "i64", 12: "f64"}  # fmt: skip
VALUE_CODES = {name: code for code, name in VALUE_NAMES.items()}
VALUE_FORMATS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f",
                 "bool": "?", "u64": "Q", "i64": "q", "f64": "d"}  # fmt: skip


def fault(path: Path, reason: str) -> GGUFError:
    """Make the error for a bad file; it carries `path` and `reason` next to the message that joins them."""
    error = GGUFError(f"{path}: {reason}")
    vars(error).update(path=path, reason=reason)
    return error


def pad(n: int, alignment: int) -> int:
    """Round `n` up to a multiple of `alignment`."""
    return -(-n // alignment) * alignment


def is_alignment(n: int) -> bool:
    """Say whether ggml takes `n` as an alignment: a power of two."""
    return n > 0 and n & (n - 1) == 0


class GGMLType(IntEnum):
    """Name the types a tensor can have, with ggml's codes.

    `block_size` is how many elements a block holds and `type_size` how many bytes it takes (1 and the element's size
    for plain numbers). `GGMLType("q4_K")` finds a type by name. Codes that ggml removed are absent.
    """

    block_size: int
    type_size: int

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 36
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18

    def __new__(cls, code: Any, block_size: int = 1, type_size: int = 0) -> GGMLType:
        self = int.__new__(cls, code)
        self._value_ = code
        self.block_size = block_size
        self.type_size = type_size
        return self

    @classmethod
    def _missing_(cls, value: object) -> GGMLType | None:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None

    @property
    def label(self) -> str:
        """Give ggml's own name of the type (`ggml_type_name`), such as `f32` or `q4_K`."""
        return self.name.lower().replace("_k", "_K")

    @property
    def is_quantized(self) -> bool:
        """Say whether elements are stored in blocks that share a scale."""
        return self.block_size > 1

    def row_nbytes(self, n: int) -> int:
        """Give the bytes of a row of `n` elements (`ggml_row_size`); GGUFError when they do not fill whole blocks."""
        if n < 0 or n % self.block_size:
            raise GGUFError(f"a row of {n} elements does not fill whole blocks of {self.block_size} ({self.label})")
        return n // self.block_size * self.type_size

    def nbytes(self, shape: Iterable[int]) -> int:
        """Give the bytes of a contiguous tensor of this shape, in NumPy order: rows run along the last axis."""
        *rows, row = tuple(shape) or (1,)
        return self.row_nbytes(row) * prod(rows)
