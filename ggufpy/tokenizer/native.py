"""The tokenizers' inner loops in C (`_ffi/tokenizer.c`), for those that have a long text and the compiled part.

Owns: what C needs of a vocabulary, and calling it. Does not own: what is computed, which the Python twins of these
loops say (`merging.py`, `longest.py`, `lattice.py`, `charsmap.py`), or when it is worth it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from ggufpy.errors import TokenizerError

__all__ = ["BestPath", "LongestTokens", "MergedWords", "Replacing", "available"]


@cache
def _compiled() -> tuple[Any, Any] | None:
    try:
        from ggufpy._ffi.lib import C, ffi
    except ImportError:  # ggufpy without its compiled part
        return None
    return ffi, C


def available() -> bool:
    """Tell whether there is a compiled part to call."""
    return _compiled() is not None


def _parts() -> tuple[Any, Any]:
    found = _compiled()
    assert found is not None
    return found


def _check_size(n: int) -> None:
    if n >= 1 << 31:
        raise TokenizerError("the text is longer than 1 GiB: too long to be encoded at once")


class _Strings:
    """Strings of bytes, laid out for C."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        ffi, _ = _parts()
        self.ends = array("I", accumulate(map(len, strings)))
        self.c_bytes = ffi.from_buffer(b"".join(strings) or b"\0")
        self.c_ends = ffi.from_buffer("uint32_t[]", self.ends)
        self.size = self.ends[-1] if self.ends else 0


class _Names:
    """An index of strings: the first of equal ones counts."""

    def __init__(self, names: Sequence[bytes]) -> None:
        ffi, C = _parts()  # noqa: N806
        self._strings = _Strings(names)  # C reads them for as long as it has the index
        strings = self._strings
        self.pointer = ffi.gc(C.ggufpy_names_new(strings.c_bytes, strings.c_ends, len(names)), C.ggufpy_names_free)
        if not self.pointer:
            raise MemoryError


class _Output:
    """Room for ids and for where those of each word end."""

    def __init__(self, n_ids: int, n_ends: int = 0) -> None:
        ffi, _ = _parts()
        _check_size(n_ids)
        self.ids, self.ends = array("i", [0]) * n_ids, array("I", [0]) * n_ends
        self.c_ids, self.c_ends = ffi.from_buffer("int32_t[]", self.ids), ffi.from_buffer("uint32_t[]", self.ends)

    def first(self, n: int) -> list[int]:
        """Return the ids, `n` being what C returned."""
        if n < 0:
            raise MemoryError
        return self.ids[:n].tolist()

    def words(self, n: int) -> list[tuple[int, ...]]:
        """Return the ids of each word."""
        ids = tuple(self.first(n))
        return [ids[start:end] for start, end in pairwise([0, *self.ends])]


class MergedWords:
    """Merge the symbols of words: see `Merger`. `pairs` are `tokens` themselves when None; `ranks` then their ranks."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        byte_ids: Sequence[int],
        *,
        pairs: Sequence[bytes] | None = None,
        ranks: Sequence[float] | None = None,
        spelling: Sequence[bytes] | None = None,
        whole: bool = False,
    ) -> None:
        """Prepare. `byte_ids`: for what is no token, -1 for none. `spelling`: of each byte. `whole`: tokens stay so."""
        ffi, _ = _parts()
        self._tokens = _Names(tokens)
        self._pairs = self._tokens if pairs is None else _Names(pairs)
        self._arrays = [array("i", byte_ids), array("d", ranks or ())]
        self._spelling = b"".join(part.ljust(2, b"\0") for part in spelling or ())
        how = {"pairs": self._pairs.pointer, "tokens": self._tokens.pointer, "whole": whole}
        how["between"] = -1 if pairs is None else ord(" ")
        how["byte_ids"] = ffi.from_buffer("int32_t[]", self._arrays[0])
        how["ranks"] = ffi.from_buffer("double[]", self._arrays[1]) if ranks else ffi.NULL
        how["spelling"] = ffi.from_buffer(self._spelling) if spelling else ffi.NULL
        self._kept = how  # the structure refers to all of these
        self._how = ffi.new("struct ggufpy_merging *", how)

    def encode(self, words: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Return the ids of each word."""
        _, C = _parts()  # noqa: N806
        text = _Strings(words)
        out = _Output(2 * text.size, len(words))
        return out.words(C.ggufpy_merge(self._how, text.c_bytes, text.c_ends, len(words), out.c_ids, out.c_ends))


class LongestTokens:
    """Take the longest token at each place: see `longest.py`."""

    def __init__(self, tokens: Sequence[bytes], space: bytes = b"") -> None:
        """Prepare. `space`: what `encode_words` puts before each word."""
        self._tokens = _Names(tokens)
        self._space = space
        # Only where a part of it is a token can a word have more tokens than bytes.
        self._most = 1 + len(space) * any(space[: i + 1] in tokens for i in range(len(space)))

    def encode(self, text: bytes) -> list[int]:
        """Return the ids, -1 for a byte that begins no token."""
        _, C = _parts()  # noqa: N806
        out = _Output(len(text))
        return out.first(C.ggufpy_longest(self._tokens.pointer, text, len(text), out.c_ids))

    def encode_words(self, text: bytes, unknown: int, alone: bytes) -> list[int]:
        """Return the ids of words between spaces; `unknown` for a word that tokens do not make up.

        `alone` tells, for each character of ASCII, whether it is a word of its own.
        """
        _, C = _parts()  # noqa: N806
        out, tokens = _Output(self._most * len(text)), self._tokens.pointer
        return out.first(C.ggufpy_wordpiece(tokens, unknown, self._space, alone, text, len(text), out.c_ids))


class Replacing:
    """Replace what a character map knows: see `charsmap.py`. `kept`: all beginnings of what is not replaced."""

    def __init__(self, nodes: array[int], replacements: bytes, kept: Sequence[bytes]) -> None:
        ffi, _ = _parts()
        self._kept = _Names(kept)
        c_nodes, c_replacements = ffi.from_buffer("uint32_t[]", nodes), ffi.from_buffer(replacements)
        how = {"nodes": c_nodes, "n_nodes": len(nodes), "replacements": c_replacements, "kept": self._kept.pointer}
        how["n_replacements"] = replacements.rfind(b"\0") + 1
        self._referred = how  # the structure refers to all of these
        self._how = ffi.new("struct ggufpy_charsmap *", how)

    def replaced(self, text: bytes) -> bytes | None:
        """Return the text with all of it replaced, None for a broken map."""
        ffi, C = _parts()  # noqa: N806
        _check_size(len(text))
        size, room = len(text), -1
        while size > room:
            room = size
            out = ffi.new("char[]", room + 1)
            size = C.ggufpy_replace(self._how, text, len(text), out, room)
        return None if size < 0 else bytes(ffi.buffer(out, size))


class BestPath:
    """Find the path with the greatest sum of scores: see `lattice.py`."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        scores: Sequence[float],
        *,
        cost: float,
        unknown: int = -1,
        byte_ids: Sequence[int] | None = None,
    ) -> None:
        ffi, _ = _parts()
        self._tokens = _Names(tokens)
        self._arrays = [array("d", scores), array("i", byte_ids or ())]
        c_byte_ids = ffi.from_buffer("int32_t[]", self._arrays[1]) if byte_ids else ffi.NULL
        self._how = (self._tokens.pointer, ffi.from_buffer("double[]", self._arrays[0]), cost, unknown, c_byte_ids)

    def backwards(self, text: bytes) -> list[int]:
        """Return the ids of the path, the last first."""
        _, C = _parts()  # noqa: N806
        out = _Output(len(text))
        return out.first(C.ggufpy_best(*self._how, text, len(text), out.c_ids))
