"""Makes small GGUF files byte by byte, valid and broken, independently of `ggufpy.gguf`.

`CRAFTED` holds the files that public bug reports come down to. Where a reader should refuse one, `REFUSED` has a
part of the reason that it should give.
"""

from __future__ import annotations

import struct

__all__ = ["CRAFTED", "MAX_U64", "REFUSED", "align", "gguf", "pair", "string", "tensor"]

MAX_U64 = 2**64 - 1
U8, U32, I32, STR, ARR = 0, 4, 5, 8, 9
F32, Q4_0, I8 = 0, 2, 24


def string(text: str | bytes) -> bytes:
    """Give a length and the text's bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, code: int, value: bytes) -> bytes:
    """Give one metadata pair whose value is already bytes."""
    return string(key) + struct.pack("<i", code) + value


def tensor(name: str | bytes, dims: list[int], code: int = F32, offset: int = 0) -> bytes:
    """Give one entry of the tensor table, dimensions in the file's (ggml's) order."""
    return string(name) + struct.pack(f"<I{len(dims)}QiQ", len(dims), *dims, code, offset)


def align(raw: bytes, alignment: int = 32) -> bytes:
    """Fill up with zeros to a multiple of `alignment`."""
    return raw + bytes(-len(raw) % alignment)


def gguf(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Put a file together; tensor data starts at a multiple of `alignment`."""
    pairs, tensors = pairs or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return align(head, alignment) + data if tensors else head


def _counts(n_tensors: int, n_pairs: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs) + rest


def _huge_array(code: int) -> bytes:
    return _counts(0, 1, pair("a", ARR, struct.pack("<iQ", code, 2**40)))


def _alignment(code: int, value: bytes) -> bytes:
    return gguf([pair("general.alignment", code, value)])


def _x(dims: list[int], code: int = F32, offset: int = 0, data: bytes = bytes(64)) -> bytes:
    return gguf(tensors=[tensor("x", dims, code, offset)], data=data)


def _u32(n: int) -> bytes:
    return struct.pack("<I", n)


def _two(alignment: int, x: list[float], y: list[float], y_offset: int) -> bytes:
    data = struct.pack(f"<{len(x)}f", *x).ljust(y_offset, b"\0") + align(struct.pack(f"<{len(y)}f", *y), alignment)
    entries = [tensor("x", [len(x)]), tensor("y", [len(y)], offset=y_offset)]
    return gguf([pair("general.alignment", U32, _u32(alignment))], entries, data, alignment=alignment)


_ALIGN64 = _two(64, [1, 2, 3, 4], [5, 6, 7, 8], 64)
_BE_COUNTS = struct.pack(">IQQ", 3, 0, 0)

CRAFTED: dict[str, bytes] = {
    "empty_file": b"",
    "magic_only": b"GGUF",
    "html": b"<!DOCTYPE html>",
    "hdr_cut": gguf()[:20],
    "valid_min": gguf(),
    "v0": gguf(version=0),
    "v1": gguf(version=1),
    "v2": gguf(version=2),
    "v4": gguf(version=4),
    "be3": b"GGUF" + _BE_COUNTS,
    "nkv_-1": _counts(0, MAX_U64),
    "nkv_2p40": _counts(0, 2**40),
    "nt_2p60": _counts(2**60, 0),
    "key_len_max": _counts(0, 1, struct.pack("<Q", MAX_U64) + b"a"),
    "arr_huge_u8": _huge_array(U8),
    "arr_huge_str": _huge_array(STR),
    "align0": _alignment(U32, _u32(0)),
    "align_33": _alignment(U32, _u32(33)),
    "align_i32": _alignment(I32, _u32(32)),
    "align_str": _alignment(STR, string("32")),
    "align64_ok": _ALIGN64,
    "align64_nopad_tail": _ALIGN64[:-48],
    "align1_ok": _two(1, [1], [2], 4),
    "t_ok": _x([4]),
    "t_mul_ovf": _x([2**62, 4]),
    "t_ovf_42": _x([1152, 2**42 + 1]),
    "t_big_pad_wrap": _x([2**63 - 1], I8),
    "t_type_999": _x([4], 999),
    "t_type_neg": _x([4], -1),
    "t_type_4_removed": _x([4], 4),
    "t_type31": _x([4], 31),
    "t_q4_33": _x([33], Q4_0),
    "t_off_1": _x([4], offset=1),
    "t_off_32": _x([4], offset=32),
    "t_off_max": _x([4], offset=2**64 - 32),
    "t_short": _x([64], data=bytes(16)),
    "t_nodata": _x([4])[:57],
    "t_overlap": gguf(tensors=[tensor("x", [8]), tensor("y", [8])], data=bytes(64)),
    "t_reorder": gguf(tensors=[tensor("x", [8], offset=32), tensor("y", [8])], data=bytes(64)),
    "trail_junk": _x([4]) + b"junk" * 100,
}

REFUSED: dict[str, str] = {
    "empty_file": "the file is empty",
    "magic_only": "version: needs 4 bytes at offset 4, the file has 0 left",
    "html": r"not a GGUF file: expected it to start with b'GGUF', found b'<!DO'",
    "hdr_cut": "key count: needs 8 bytes at offset 16, the file has 4 left",
    "v0": "GGUF version 0, expected one of (2, 3)",
    "v1": "GGUF version 1, expected one of (2, 3)",
    "v4": "GGUF version 4, expected one of (2, 3)",
    "be3": "big-endian",
    "nkv_-1": f"key count: {MAX_U64} cannot fit in the 0 bytes left",
    "nkv_2p40": f"key count: {2**40} cannot fit in the 0 bytes left",
    "nt_2p60": f"tensor count: {2**60} cannot fit in the 8 bytes left",
    "key_len_max": "key count: 1 cannot fit in the 9 bytes left",
    "arr_huge_u8": f"a: {2**40} cannot fit in the 0 bytes left",
    "arr_huge_str": f"a: {2**40} cannot fit in the 0 bytes left",
    "align0": "general.alignment: expected a power of two (u32), found 0 (u32)",
    "align_33": "general.alignment: expected a power of two (u32), found 33 (u32)",
    "align_i32": "general.alignment: expected a power of two (u32), found 32 (i32)",
    "align_str": "general.alignment: expected a power of two (u32), found '32' (str)",
    "t_mul_ovf": f"x: shape [4, {2**62}] has more elements than fit in 63 bits",
    "t_ovf_42": f"x: needs {1152 * (2**42 + 1) * 4} bytes at offset 96, the file has 64 there",
    "t_big_pad_wrap": f"x: needs {2**63 - 1} bytes at offset 64, the file has 64 there",
    "t_q4_33": "x: a row of 33 elements does not fill whole blocks of 32 (q4_0)",
    "t_off_1": "x: expected at data offset 0, found at 1",
    "t_off_32": "x: expected at data offset 0, found at 32",
    "t_off_max": f"x: expected at data offset 0, found at {2**64 - 32}",
    "t_short": "x: needs 256 bytes at offset 64, the file has 16 there (80 in all)",
    "t_nodata": "x: needs 16 bytes at offset 64, the file has 0 there (57 in all)",
    "t_overlap": "y: expected at data offset 32, found at 0",
    "t_reorder": "x: expected at data offset 0, found at 32",
}
