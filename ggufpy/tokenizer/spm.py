"""SentencePiece byte-pair encoding (`tokenizer.ggml.model` = "llama").

Owns: text → token ids by merging characters into tokens, the best-scored first; bytes for what is no token. Does not
own: special tokens, the order of things in a text (`tokenizer.py`), the merging itself (`merging.py`).

In the tokens, U+2581 stands for a space. Two characters that stand next to each other in no token are never merged, so
a text may be cut there. Before a space is where that is mostly so; the few characters that some token has before a
space are looked up. The pieces are then words, which come again and again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import cached_property

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer import native
from ggufpy.tokenizer.merging import Merger
from ggufpy.tokenizer.utf8 import units
from ggufpy.tokenizer.vocab import Vocabulary
from ggufpy.tokenizer.words import Words

__all__ = ["SPACE", "SentencePieceBPE", "cutter", "with_spaces"]

SPACE = "\u2581"
_SPACE_BYTES = SPACE.encode()
_SHORT = 64  # characters; a shorter text is not worth cutting


class SentencePieceBPE:
    """Encode text with the tokens themselves as merges (llama.cpp's llm_tokenizer_spm)."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._id_of = vocab.id_of
        self._unknown = vocab.given_ids.get("unk")
        self._prefix = SPACE if vocab.add_space_prefix else ""
        self._tokens = vocab.texts
        self._ranks = [-score for score in vocab.scores] + [math.inf]
        self._merger = Merger(vocab.id_of, self._ranks)
        self._native: native.MergedWords | None = None
        self._words = Words(self._encode_word, self._encode_many)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text between special tokens, or between one and an end of the whole text."""
        text = self._prefix + text.replace(" ", SPACE)
        try:
            text.encode()
        except UnicodeEncodeError:  # bad bytes: what is a character then depends on all before it
            return self._words.encode([text])
        return self._words.encode(self._cut(text) if len(text) > _SHORT else [text])

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        return [char.encode("utf-8", "surrogateescape") for char in text.replace(SPACE, " ")]

    @cached_property
    def _cut(self) -> Callable[[str], list[str]]:
        return cutter(self._tokens)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        symbols = self._merger.merge(units(word.encode("utf-8", "surrogateescape")))
        try:
            return tuple([self._id_of[symbol] for symbol in symbols])
        except KeyError:
            return tuple(id for symbol in symbols for id in self._ids_of_symbol(symbol))

    def _encode_many(self, words: list[str]) -> list[tuple[int, ...]] | None:
        if not native.available():
            return None
        if self._native is None:
            byte_ids = list(map(self._id_of_byte, range(256)))
            self._native = native.MergedWords(self._tokens, byte_ids, ranks=self._ranks)
        return self._native.encode([word.encode("utf-8", "surrogateescape") for word in words])

    def _ids_of_symbol(self, symbol: bytes) -> list[int]:
        if (whole := self._id_of.get(symbol)) is not None:
            return [whole]
        return [self._id_of_byte(byte) for byte in symbol]

    def _id_of_byte(self, byte: int) -> int:
        for name in (b"<0x%02X>" % byte, bytes([byte])):
            if (id := self._id_of.get(name)) is not None:
                return id
        if self._unknown is None:
            raise TokenizerError(f"the vocabulary has no token for the byte 0x{byte:02X}, and none for the unknown")
        return self._unknown


def with_spaces(token: bytes) -> bytes:
    """Write a token with the spaces that it stands for."""
    return token.replace(_SPACE_BYTES, b" ")


def cutter(tokens: Iterable[bytes]) -> Callable[[str], list[str]]:
    """Make a function that cuts a text before spaces, but for those that some token has inside, after another char."""
    inner = "".join(token.decode("utf-8", "replace") for token in tokens if token.rfind(_SPACE_BYTES) > 0)
    before = re.escape("".join(sorted(set(re.findall(f"[^{SPACE}](?={SPACE})", inner)))))
    glued = f"(?:(?<=[{before}]){SPACE}+[^{SPACE}]*)*" if before else ""
    return re.compile(f"{SPACE}*[^{SPACE}]+{glued}|{SPACE}+").findall
