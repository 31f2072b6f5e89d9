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

from ggufpy.errors import TokenizerError

__all__ = ["CharacterMap"]

_KEY = "tokenizer.ggml.precompiled_charsmap"
_LABEL = 1 << 31 | 0xFF
_INDEX = (1 << 31) - 1
_WORD = re.compile("[^ ]+ ?| ")
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
        self._words: dict[str, bytes] = {}

    def normalize(self, text: str) -> bytes:
        """Return the text with all that the map knows replaced, and U+FFFD for surrogate escapes (bad bytes)."""
        words = _WORD.findall(text)
        for word in set(words) - self._words.keys():
            replaced, is_open = self._replaced(word.encode("utf-8", "surrogateescape"))
            if is_open and word[-1] == " ":  # a match may go on after the space: words do not stand for themselves
                return self._replaced(text.encode("utf-8", "surrogateescape"))[0]
            self._words[word] = replaced
        normalized = b"".join(map(self._words.__getitem__, words))
        if len(self._words) > _MAX_CACHED:
            self._words = {}
        return normalized

    def _replaced(self, data: bytes) -> tuple[bytes, bool]:
        """Return the replaced text, and whether a match could have gone on after its end."""
        at, parts, is_open = 0, [], False
        while at < len(data):
            length = self._kept_length(data, at)
            part, touches_end = data[at : at + length], at + length == len(data)
            if not length:
                length, part, touches_end = self._longest_match(data, at)
            if not length:
                found = _CHARACTER.match(data, at)
                part = found[0] if found else _REPLACEMENT
                length = len(part) if found else 1
            parts.append(part)
            at += length
            is_open = is_open or touches_end
        return b"".join(parts), is_open

    def _kept_length(self, data: bytes, at: int) -> int:
        length = 0
        while at + length < len(data) and data[at : at + length + 1] in self._kept:
            length += 1
        return length

    def _longest_match(self, data: bytes, at: int) -> tuple[int, bytes, bool]:
        """Return the length of the longest match, its replacement, and whether the end of the data ended the search."""
        length, part, end = 0, b"", at
        if not self._nodes:
            return length, part, False
        node = self._children(0)
        while end < len(data) and data[end]:
            node ^= data[end]
            if self._node(node) & _LABEL != data[end]:
                return length, part, False
            end += 1
            is_leaf = self._node(node) >> 8 & 1
            node ^= self._children(node)
            if is_leaf:
                length, part = end - at, self._replacement(self._node(node) & _INDEX)
        return length, part, end == len(data)

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
