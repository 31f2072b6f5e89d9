"""Token bytes → text, at once or token by token.

Owns: incomplete characters, and llama.cpp's clean-up of spaces. Does not own: what bytes a token stands for.
Both ways give the same text, whatever the bytes: ones that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

__all__ = ["DecodeStream", "clean_spaces"]

# The end of a text that the next characters may still change: spaces, and what may turn out to be a contraction.
_UNSETTLED = re.compile(r" [ ']*[rv]?\Z")
_SPACE_BEFORE_MARK = re.compile(r" (?=[?!.,])")
_SPACE_BEFORE_CONTRACTION = re.compile(r" (?='(?:s|m|re|ve))")


def clean_spaces(text: str) -> str:
    """Drop spaces before ?!., and contractions and around a lone apostrophe, as llama_detokenize does."""
    text = _SPACE_BEFORE_MARK.sub("", text)
    return _SPACE_BEFORE_CONTRACTION.sub("", text.replace(" ' ", "'"))


class DecodeStream:
    """Turn token ids into text as they come: `push` gives the text that is certain, `flush` what was held back."""

    def __init__(self, piece: Callable[[int], bytes], *, clean: bool, strip_space: bool) -> None:
        self._piece = piece
        self._clean = clean
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._first = True

    def push(self, id: int) -> str:
        """Return the text that this token completes: "" while a character, or a space to be dropped, is open."""
        piece = self._piece(id)
        if self._first:
            self._first = False
            if self._strip_space:
                piece = piece.removeprefix(b" ")
        text = self._decoder.decode(piece)
        return self._settled(self._held + text) if self._clean else text

    def flush(self) -> str:
        """Return the rest of the text; the stream can then be used for another one."""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._held, self._first = "", True
        return clean_spaces(rest) if self._clean else rest

    def _settled(self, text: str) -> str:
        unsettled = _UNSETTLED.search(text)
        end = unsettled.start() if unsettled else len(text)
        self._held = text[end:]
        return clean_spaces(text[:end])
