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
from functools import reduce
from operator import or_

from ggufpy.errors import TokenizerError

__all__ = ["CharacterMap"]

_KEY = "tokenizer.ggml.precompiled_charsmap"
_LABEL = 1 << 31 | 0xFF
_INDEX = (1 << 31) - 1
_ASCII_OR_NOT = re.compile(r"[\0-\x7f]+|[^\0-\x7f]+")
_CHARACTER = re.compile(rb"[\0-\x7f]|[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3}")
_REPLACEMENT = "\ufffd".encode()
_MAX_CACHED = 1 << 16


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
        self._single: dict[int, str] = {}  # what becomes of a character that no match goes beyond
        self._runs: dict[str, bytes] = {}  # and of characters that one may go over
        self._leads: dict[bytes, int] = {}  # the bytes with which a match may go on after some bytes, as bits

    def normalize(self, text: str) -> bytes:
        """Return the text with all that the map knows replaced, and U+FFFD for surrogate escapes (bad bytes)."""
        return b"".join(self._run(part) if is_run else self._translated(part) for is_run, part in self._parts(text))

    def normalized_characters(self, text: str) -> list[bytes | None]:
        """Return the same for each character: what replaces several for the first of them, None for the others."""
        found: list[bytes | None] = []
        for is_run, part in self._parts(text):
            found += [self._run(part), *[None] * (len(part) - 1)] if is_run else map(self._translated, part)
        return found

    def _parts(self, text: str) -> Iterator[tuple[bool, str]]:
        """Cut the text into runs of characters that a match may go over, and others that become something each."""
        chars = set(text)
        for code in [code for code in map(ord, chars) if code not in self._single]:
            replaced = self._replaced(chr(code).encode("utf-8", "surrogateescape"))
            self._single[code] = replaced.decode("utf-8", "surrogateescape")
        followers = re.escape("".join(sorted(self._followers(chars))))
        parts = re.split(f"([^{followers}]?[{followers}]+)", text) if followers else [text]
        for i, part in enumerate(parts):
            yield bool(i % 2), part

    def _translated(self, text: str) -> bytes:
        parts = [part.translate(self._single) for part in _ASCII_OR_NOT.findall(text)]  # ASCII is much quicker alone
        return "".join(parts).encode("utf-8", "surrogateescape")

    def _run(self, text: str) -> bytes:
        if text not in self._runs:
            if len(self._runs) > _MAX_CACHED:
                self._runs.clear()
            self._runs[text] = self._replaced(text.encode("utf-8", "surrogateescape"))
        return self._runs[text]

    def _followers(self, chars: set[str]) -> set[str]:
        """Return those of the characters over which a match may go that begins before them."""
        encoded = {char: char.encode("utf-8", "surrogateescape") for char in chars}
        followers, beginnings = set(), list(encoded.values())
        while beginnings:
            begun = [(one, leads) for one in beginnings if (leads := self._leads_after(one))]
            leads = reduce(or_, (leads for _, leads in begun), 0)
            beginnings = []
            for char, data in encoded.items():
                if leads >> data[0] & 1:
                    longer = [
                        one + data for one, leads in begun if leads >> data[0] & 1 and self._goes_over(one + data)
                    ]
                    followers |= {char} if longer else set()
                    beginnings += longer
        return followers

    def _leads_after(self, data: bytes) -> int:
        if data not in self._leads:
            node = self._node_after(data)
            trie = [] if node is None else [byte for byte in range(1, 256) if self._node(node ^ byte) & _LABEL == byte]
            kept = [byte for byte in range(256) if data + bytes([byte]) in self._kept] if data in self._kept else []
            self._leads[data] = sum(1 << byte for byte in {*trie, *kept})
        return self._leads[data]

    def _goes_over(self, data: bytes) -> bool:
        return data in self._kept or self._node_after(data) is not None

    def _replaced(self, data: bytes) -> bytes:
        """Replace from left to right, whatever there is."""
        at, parts = 0, []
        while at < len(data):
            length = self._kept_length(data, at)
            part = data[at : at + length]
            if not length:
                length, part = self._longest_match(data, at)
            if not length:
                found = _CHARACTER.match(data, at)
                part = found[0] if found else _REPLACEMENT
                length = len(part) if found else 1
            parts.append(part)
            at += length
        return b"".join(parts)

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

    def _node_after(self, data: bytes) -> int | None:
        """Return where the children of the node are that some bytes lead to, None when none begins with them."""
        steps = [node for _, node in self._walk(data, 0)]
        return steps[-1] if len(steps) == len(data) else None

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
