"""WordPiece (`tokenizer.ggml.model` = "bert"): normalized words, each taken apart into the longest tokens.

Owns: normalization, cutting into words, and the search for tokens. Does not own: special tokens, the order of things
in a text (`tokenizer.py`).

In GGUF files the first token of a word begins with U+2581, and the others have lost the `##` they had.
"""

from __future__ import annotations

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer.spm import SPACE
from ggufpy.tokenizer.unicode_classes import base, category, is_space, lower
from ggufpy.tokenizer.utf8 import relaxed
from ggufpy.tokenizer.vocab import Vocabulary
from ggufpy.tokenizer.words import Words

__all__ = ["WordPiece"]

# Chinese characters, which are words of their own. The gap after 0x2B81F is Hugging Face's, and so llama.cpp's.
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class WordPiece:
    """Encode text by the longest tokens from the left of each word (llama.cpp's llm_tokenizer_wpm)."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._id_of = vocab.id_of
        self._longest = max(map(len, vocab.texts))
        self._unknown = vocab.given_ids.get("unk")
        self._normalized = _Normalized(lowercase=vocab.lowercase, strip_accents=vocab.strip_accents)
        self._words = Words(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens. A word that tokens do not make up is one unknown token."""
        return self._words.encode(relaxed(text).translate(self._normalized).split())

    def _encode_word(self, word: str) -> tuple[int, ...]:
        data = (SPACE + word).encode("utf-8", "surrogatepass")
        ids, start = [], 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (id := self._id_of.get(data[start:end])) is not None:
                    break
            else:
                return (self._unknown_id(),)
            ids.append(id)
            start = end
        return tuple(ids)

    def _unknown_id(self) -> int:
        if self._unknown is None:
            raise TokenizerError("the text has a word that tokens do not make up, and there is none for the unknown")
        return self._unknown


class _Normalized(dict[int, str]):
    """A `str.translate` table that finds out what becomes of a character when it is first met."""

    def __init__(self, *, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self._lowercase = lowercase
        self._strip_accents = strip_accents

    def __missing__(self, code: int) -> str:
        self[code] = found = self._normalize(chr(code))
        return found

    def _normalize(self, char: str) -> str:
        if self._strip_accents:
            char = base(char)
        if is_space(char):
            return " "
        kind = category(char)
        if kind == "C" or char in "\0\ufffd" or (self._strip_accents and kind == "M"):
            return ""
        alone = kind == "P" or (kind == "S" and char < "\x7f") or _is_chinese(char)
        char = lower(char) if self._lowercase else char
        return f" {char} " if alone else char


def _is_chinese(char: str) -> bool:
    return any(first <= ord(char) <= last for first, last in _CHINESE)
