"""Metadata arrays, read in place: `GGUFArray` and its three kinds. Finding and checking them is for `reader`."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from ggufpy.errors import GGUFError

__all__ = ["GGUFArray", "Nested", "Numbers", "Strings", "text"]

_U64 = struct.Struct("<Q")


def text(raw: bytes) -> str:
    """Decode a string value; bytes that are not UTF-8 become surrogate escapes, so nothing is lost."""
    return raw.decode("utf-8", "surrogateescape")


class GGUFArray(Sequence[Any]):
    """Read a metadata array in place; it keeps the file mapped for as long as it lives.

    `type` is the items' type name (`"u8"` … `"f64"`, `"bool"`, `"str"`, `"arr"`). `tolist()` is the quick way to all
    items; the first string asked for by number builds an index. A slice is a list.
    """

    __slots__ = ("_n", "type")

    def __init__(self, type: str, n: int) -> None:
        self.type = type
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._item(k) for k in range(self._n)[i]]
        return self._item(range(self._n)[i])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (GGUFArray, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<GGUFArray of {self._n} {self.type}>"

    def _item(self, i: int) -> Any:
        raise NotImplementedError

    def tolist(self) -> list[Any]:
        """Give all items as a list of Python values."""
        return [self._item(i) for i in range(self._n)]

    @property
    def view(self) -> memoryview:
        """Give numbers as a typed read-only memoryview, which NumPy takes without a copy; GGUFError for other items."""
        raise GGUFError(f"expected an array of numbers, found one of {self.type}")

    def raw(self, i: int) -> bytes:
        """Give string `i` as the bytes in the file; GGUFError when the items are not strings."""
        raise GGUFError(f"expected an array of str, found one of {self.type}")

    def rawlist(self) -> list[bytes]:
        """Give all strings as the bytes in the file; GGUFError when the items are not strings."""
        raise GGUFError(f"expected an array of str, found one of {self.type}")


class Numbers(GGUFArray):
    """Hold numbers or bools as a typed view of the mapping."""

    __slots__ = ("_view",)

    def __init__(self, type: str, view: memoryview) -> None:
        super().__init__(type, len(view))
        self._view = view

    @property
    def view(self) -> memoryview:
        return self._view

    def _item(self, i: int) -> Any:
        return self._view[i]

    def tolist(self) -> list[Any]:
        return self._view.tolist()


class Strings(GGUFArray):
    """Hold the place of strings that are checked to lie in the mapping and are built when asked for."""

    __slots__ = ("_end", "_mapping", "_offsets", "_start")

    def __init__(self, mapping: mmap.mmap, start: int, end: int, n: int) -> None:
        super().__init__("str", n)
        self._mapping = mapping
        self._start = start
        self._end = end
        self._offsets: array[int] | None = None

    def _item(self, i: int) -> str:
        return text(self._at(i))

    def _at(self, i: int) -> bytes:
        if self._offsets is None:
            self._offsets = self._index()
        return self._mapping[self._offsets[i] + 8 : self._offsets[i + 1]]

    def _index(self) -> array[int]:
        offsets, pos, unpack = array("Q"), self._start, _U64.unpack_from
        for _ in range(self._n):
            offsets.append(pos)
            pos += 8 + unpack(self._mapping, pos)[0]
        offsets.append(pos)
        return offsets

    def tolist(self) -> list[str]:
        return [raw.decode("utf-8", "surrogateescape") for raw in self.rawlist()]

    def raw(self, i: int) -> bytes:
        return self._at(range(self._n)[i])

    def rawlist(self) -> list[bytes]:
        data, pos, unpack = self._mapping[self._start : self._end], 0, _U64.unpack_from
        strings = []
        for _ in range(self._n):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            strings.append(data[start:pos])
        return strings


class Nested(GGUFArray):
    """Hold arrays in an array."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[GGUFArray]) -> None:
        super().__init__("arr", len(items))
        self._items = items

    def _item(self, i: int) -> GGUFArray:
        return self._items[i]
