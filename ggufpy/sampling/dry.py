"""DRY: a penalty for tokens that would go on with a repetition, and the sequence breakers that no repetition crosses.

By p-e-w (text-generation-webui, pull request 5677); the meaning is llama.cpp's (llama_sampler_init_dry).
Does not own the window of tokens that is searched: the caller cuts it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from ggufpy.sampling.filters import Floats

__all__ = ["Breakers", "Vocabulary", "dry", "sequence_breakers"]

Breakers = Mapping[int, frozenset[tuple[int, ...]]]  # a token → what may follow it to make a breaker; () by itself

_MAX_BYTES = 40  # of a breaker, and
_MAX_TAIL = 20  # of the tokens that end it: llama.cpp's limits
_MAX_LOG = np.float32(88.7228391)  # of the largest float32


class Vocabulary(Protocol):
    """The part of a tokenizer that finding breakers needs."""

    @property
    def n_vocab(self) -> int: ...
    def token_to_piece(self, id: int, /) -> bytes: ...
    def encode(self, text: bytes, /, *, add_special: bool) -> Sequence[int]: ...


_found: WeakKeyDictionary[Vocabulary, dict[tuple[str, ...], Breakers]] = WeakKeyDictionary()


def sequence_breakers(vocabulary: Vocabulary, strings: Sequence[str]) -> Breakers:
    """Find the tokens that hold one of the strings, or its beginning with the tokens that end it.

    Reads the whole vocabulary once and remembers the result as long as the vocabulary lives.
    """
    known, key = _found.setdefault(vocabulary, {}), tuple(strings)
    if key not in known:
        known[key] = _search(vocabulary, [string.encode()[:_MAX_BYTES] for string in strings])
    return known[key]


def _search(vocabulary: Vocabulary, breakers: Sequence[bytes]) -> Breakers:
    if not breakers:
        return {}
    beginnings = [
        (whole, whole[:n], tuple(vocabulary.encode(whole[n:], add_special=False)[:_MAX_TAIL]))
        for whole in breakers
        for n in range(1, len(whole))
    ]
    holds_one = re.compile(b"|".join(map(re.escape, breakers))).search
    starts_one = tuple(start for _, start, _ in beginnings)
    found: dict[int, frozenset[tuple[int, ...]]] = {}
    for id in range(vocabulary.n_vocab):
        piece = vocabulary.token_to_piece(id)
        tails: set[tuple[int, ...]] = {()} if holds_one(piece) else set()
        if piece.endswith(starts_one):
            tails |= {tail for whole, start, tail in beginnings if piece.endswith(start) and whole not in piece}
        if tails:
            found[id] = frozenset(tails)
    return found


def dry(
    row: Floats, history: Sequence[int], multiplier: float, base: float, allowed_length: int, breakers: Breakers
) -> Floats:
    """Take multiplier · base^(length - allowed_length) off every token that would go on with a repetition.

    Its length is that of the longest ending of the history that stands further back as well, before that token, within
    the last breaker; shorter ones than `allowed_length` are free, and so are tokens that break by themselves.
    """
    if len(history) <= allowed_length or (limit := _limit(history, breakers)) < allowed_length:
        return row
    growth = np.float32(base)
    most = int(_MAX_LOG / np.log(growth)) if growth > np.float32(1.000001) else 0
    if most:  # beyond it the penalty does not grow
        limit = min(limit, allowed_length + most)
    lengths = _repetitions(np.array(history), allowed_length, limit)
    row = row.copy()
    for token, length in lengths.items():
        if token < row.size and () not in breakers.get(token, ()):
            power = math.pow(growth, min(length - allowed_length, most or length))
            row[token] -= np.float32(float(np.float32(multiplier)) * power)
    return row


def _limit(history: Sequence[int], breakers: Breakers) -> int:
    """Return how many tokens there are since the last breaker."""
    size = len(history)
    for place in range(size - 1, -1, -1):
        if tails := breakers.get(history[place]):
            after = tuple(history[place + 1 : place + 1 + _MAX_TAIL])
            if fits := [len(tail) for tail in tails if after[: len(tail)] == tail]:
                return size - 1 - place - max(fits)
    return size


def _repetitions(history: np.ndarray[tuple[int], np.dtype[np.int64]], least: int, most: int) -> dict[int, int]:
    """Return for tokens that stand after a copy of the history's ending how long the longest such ending is."""
    lengths: dict[int, int] = {}
    ends = np.arange(history.size - 1)  # the places where a copy of the last `length` tokens ends
    for length in range(most + 1):
        if length:
            ends = ends[ends >= length - 1]
            ends = ends[history[ends - length + 1] == history[-length]]
        if not ends.size:
            break
        if length >= least:
            lengths.update(dict.fromkeys(history[ends + 1].tolist(), length))
    return lengths
