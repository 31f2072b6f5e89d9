"""Candidates → candidates: what leaves tokens out, or changes how far apart their logits are.

A token is left out by taking it from the candidates or by a logit of -inf, whichever llama.cpp does: how many there are
counts in an entropy's bound. Does not own what is done to single tokens before (rows.py), nor the draw (draws.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ggufpy.sampling.native import (
    Floats,
    Ids,
    at_least,
    deviation,
    divided,
    few,
    floor,
    k_largest,
    logarithms,
    power,
    reach,
    softmax,
    total,
)

__all__ = [
    "NEG_INF",
    "Candidates",
    "Floats",
    "Ids",
    "candidates",
    "dynamic_temperature",
    "in_order",
    "largest",
    "min_p",
    "peak",
    "probabilities",
    "temperature",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "xtc",
]

NEG_INF = np.float32(-np.inf)
_FIRST = 256  # so many of the likeliest nearly always reach a share


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


# ------------------------------------------------------------------------------------------------- leaving out


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Make logits more than n standard deviations below the largest impossible; n of 0 or less keeps all.

    From "Top-nσ: Not All Logits Are You Need" (arXiv:2411.07641); the mean is that of the logits above -inf.
    """
    if (width := np.float32(n)) <= 0 or c.ids.size < 2:
        return c
    with np.errstate(over="ignore"):
        floor = c.logits.max() - width * deviation(c.logits)
    return Candidates(c.ids, np.where(c.logits < floor, NEG_INF, c.logits), c.ordered)


def top_k(c: Candidates, k: int) -> Candidates:
    """Keep the k largest logits, largest first and lowest id first among equals; k below 1 keeps all."""
    if k < 1:
        return c
    return c.take(slice(k) if c.ordered else largest(c.logits, k), ordered=True)


def typical_p(c: Candidates, p: float) -> Candidates:
    """Keep the candidates whose surprise is nearest to the mean until they reach more than p; p of 1 keeps all.

    From "Locally Typical Sampling" (arXiv:2202.00666). The nearest comes first, the likelier among equals.
    """
    if np.float32(p) >= 1:
        return c
    c = in_order(c)
    shares = probabilities(c)
    nearness = -np.abs(-logarithms(shares) - _entropy(shares))
    return c.take(_until(shares, nearness, p, exceed=True), ordered=False)


def top_p(c: Candidates, p: float) -> Candidates:
    """Keep the likeliest candidates until their probabilities reach p, at least one; p of 1 or more keeps all."""
    if np.float32(p) >= 1:
        return c
    shares = probabilities(c)
    return c.take(slice(reach(shares, p)) if c.ordered else _until(shares, c.logits, p), ordered=True)


def min_p(c: Candidates, p: float) -> Candidates:
    """Keep candidates at least p times as probable as the likeliest, and always that one; p of 0 or less keeps all."""
    if np.float32(p) <= 0:
        return c
    if c.ordered:
        return c.take(slice(at_least(c.logits, peak(c), p)), ordered=True)
    best = c.logits.argmax()
    keep = c.logits >= floor(c.logits.item(best), p)
    keep[best] = True
    return c.take(keep, ordered=False)


def xtc(c: Candidates, threshold: float) -> Candidates:
    """Leave out the likeliest candidates down to the last one at least as probable as the threshold, which stays.

    "Exclude top choices", by p-e-w (text-generation-webui, pull request 6335). The chance is the caller's.
    """
    c = in_order(c)
    top_choices = np.count_nonzero(probabilities(c) >= np.float32(threshold))
    return c.take(slice(max(0, top_choices - 1), None), ordered=True)


# -------------------------------------------------------------------------------------------------- temperature


def temperature(c: Candidates, t: float) -> Candidates:
    """Divide the logits by the temperature; at 0 or less only the likeliest stays possible."""
    divisor = np.float32(t)
    if divisor <= 0:
        logits = np.full_like(c.logits, NEG_INF)
        best = c.logits.argmax()
        logits[best] = c.logits[best]
        return Candidates(c.ids, logits, c.ordered)
    return Candidates(c.ids, divided(c.logits, peak(c), divisor), c.ordered)


def dynamic_temperature(c: Candidates, t: float, spread: float, exponent: float) -> Candidates:
    """Divide the logits by a temperature from t - spread (0 at least) to t + spread: the less certain the hotter.

    It rises with the entropy's share of the largest possible one, to the power of `exponent` (arXiv:2309.02772).
    """
    if c.ids.size < 2:
        return c
    c = in_order(c)
    middle, half = np.float32(t), np.float32(spread)
    with np.errstate(over="ignore"):
        cold, hot = max(np.float32(0), middle - half), middle + half
        bound = -logarithms(np.ones(1, np.float32) / np.float32(c.ids.size))[0]
        return temperature(c, cold + (hot - cold) * power(_entropy(probabilities(c)) / bound, exponent))


# -------------------------------------------------------------------------------- probabilities, sums and orders


def probabilities(c: Candidates) -> Floats:
    """Return the softmax of the candidates' logits, float32, in their order."""
    return softmax(c.logits, peak(c))


def peak(c: Candidates) -> float:
    """Return the largest logit."""
    return c.logits.item(0) if c.ordered else c.logits.max().item()


def _entropy(shares: Floats) -> np.float32:
    """Return the mean surprise in nats, summed one after another; what is impossible does not count."""
    shares = shares[shares > 0]
    return total(-shares * logarithms(shares))


def in_order(c: Candidates) -> Candidates:
    """Return the candidates likeliest first, lowest place first among equals."""
    return c if c.ordered else c.take(largest(c.logits, c.ids.size), ordered=True)


def _until(shares: Floats, keys: Floats, enough: float, *, exceed: bool = False) -> Ids:
    """Return the places of the largest keys whose shares reach or exceed enough; else all places."""
    n = _FIRST
    while True:
        order = largest(keys, n)
        kept = reach(shares[order], enough, exceed=exceed)
        if kept <= order.size or n >= keys.size:
            return order[:kept]
        n *= 8


def largest(values: Floats, k: int) -> Ids:
    """Return the places of the k largest values, largest first, lowest place first among equals."""
    k = min(k, values.size)
    if k <= few():
        return k_largest(values, k)
    if k == values.size:
        return _descending(values)
    places = np.flatnonzero(values >= np.partition(values, -k)[-k])
    return places[_descending(values[places])[:k]]


def _descending(values: Floats) -> Ids:
    """Return the places of the values, largest first, lowest place first among equals."""
    # A stable sort of floats is slow; value and place packed into one integer need none.
    bits = (values + np.float32(0)).view(np.int32)  # adding makes -0 a plain 0
    bits ^= ~(bits >> 31) & np.int32(0x7FFFFFFF)  # read as unsigned it now grows as the value falls
    keys = bits.view(np.uint32).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(values.size, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(0xFFFFFFFF)
    places: Ids = keys.astype(np.intp)
    return places
