"""Byte-level byte-pair encoding (`tokenizer.ggml.model` = "gpt2").

Owns: words → token ids by merging, and the bytes that a token stands for. Does not own: special tokens, the order of
things in a text (`tokenizer.py`), or how text is cut into words (`pretokenizers.py`).

Tokens and merges are kept as the bytes in the file. In them, each byte of the text is written as one printable
character (GPT-2's table): space is U+0120, newline U+010A.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import chain, pairwise
from weakref import WeakMethod

from ggufpy.tokenizer.pretokenizers import PreTokenizer, splitter
from ggufpy.tokenizer.utf8 import decode_lenient
from ggufpy.tokenizer.vocab import Vocabulary

__all__ = ["ByteLevelBPE"]

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHAR_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE_OF = {char: byte for byte, char in _CHAR_OF.items()}
_SYMBOL_OF = [_CHAR_OF[byte].encode() for byte in range(256)]

_NEVER = 1 << 62  # the rank of a pair that is not merged
_LONG = 64  # symbols; beyond, looking for the smallest rank again after each merge costs more than keeping order
_MAX_CACHED_WORDS = 1 << 16


class _Words(dict[str, tuple[int, ...]]):
    """Remember the ids of the words met, for as long as they are few and short."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._encode = WeakMethod(encode)  # weak: who encodes holds this

    def __missing__(self, word: str) -> tuple[int, ...]:
        encode = self._encode()
        assert encode is not None
        ids = encode(word)
        if len(word) <= _LONG:
            if len(self) >= _MAX_CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


class ByteLevelBPE:
    """Encode text with merges ranked by their place in the file (llama.cpp's llm_tokenizer_bpe)."""

    def __init__(self, vocab: Vocabulary, pre: PreTokenizer) -> None:
        self._id_of = vocab.id_of
        self._split = splitter(pre.stages)
        self._ignore_merges = pre.ignore_merges
        self._merges = vocab.merges
        self._ranks = _ranked(self._merges)
        self._words = _Words(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return list(chain.from_iterable(map(self._words.__getitem__, self._split(text))))

    def piece(self, token: bytes) -> bytes:
        """Return the bytes that a normal token stands for."""
        text = decode_lenient(token)
        try:
            return bytes(map(_BYTE_OF.__getitem__, text))
        except KeyError:
            return b"".join(_byte_or_note(char, token) for char in text)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        symbols = [_SYMBOL_OF[byte] for byte in word.encode("utf-8", "surrogatepass")]
        if self._ignore_merges and (whole := self._id_of.get(b"".join(symbols))) is not None:
            return (whole,)
        merged = self._merge(symbols) if len(symbols) <= _LONG else self._merge_long(symbols)
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

    def _merge(self, symbols: list[bytes]) -> list[bytes]:
        """Merge the pair of the lowest rank, the leftmost of equals, until none is left. Changes `symbols`."""
        rank_of = self._ranks.get
        ranks = [rank_of(left + b" " + right, _NEVER) for left, right in pairwise(symbols)]
        while ranks:
            best = min(ranks)
            if best == _NEVER:
                break
            i = ranks.index(best)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            del ranks[i]
            if i < len(ranks):
                ranks[i] = rank_of(symbols[i] + b" " + symbols[i + 1], _NEVER)
            if i:
                ranks[i - 1] = rank_of(symbols[i - 1] + b" " + symbols[i], _NEVER)
        return symbols

    def _merge_long(self, symbols: list[bytes]) -> list[bytes]:
        """Do the same in time that grows linearly with the symbols: all places of one rank are merged in one go."""
        n = len(symbols)
        after, before = list(range(1, n + 1)), list(range(-1, n - 1))
        places: dict[int, list[int]] = {}  # rank → where the left symbol of such a pair is, or was
        queue: list[int] = []

        def note(left: int) -> None:
            if left >= 0 and after[left] < n:
                rank = self._ranks.get(symbols[left] + b" " + symbols[after[left]])
                if rank is not None:
                    if rank not in places:
                        places[rank] = []
                        heappush(queue, rank)
                    places[rank].append(left)

        for i in range(n - 1):
            note(i)
        while queue:
            rank = heappop(queue)
            pair = self._merges[rank]
            lefts = sorted(places.pop(rank))
            for at, left in enumerate(lefts):
                right = after[left]
                if right >= n or symbols[left] + b" " + symbols[right] != pair:
                    continue  # merged into something else meanwhile
                symbols[left] += symbols[right]
                symbols[right] = b""
                after[left] = after[right]
                if after[left] < n:
                    before[after[left]] = left
                note(before[left])
                note(left)
                if queue and queue[0] < rank:  # the new symbol goes first: come back to the other places later
                    places.setdefault(rank, []).extend(lefts[at + 1 :])
                    heappush(queue, rank)
                    break
        return [symbol for symbol in symbols if symbol]


def _ranked(merges: list[bytes]) -> dict[bytes, int]:
    """Number the merges; of equal ones the first counts."""
    ranks = dict(zip(merges, range(len(merges)), strict=True))
    if len(ranks) < len(merges):
        ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
    return ranks


def _byte_or_note(char: str, token: bytes) -> bytes:
    """Give the byte that `char` stands for, or llama.cpp's note that it stands for none."""
    if char in _BYTE_OF:
        return bytes([_BYTE_OF[char]])
    return b"[UNK_BYTE_0x" + char.encode("utf-8", "surrogatepass").hex().encode() + token + b"]"
