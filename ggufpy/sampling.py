"""Choosing the next token: the parameters, pure functions on one row of logits, and the chain of them.

Owns the meaning, the order and the limits of every sampling parameter. The order and the arithmetic are those of
llama.cpp's default chain (`common/sampling.cpp`, `src/llama-sampler.cpp`): penalties, top_k, top_p, min_p, temperature,
draw. Sums run in float32 and one after another where llama.cpp's do, and the random numbers are its too (MT19937, one
double from two words), so a seed picks the tokens that llama.cpp picks with it.
Knows nothing of models, text or sessions.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggufpy.errors import SamplingError

__all__ = [
    "Candidates",
    "Sampler",
    "SamplingParams",
    "TokenLogprob",
    "best_token",
    "candidates",
    "draw",
    "min_p",
    "probabilities",
    "repeat_penalty",
    "temperature",
    "token_logprob",
    "top_k",
    "top_p",
]

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_MAX_SEED = 2**32 - 1
_MAX_INT = 2**31 - 1
_MAX_FLOAT = float(np.finfo(np.float32).max)
_MIN_FLOAT = float(np.finfo(np.float32).tiny)
_NEG_INF = np.float32(-np.inf)


# ---------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Say how tokens are chosen and when to stop. The defaults are llama.cpp's.

    temperature      divides the logits; 0 or less takes the likeliest token, the lowest id among equals
    top_k            keep the k likeliest tokens; 0 or -1 keeps all
    top_p            keep the likeliest tokens whose probabilities first add up to this; 1 keeps all
    min_p            keep tokens at least this times as probable as the likeliest; 0 keeps all
    repeat_penalty   makes tokens seen lately less likely; 1 changes nothing
    repeat_last_n    how many of the last tokens, the prompt's too, count as lately; 0 none, -1 all
    seed             0 … 4294967295; None draws one. Either way the result reports the one used
    max_tokens       at most so many new tokens; None goes on to the end of the context
    stop             one string or several: the text ends before the first to be completed
    stop_token_ids   token ids that end the text, besides the model's end-of-generation tokens
    ignore_eos       never choose an end-of-generation token
    logprobs         None, or how many of the likeliest tokens to report beside each chosen one

    Raises SamplingError, which names the parameter, for a value of the wrong type or out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every value and store it as the plain Python type it stands for."""
        checked: dict[str, Any] = {
            "temperature": _real("temperature", self.temperature, -_MAX_FLOAT, _MAX_FLOAT),
            "top_k": _integer("top_k", self.top_k, -1, _MAX_INT),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "repeat_penalty": _real("repeat_penalty", self.repeat_penalty, _MIN_FLOAT, 1 / _MIN_FLOAT),
            "repeat_last_n": _integer("repeat_last_n", self.repeat_last_n, -1, _MAX_INT),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, _MAX_SEED),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 0, _MAX_INT),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _integers("stop_token_ids", self.stop_token_ids, 0, _MAX_INT),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, 0, _MAX_INT),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Say whether the likeliest token is always taken."""
        return bool(np.float32(self.temperature) <= 0)


def _real(name: str, value: object, low: float, high: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise SamplingError(f"{name}: expected a number, got {value!r:.60}")
    if not low <= value <= high:  # type: ignore[operator]  # as it is: an integer may be too large for a float
        raise SamplingError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r:.60}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise SamplingError(f"{name}: expected an integer, got {value!r:.60}")
    if not low <= number <= high:
        raise SamplingError(f"{name}: expected an integer from {low} to {high}, got {number!r:.60}")
    return number


def _integers(name: str, value: object, low: int, high: int) -> tuple[int, ...]:
    items = _items(name, value, "integers")
    return tuple(_integer(f"{name}[{i}]", item, low, high) for i, item in enumerate(items))


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = []
    for item in (value,) if isinstance(value, str) else _items(name, value, "strings"):
        if not isinstance(item, str) or not item:
            raise SamplingError(f"{name}: expected strings of at least one character, got {item!r:.60}")
        strings.append(item)
    return tuple(strings)


def _items(name: str, value: object, of_what: str) -> Iterator[object]:
    try:
        if not isinstance(value, (str, bytes)):
            return iter(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        pass
    raise SamplingError(f"{name}: expected a sequence of {of_what}, got {value!r:.60}")


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SamplingError(f"{name}: expected True or False, got {value!r:.60}")
    return bool(value)


# ------------------------------------------------------------------------------------------- one row of logits


@dataclass(frozen=True, slots=True)
class Candidates:
    """Hold the tokens still to choose from: `ids[i]` has `logits[i]`. `ordered`: the likeliest comes first."""

    ids: Ids
    logits: Floats
    ordered: bool = False

    def take(self, index: Any, *, ordered: bool) -> Candidates:
        """Return the candidates that a NumPy index selects."""
        return Candidates(self.ids[index], self.logits[index], ordered)


def candidates(row: Floats) -> Candidates:
    """Return every token of a row of logits, shape [n_vocab], as a candidate."""
    return Candidates(_all_ids(row.size), row)


@lru_cache(maxsize=4)
def _all_ids(n: int) -> Ids:
    ids = np.arange(n)
    ids.flags.writeable = False
    return ids


def best_token(row: Floats) -> int:
    """Return the token with the largest logit, the lowest id among equals.

    Raises SamplingError when a logit is NaN (naming the first) or every one is -inf.
    """
    best = int(row.argmax())  # NumPy's argmax is the first NaN's index where there is one
    value = row[best]
    if np.isnan(value):
        raise SamplingError(f"logits[{best}] is NaN: the model's computation went wrong")
    if value == _NEG_INF:
        raise SamplingError("no candidate left: every logit is -inf")
    return best


def repeat_penalty(row: Floats, history: Iterable[int], penalty: float) -> Floats:
    """Return a copy of the row in which every token of the history is less likely (llama_sampler_init_penalties)."""
    seen = [token for token in set(history) if token < row.size]
    row, factor = row.copy(), np.float32(penalty)
    logits = row[seen]
    with np.errstate(over="ignore"):
        row[seen] = np.where(logits <= 0, logits * factor, logits / factor)
    return row


def top_k(c: Candidates, k: int) -> Candidates:
    """Keep the k largest logits, largest first and lowest id first among equals; k below 1 keeps all."""
    if k < 1:
        return c
    return c.take(slice(k) if c.ordered else _largest(c.logits, k), ordered=True)


def top_p(c: Candidates, p: float) -> Candidates:
    """Keep the likeliest candidates until their probabilities reach p, at least one; p of 1 or more keeps all."""
    if (enough := np.float32(p)) >= 1:
        return c
    shares = probabilities(c)
    n, size = (c.ids.size, c.ids.size) if c.ordered else (256, c.ids.size)
    while True:
        order = np.arange(size) if c.ordered else _largest(c.logits, n)
        # The running sum is float32 and sequential, as llama.cpp's: at a boundary its last bit decides.
        kept = int(np.cumsum(shares[order]).searchsorted(enough)) + 1
        if kept <= order.size or n >= size:
            return c.take(order[:kept], ordered=True)
        n *= 8


def min_p(c: Candidates, p: float) -> Candidates:
    """Keep candidates at least p times as probable as the likeliest, and always that one; p of 0 or less keeps all."""
    if (share := np.float32(p)) <= 0:
        return c
    best = 0 if c.ordered else int(c.logits.argmax())
    keep = c.logits >= c.logits[best] + np.log(share)
    keep[best] = True
    return c.take(keep, ordered=c.ordered)


def temperature(c: Candidates, t: float) -> Candidates:
    """Divide the logits by the temperature, which is above 0."""
    divisor = np.float32(t)
    with np.errstate(over="ignore", invalid="ignore"):
        logits = c.logits / divisor
        if not np.isfinite(logits.max()):  # so cold that the quotient overflows: only differences matter
            logits = (c.logits - c.logits.max()) / divisor
    return Candidates(c.ids, logits, c.ordered)


def probabilities(c: Candidates) -> Floats:
    """Return the softmax of the candidates' logits, float32, in their order."""
    weights = _weights(c)
    shares: Floats = weights / np.cumsum(weights)[-1]  # the sequential float32 sum of llama_sampler_softmax_impl
    return shares


def draw(c: Candidates, u: float) -> int:
    """Return the token that the uniform number u in (0, 1) falls on (llama_sampler_dist_apply)."""
    running = np.cumsum(_weights(c).astype(np.float64))
    return int(c.ids[min(int(running.searchsorted(running[-1] * u)), c.ids.size - 1)])


def _weights(c: Candidates) -> Floats:
    """Return exp(logit - largest) of each candidate, rounded once to float32 as a good C library's expf does."""
    peak = c.logits[0] if c.ordered else c.logits.max()
    weights: Floats = np.exp(c.logits - peak, dtype=np.float64).astype(np.float32)
    return weights


def _largest(logits: Floats, k: int) -> Ids:
    """Return the places of the k largest logits, largest first, lowest place first among equals, -inf left out."""
    floor = _floor(logits, k) if k < logits.size else _NEG_INF
    places = np.flatnonzero(logits >= floor if floor > _NEG_INF else logits > floor)
    return places[np.argsort(-logits[places], kind="stable")[:k]]


def _floor(logits: Floats, k: int) -> np.float32:
    """Return a value that at least k logits reach and, in a long row, hardly more: one pass and a small partition."""
    columns = max(1024, 8 * k)
    body = logits.size // columns * columns
    if body >= 4 * columns:  # the k-th largest of the columns' largest is such a value
        logits = np.concatenate((logits[:body].reshape(-1, columns).max(axis=0), logits[body:]))
    floor: np.float32 = np.partition(logits, -k)[-k]
    return floor


# ------------------------------------------------------------------------------------------ log-probabilities


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Hold a chosen token's natural log-probability, and (id, log-probability) of the likeliest, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(row: Floats, token_id: int, n_top: int = 0) -> TokenLogprob:
    """Return a token's log-probability under the softmax of the whole row, before any penalty, cut or temperature."""
    peak = row.max()
    with np.errstate(invalid="ignore"):  # beside a logit of +inf there is no other probability: NaN says so
        total = float(peak) + math.log(np.exp(row - peak).sum(dtype=np.float64))
    top = [] if n_top < 1 else _largest(row, n_top).tolist()
    return TokenLogprob(token_id, float(row[token_id]) - total, tuple((i, float(row[i]) - total) for i in top))


# ------------------------------------------------------------------------------------------------ the chain


class Sampler:
    """Choose the tokens of one sequence, one row of logits after another. Not for two sequences or threads."""

    __slots__ = ("_banned", "_greedy", "_n_vocab", "_params", "_random", "seed")

    def __init__(self, params: SamplingParams, n_vocab: int, *, banned: Iterable[int] = ()) -> None:
        """Start the sequence's random numbers. `n_vocab` is the tokenizer's; `banned` tokens are never chosen."""
        self.seed: int = secrets.randbits(32) if params.seed is None else params.seed
        self._params = params
        self._greedy = params.greedy
        self._n_vocab = n_vocab
        self._banned = sorted(banned)
        # RandomState is frozen by NumPy: its stream will never change, and is std::mt19937's.
        self._random = None if self._greedy else np.random.RandomState(self.seed)

    def sample(self, row: Floats, history: Sequence[int] = ()) -> int:
        """Return the next token's id.

        `row`: logits, float32 [n_vocab or more]; ids past the vocabulary (padding) are never chosen. `history`: the
        tokens so far, read only when a repeat penalty is on. Raises SamplingError for NaN or when nothing is left.
        """
        if row.ndim != 1 or row.size < self._n_vocab:
            raise SamplingError(f"logits: expected shape [{self._n_vocab}], got {list(row.shape)}")
        row = row[: self._n_vocab]
        best = best_token(row)
        edited = self._edit(row, history)
        if edited is not row:
            row, best = edited, best_token(edited)
        if self._random is None or row[best] == np.inf:
            return best
        p = self._params
        c = min_p(top_p(top_k(candidates(row), p.top_k), p.top_p), p.min_p)
        return draw(temperature(c, p.temperature), self._uniform(self._random))

    def _edit(self, row: Floats, history: Sequence[int]) -> Floats:
        """Return the row itself, or a changed copy. Whatever masks or rewrites logits belongs here."""
        p = self._params
        if self._banned:
            row = row.copy()
            row[self._banned] = _NEG_INF
        if p.repeat_penalty != 1 and p.repeat_last_n:
            row = repeat_penalty(row, history if p.repeat_last_n < 0 else history[-p.repeat_last_n :], p.repeat_penalty)
        return row

    @staticmethod
    def _uniform(random: np.random.RandomState) -> float:
        """Return a double in (0, 1) as libstdc++ makes it: two 32-bit words, the low one first."""
        word = int.from_bytes(random.bytes(8), "little")
        return min(max(word, 1) / 2**64, 1 - 2**-53)
