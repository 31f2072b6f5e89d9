"""Where in a text its tokens come from.

Owns: finding tokens again in the text they were made of. Does not own: what an encoder made of the characters before it
looked for tokens (its `seen`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Token", "places", "utf8_of_each"]

_SPACES = re.compile(rb" *")
_NEAR = 64  # bytes; how far beyond the last token a token may be that is not next to it
_REPLACEMENT = "\ufffd".encode()


@dataclass(frozen=True, slots=True)
class Token:
    """Describe a token of a text: its id, the bytes it stands for, and where it comes from, `text[start:end]`.

    A token that is a part of a character has the place of the whole character; one that was added, an empty place.
    """

    id: int
    piece: bytes
    start: int
    end: int


def utf8_of_each(text: str) -> list[bytes]:
    """Return the UTF-8 of each character, U+FFFD for surrogate escapes: what most encoders see."""
    return [char.encode() if not "\udc80" <= char <= "\udcff" else _REPLACEMENT for char in text]


def places(seen: Sequence[bytes | None], pieces: Iterable[bytes | None]) -> list[tuple[int, int]]:
    """Return the places, in characters, of pieces that were made of a text one after the other.

    `seen` is what the encoder saw of each character, None for one that it saw together with the one before. A piece
    that is None, as the unknown token is, or that is not found, stands for what is between its neighbours.
    """
    data = b"".join(filter(None, seen))
    found: list[tuple[int, int] | None] = []
    at = 0
    for piece in pieces:
        place = piece is not None and _find(data, piece, at, skips=bool(found) and found[-1] is None)
        found.append(place or None)
        at = place[1] if place else at
    owners = [i for i, part in enumerate(seen) for _ in part or ()]  # the character of each byte
    return [_in_characters(owners, seen, *place) for place in _with_gaps_filled(data, found)]


def _find(data: bytes, piece: bytes, at: int, *, skips: bool) -> tuple[int, int] | None:
    """Look for a piece, first where the last one ended. A space there, or in the piece, may not be in the other."""
    plain = piece[1:] if piece[:1] == b" " else piece
    after_spaces = _SPACES.match(data, at).end()  # type: ignore[union-attr]
    for start, wanted in ((at, piece), (at, plain), (max(at, after_spaces - 1), piece), (after_spaces, plain)):
        if data.startswith(wanted, start):
            return start, start + len(wanted)
    for wanted in (piece, plain):
        start = data.find(wanted, at, None if skips else at + _NEAR + len(wanted))
        if start >= 0:
            return start, start + len(wanted)
    return None


def _with_gaps_filled(data: bytes, found: list[tuple[int, int] | None]) -> Iterable[tuple[int, int]]:
    """Share what is between known places out to the unknown ones: a word each, or all of it to each."""
    i, end = 0, 0
    while i < len(found):
        known = found[i]
        if known is not None:
            yield known
            i, end = i + 1, known[1]
            continue
        following = next((k for k in range(i, len(found)) if found[k] is not None), len(found))
        after = found[following] if following < len(found) else None
        gap_end = after[0] if after else len(data)
        words = [(end + word.start(), end + word.end()) for word in re.finditer(rb"[^ ]+", data[end:gap_end])]
        yield from words if len(words) == following - i else [(end, gap_end)] * (following - i)
        i, end = following, gap_end


def _in_characters(owners: list[int], seen: Sequence[bytes | None], start: int, end: int) -> tuple[int, int]:
    first = owners[start] if start < len(owners) else len(seen)
    if end <= start:
        return first, first
    last = owners[end - 1] + 1
    while last < len(seen) and seen[last] is None:
        last += 1
    return first, last
