"""Byte-pair encoding with a list of merges (`tokenizer.ggml.model` = "gpt2" and its kin).

Owns: words → token ids by merges that are ranked by their place in the file, and how bytes are spelled in the tokens.
Does not own: special tokens, the order of things in a text (`tokenizer.py`), how text is cut into words
(`pretokenizers.py`), the merging itself (`merging.py`).

Most vocabularies are byte-level: each byte of the text is written as one printable character (GPT-2's table), a space
as U+0120, a newline as U+010A. Some are raw: characters stand for themselves, and what is no token is written in bytes
named `<0x00>` to `<0xFF>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from itertools import chain

from ggufpy.tokenizer import native
from ggufpy.tokenizer.merging import Merger
from ggufpy.tokenizer.offsets import utf8_of_each
from ggufpy.tokenizer.pretokenizers import PreTokenizer, splitter
from ggufpy.tokenizer.spm import SPACE, cutter
from ggufpy.tokenizer.unicode_classes import is_space, lower
from ggufpy.tokenizer.utf8 import decode_lenient, relaxed, units
from ggufpy.tokenizer.vocab import Vocabulary
from ggufpy.tokenizer.words import Words

__all__ = ["ByteLevelBPE", "HybridDNA", "RawBPE", "WhitespaceBPE", "byte_pair_encoder", "unspelled"]

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHAR_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE_OF = {char: byte for byte, char in _CHAR_OF.items()}
_SYMBOL_OF = [_CHAR_OF[byte].encode() for byte in range(256)]

_SHORT = 64  # characters; a shorter text is not worth cutting
_DNA = re.compile("<dna>(.*?)(</dna>|$)", re.DOTALL)
_UPPER = re.compile("[a-z]+")
_DNA_PIECE = 6  # bases in one token
_DNA_MARK = "\ue000".encode()  # tells such a token from a word of the same letters


class ByteLevelBPE:
    """Encode text whose words are spelled byte by byte (llama.cpp's llm_tokenizer_bpe)."""

    _spelling: list[bytes] | None = _SYMBOL_OF

    def __init__(self, vocab: Vocabulary, pre: PreTokenizer) -> None:
        self._id_of = vocab.id_of
        self._split = splitter(pre.stages)
        self._ignore_merges = pre.ignore_merges
        self._merges = vocab.merges
        self._merger = Merger(_ranked(self._merges), range(len(self._merges) + 1), between=b" ")
        self._native: native.MergedWords | None = None
        self._words = Words(self._encode_word, self._encode_many)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return self.encode_relaxed(relaxed(text))

    def encode_relaxed(self, text: str) -> list[int]:
        """Do the same with a text whose bad bytes have been read already."""
        return self._words.encode(self._split(text))

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        return utf8_of_each(text)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        symbols = self._symbols(word)
        if self._is_whole(word) and (whole := self._id_of.get(b"".join(symbols))) is not None:
            return (whole,)
        merged = self._merger.merge(symbols)
        try:
            return tuple([self._id_of[symbol] for symbol in merged])
        except KeyError:
            return tuple(chain.from_iterable(map(self._ids_of_symbol, merged)))

    def _encode_many(self, words: list[str]) -> list[tuple[int, ...]] | None:
        if not native.available():
            return None
        if self._native is None:
            byte_ids = [self._id_of.get(self._name_of_byte(byte), -1) for byte in range(256)]
            self._native = native.MergedWords(
                list(self._id_of), byte_ids, pairs=self._merges, spelling=self._spelling, whole=self._ignore_merges
            )
        return self._native.encode([word.encode("utf-8", "surrogatepass") for word in words])

    def _symbols(self, word: str) -> list[bytes]:
        return [_SYMBOL_OF[byte] for byte in word.encode("utf-8", "surrogatepass")]

    def _is_whole(self, word: str) -> bool:
        """Tell whether the word, if it is a token, is not merged."""
        return self._ignore_merges

    def _ids_of_symbol(self, symbol: bytes) -> list[int]:
        """Give a symbol's id, or those of its bytes when it is no token (bytes that are no token vanish)."""
        if (whole := self._id_of.get(symbol)) is not None:
            return [whole]
        single = (self._id_of.get(self._name_of_byte(byte)) for byte in symbol)
        return [found for found in single if found is not None]

    def _name_of_byte(self, byte: int) -> bytes:
        return bytes([byte])


class RawBPE(ByteLevelBPE):
    """Encode text whose words are spelled with their own characters; most write spaces as U+2581."""

    _spelling = None

    def __init__(self, vocab: Vocabulary, pre: PreTokenizer) -> None:
        super().__init__(vocab, pre)
        self._escapes = pre.escapes_spaces
        self._newlines_are_whole = pre.newlines_are_whole

    def encode_relaxed(self, text: str) -> list[int]:
        """Do the same with a text whose bad bytes have been read already."""
        if not self._escapes:
            return super().encode_relaxed(text)
        lines = self._split(text.replace(" ", SPACE))
        return self._words.encode(chain.from_iterable(map(self._cut, lines)) if len(text) > _SHORT else lines)

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        return utf8_of_each(text.replace(SPACE, " ") if self._escapes else text)

    @cached_property
    def _cut(self) -> Callable[[str], list[str]]:
        return cutter(merge.replace(b" ", b"", 1) for merge in self._merges)

    def _symbols(self, word: str) -> list[bytes]:
        return units(word.encode("utf-8", "surrogatepass"))

    def _is_whole(self, word: str) -> bool:
        return self._ignore_merges or (self._newlines_are_whole and not word.strip("\n"))

    def _encode_many(self, words: list[str]) -> list[tuple[int, ...]] | None:
        found = super()._encode_many(words)
        if found and self._newlines_are_whole:
            for i, word in enumerate(words):
                if not word.strip("\n") and (whole := self._id_of.get(word.encode())) is not None:
                    found[i] = (whole,)
        return found

    def _name_of_byte(self, byte: int) -> bytes:
        return b"<0x%02X>" % byte


class HybridDNA:
    """Encode text in which `<dna>` … `</dna>` encloses bases, which are taken six at a time."""

    def __init__(self, vocab: Vocabulary, text: ByteLevelBPE) -> None:
        self._id_of = vocab.id_of
        self._text = text
        self._names = [vocab.id_of.get(name) for name in (b"<dna>", b"</dna>", b"<oov>")]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        begin, end, unknown = self._names
        if begin is None or end is None or unknown is None:
            return self._text.encode(text)
        ids, done = [], 0
        for found in _DNA.finditer(text):
            ids += self._text.encode(text[done : found.start()])
            ids += [begin, *self._bases(found[1].encode("utf-8", "surrogateescape"), unknown)]
            ids += [end] if found[2] else []
            done = found.end()
        return ids + self._text.encode(text[done:])

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        upper = _DNA.sub(lambda found: f"<dna>{_UPPER.sub(lambda base: base[0].upper(), found[1])}{found[2]}", text)
        return self._text.seen(upper)

    def _bases(self, sequence: bytes, unknown: int) -> list[int]:
        sequence = sequence.upper()
        pieces = [sequence[i : i + _DNA_PIECE].ljust(_DNA_PIECE, b"A") for i in range(0, len(sequence), _DNA_PIECE)]
        return [self._id_of.get(piece + _DNA_MARK, unknown) for piece in pieces]


class WhitespaceBPE:
    """Encode text without its spaces, and in lower case if the vocabulary says so."""

    def __init__(self, words: ByteLevelBPE, *, lowercase: bool) -> None:
        self._words = words
        self._lowercase = lowercase

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        chars = map(lower, relaxed(text)) if self._lowercase else relaxed(text)
        words = "".join([" " if is_space(char) else char for char in chars]).split(" ")
        return list(chain.from_iterable(map(self._words.encode_relaxed, filter(None, words))))

    def seen(self, text: str) -> list[bytes]:
        """Return what becomes of each character."""
        lowered = list(map(lower, text)) if self._lowercase else list(text)
        return utf8_of_each("".join([" " if is_space(char) else char for char in lowered]))


def byte_pair_encoder(vocab: Vocabulary, pre: PreTokenizer) -> ByteLevelBPE | HybridDNA | WhitespaceBPE:
    """Make the encoder for a vocabulary with merges."""
    words = RawBPE(vocab, pre) if pre.raw else ByteLevelBPE(vocab, pre)
    if vocab.model == "hybriddna":
        return HybridDNA(vocab, words)
    if vocab.model == "whitespace":
        return WhitespaceBPE(words, lowercase=vocab.lowercase)
    return words


def unspelled(token: bytes) -> bytes:
    """Return the bytes that a normal token of a byte-level vocabulary spells."""
    text = decode_lenient(token)
    try:
        return bytes(map(_BYTE_OF.__getitem__, text))
    except KeyError:
        return b"".join(_byte_or_note(char, token) for char in text)


def _byte_or_note(char: str, token: bytes) -> bytes:
    """Give the byte that `char` stands for, or llama.cpp's note that it stands for none."""
    if char in _BYTE_OF:
        return bytes([_BYTE_OF[char]])
    return b"[UNK_BYTE_0x" + char.encode("utf-8", "surrogatepass").hex().encode() + token + b"]"


def _ranked(merges: list[bytes]) -> dict[bytes, int]:
    """Number the merges; of equal ones the first counts."""
    ranks = dict(zip(merges, range(len(merges)), strict=True))
    if len(ranks) < len(merges):
        ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
    return ranks
