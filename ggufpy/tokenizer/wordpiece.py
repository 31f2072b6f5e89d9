"""WordPiece (`tokenizer.ggml.model` = "bert"): normalized words, each taken apart into the longest tokens.

Owns: normalization, cutting into words, and the search for tokens. Does not own: special tokens, the order of things
in a text (`tokenizer.py`).

In GGUF files the first token of a word begins with U+2581, and the others have lost the `##` they had.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer import native
from ggufpy.tokenizer.longest import Longest
from ggufpy.tokenizer.spm import SPACE
from ggufpy.tokenizer.unicode_classes import base, category, is_space, lower
from ggufpy.tokenizer.utf8 import relaxed
from ggufpy.tokenizer.vocab import Vocabulary

__all__ = ["WordPiece"]

# Chinese characters, which are words of their own. The gap after 0x2B81F is Hugging Face's, and so llama.cpp's.
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


_PUNCTUATION = "!-/:-@\\[-`{-~"  # of ASCII, symbols too
_ALONE = bytes(bool(re.match(f"[{_PUNCTUATION}]", chr(code))) for code in range(128))
_WORD = re.compile(f"[^ {_PUNCTUATION}]+|[{_PUNCTUATION}]")
_ASCII_OR_NOT = re.compile(r"[\0-\x7f]+|[^\0-\x7f]+")
_SPACE = SPACE.encode()


class WordPiece:
    """Encode text by the longest tokens from the left of each word (llama.cpp's llm_tokenizer_wpm)."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._normalized = _Normalized(lowercase=vocab.lowercase, strip_accents=vocab.strip_accents)
        self._unknown = vocab.given_ids.get("unk", -1)
        self._search = (native.LongestTokens if native.available() else _Words)(vocab.texts, _SPACE)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens. A word that tokens do not make up is one unknown token."""
        # Alone, ASCII is translated at many times the speed.
        text = "".join([part.translate(self._normalized) for part in _ASCII_OR_NOT.findall(relaxed(text))])
        ids = self._search.encode_words(text.encode("utf-8", "surrogatepass"), self._unknown, _ALONE)
        if -1 in ids:
            raise TokenizerError("the text has a word that tokens do not make up, and there is none for the unknown")
        return ids

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        table = self._normalized
        return [(table[ord(char)] or "").encode("utf-8", "surrogatepass") for char in text]


class _Words(Longest):
    """Encode words without the compiled part: what native.LongestTokens does."""

    def __init__(self, tokens: Sequence[bytes], space: bytes) -> None:
        super().__init__(tokens)
        self._space = space

    def encode_words(self, text: bytes, unknown: int, alone: bytes) -> list[int]:
        """Return the ids, `unknown` for a word that tokens do not make up."""
        ids: list[int] = []
        for word in _WORD.findall(text.decode("utf-8", "surrogatepass")):
            found = self.encode(self._space + word.encode("utf-8", "surrogatepass"))
            ids += [unknown] if -1 in found else found
        return ids


class _Normalized(dict[int, str | None]):
    """A `str.translate` table that finds out what becomes of a character when it is first met.

    Characters beyond ASCII that are words of their own get spaces around them.
    """

    def __init__(self, *, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self._lowercase = lowercase
        self._strip_accents = strip_accents

    def __missing__(self, code: int) -> str | None:
        self[code] = found = self._normalize(chr(code))
        return found

    def _normalize(self, char: str) -> str | None:
        if self._strip_accents:
            char = base(char)
        if is_space(char):
            return " "
        if _is_chinese(char):
            return f" {char} "
        kind = category(char)
        if kind == "C" or char in "\0\ufffd" or (self._strip_accents and kind == "M"):
            return None
        char = lower(char) if self._lowercase else char
        return f" {char} " if kind == "P" and char > "\x7f" else char


def _is_chinese(char: str) -> bool:
    return any(first <= ord(char) <= last for first, last in _CHINESE)
