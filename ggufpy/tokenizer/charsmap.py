"""SentencePiece's precompiled character map: what a vocabulary's training text had in place of some characters.

Owns: reading the map (`tokenizer.ggml.precompiled_charsmap`) and replacing the longest matches in a text.

The map is the length of a double-array trie in bytes, the trie, and the replacements, each ended by a zero byte. A
node of the trie is 32 bits: 0-7 are the byte that leads to it, 8 tells whether a replacement is stored, 9-30 are the
offset to its children; in the node of a replacement, 0-30 tell where it begins.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterator

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer import native

__all__ = ["CharacterMap"]

_KEY = "tokenizer.ggml.precompiled_charsmap"
_LABEL = 1 << 31 | 0xFF
_INDEX = (1 << 31) - 1
_CHARACTER = re.compile(rb"[\0-\x7f]|[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3}")
_REPLACEMENT = "\ufffd".encode()


class CharacterMap:
    """Replace characters and sequences of them, the longest first; nothing in what begins like one of `kept`."""

    def __init__(self, data: bytes, kept: list[bytes]) -> None:
        """Read the map, b"" for none. Raises TokenizerError when it is cut short; `normalize` when it is broken."""
        size = int.from_bytes(data[:4], "little")
        if data and size + 4 >= len(data):
            raise TokenizerError(f"{_KEY}: expected more than {size + 4} bytes, found {len(data)}")
        self._nodes = array("I", data[4 : 4 + size // 4 * 4])
        if sys.byteorder == "big":
            self._nodes.byteswap()
        self._replacements = data[4 + size :]
        self._kept = {name[:end] for name in kept for end in range(1, len(name) + 1)}
        self._native: native.Replacing | None = None
        if native.available():
            self._native = native.Replacing(self._nodes, self._replacements, list(self._kept))

    def normalize(self, text: str) -> bytes:
        """Return the text with all that the map knows replaced, and U+FFFD for surrogate escapes (bad bytes)."""
        data = text.encode("utf-8", "surrogateescape")
        found = self._native.replaced(data) if self._native else None
        return b"".join(part for _, part in self._replaced(data)) if found is None else found

    def normalized_characters(self, text: str) -> list[bytes | None]:
        """Return the same for each character: what replaces several for the first of them, None for the others."""
        encoded = [char.encode("utf-8", "surrogateescape") for char in text]
        parts = dict(self._replaced(b"".join(encoded)))
        found: list[bytes | None] = []
        at = 0
        for char in encoded:
            inside = [parts[i] for i in range(at, at + len(char)) if i in parts]
            found.append(b"".join(inside) if inside else None)
            at += len(char)
        return found

    def _replaced(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield, from left to right, where each match begins, or what is none, and what becomes of it."""
        at = 0
        while at < len(data):
            length = self._kept_length(data, at)
            part = data[at : at + length]
            if not length:
                length, part = self._longest_match(data, at)
            if not length:
                found = _CHARACTER.match(data, at)
                part = found[0] if found else _REPLACEMENT
                length = len(part) if found else 1
            yield at, part
            at += length

    def _kept_length(self, data: bytes, at: int) -> int:
        length = 0
        while at + length < len(data) and data[at : at + length + 1] in self._kept:
            length += 1
        return length

    def _longest_match(self, data: bytes, at: int) -> tuple[int, bytes]:
        """Return the length of the longest match and its replacement."""
        length, index, end = 0, 0, at
        for is_leaf, node in self._walk(data, at):
            end += 1
            if is_leaf:
                length, index = end - at, self._node(node) & _INDEX
        return length, self._replacement(index) if length else b""

    def _walk(self, data: bytes, at: int) -> Iterator[tuple[int, int]]:
        """Yield, for each byte as far as the trie goes, whether a match ends there and where its children are."""
        if not self._nodes:
            return
        node = self._children(0)
        while at < len(data) and data[at]:
            node ^= data[at]
            found = self._node(node)
            if found & _LABEL != data[at]:
                return
            at += 1
            node ^= self._children(node)
            yield found >> 8 & 1, node

    def _node(self, i: int) -> int:
        if i >= len(self._nodes):
            raise TokenizerError(f"{_KEY}: a node refers to node {i}, and there are {len(self._nodes)}")
        return self._nodes[i]

    def _children(self, i: int) -> int:
        node = self._node(i)
        return node >> 10 << (8 if node & 1 << 9 else 0)

    def _replacement(self, start: int) -> bytes:
        end = self._replacements.find(b"\0", start)
        if end < 0 or start >= len(self._replacements):
            raise TokenizerError(f"{_KEY}: a node refers to a replacement at {start}, and there is none")
        return self._replacements[start:end]
