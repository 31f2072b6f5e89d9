"""Copies a GGUF file with another header: keys and tensors changed, dropped or added, the data streamed or left out.

Owns no judgement: what it writes may contradict itself, as the files of public bug reports do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggufpy import GGUFFile, GGUFWriter

__all__ = ["DROP", "Entry", "rewrite"]

DROP: Any = object()
"""As a key's value: leave the key out."""


@dataclass(slots=True)
class Entry:
    """One tensor to write: its shape (NumPy order), the number of its type, and its bytes."""

    shape: tuple[int, ...]
    type: int
    data: Any


def rewrite(
    source: Path,
    target: Path,
    keys: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, Entry]], object] | None = None,
    *,
    alignment: int = 32,
    hollow: bool = False,
) -> Path:
    """Write `target` as a changed copy of `source` and return its path.

    `keys` are added or replaced (a pair gives value and type); `edit` changes the dictionary of tensors in place.
    `hollow` leaves the data out but not its room: a sparse file, for headers that are judged without the data.
    """
    with GGUFFile(source) as file:
        entries = {name: Entry(info.shape, int(info.type), file.data(name)) for name, info in file.tensors.items()}
        if edit is not None:
            edit(entries)
        head = _write_metadata(file, target, keys or {}, alignment)
        with target.open("r+b") as out:
            out.seek(8)
            out.write(struct.pack("<Q", len(entries)))
            out.seek(head)
            offset = 0
            for name, entry in entries.items():
                raw, dims = name.encode(), entry.shape[::-1]
                out.write(struct.pack("<Q", len(raw)) + raw)
                out.write(struct.pack(f"<I{len(dims)}QiQ", len(dims), *dims, entry.type, offset))
                offset += _pad(memoryview(entry.data).nbytes, alignment)
            start = _pad(out.tell(), alignment)
            out.truncate(start + offset)
            for entry in () if hollow else entries.values():
                out.seek(_pad(out.tell() - start, alignment) + start if out.tell() > start else start)
                out.write(entry.data)
    return target


def _write_metadata(file: GGUFFile, target: Path, keys: Mapping[str, Any], alignment: int) -> int:
    """Write a file without tensors and return where its header ends."""
    writer = GGUFWriter(target, alignment=None if alignment == 32 else alignment)
    for key, value in {**file.metadata, **keys}.items():
        if value is DROP or key == "general.alignment":
            continue
        if isinstance(value, tuple):
            writer.add(key, *value)
        else:
            writer.add(key, value, None if key in keys else file.metadata_types[key])
    writer.write()
    with GGUFFile(target) as written:
        return written.shards[0].data_offset


def _pad(n: int, alignment: int) -> int:
    return n + -n % alignment
