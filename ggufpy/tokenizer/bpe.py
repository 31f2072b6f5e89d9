"""Byte-level byte-pair encoding (`tokenizer.ggml.model` = "gpt2").

Owns: words → token ids by merging, and the bytes that a token stands for. Does not own: special tokens, the order of
things in a text (`tokenizer.py`), or how text is cut into words (`pretokenizers.py`).

Tokens and merges are kept as the bytes in the file. In them, each byte of the text is written as one printable
character (GPT-2's table): space is U+0120, newline U+010A.
"""

from __future__ import annotations

from itertools import chain

from ggufpy.tokenizer.merging import Merger
from ggufpy.tokenizer.pretokenizers import PreTokenizer, splitter
from ggufpy.tokenizer.utf8 import decode_lenient, relaxed
from ggufpy.tokenizer.vocab import Vocabulary
from ggufpy.tokenizer.words import Words

__all__ = ["ByteLevelBPE", "unspelled"]

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHAR_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE_OF = {char: byte for byte, char in _CHAR_OF.items()}
_SYMBOL_OF = [_CHAR_OF[byte].encode() for byte in range(256)]


class ByteLevelBPE:
    """Encode text with merges ranked by their place in the file (llama.cpp's llm_tokenizer_bpe)."""

    def __init__(self, vocab: Vocabulary, pre: PreTokenizer) -> None:
        self._id_of = vocab.id_of
        self._split = splitter(pre.stages)
        self._ignore_merges = pre.ignore_merges
        self._merger = Merger(_ranked(vocab.merges), range(len(vocab.merges) + 1), between=b" ")
        self._words = Words(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return self._words.encode(self._split(relaxed(text)))

    def _encode_word(self, word: str) -> tuple[int, ...]:
        symbols = [_SYMBOL_OF[byte] for byte in word.encode("utf-8", "surrogatepass")]
        if self._ignore_merges and (whole := self._id_of.get(b"".join(symbols))) is not None:
            return (whole,)
        merged = self._merger.merge(symbols)
        try:
            return tuple([self._id_of[symbol] for symbol in merged])
        except KeyError:
            return tuple(chain.from_iterable(map(self._ids_of_symbol, merged)))

    def _ids_of_symbol(self, symbol: bytes) -> list[int]:
        """Give a symbol's id, or those of its bytes when it is no token (bytes that are no token vanish)."""
        if (whole := self._id_of.get(symbol)) is not None:
            return [whole]
        single = (self._id_of.get(bytes([byte])) for byte in symbol)
        return [found for found in single if found is not None]


def _ranked(merges: list[bytes]) -> dict[bytes, int]:
    """Number the merges; of equal ones the first counts."""
    ranks = dict(zip(merges, range(len(merges)), strict=True))
    if len(ranks) < len(merges):
        ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
    return ranks


def unspelled(token: bytes) -> bytes:
    """Return the bytes that a normal token spells."""
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
