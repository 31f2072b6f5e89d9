"""The inner loops of sampling in C (`_ffi/sampling.c`): the largest values, exponentials, logarithms, sums.

Owns the arrays that C reads and writes. Does not own what the numbers mean (filters.py, draws.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Floats",
    "Ids",
    "at_least",
    "binary_logarithms",
    "deviation",
    "divided",
    "draw_likeliest",
    "drawn",
    "few",
    "floor",
    "k_largest",
    "logarithms",
    "power",
    "reach",
    "softmax",
    "total",
]

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]


@cache
def _compiled() -> tuple[Any, Any]:
    from ggufpy._ffi.lib import C, ffi  # only here: parameters are made and checked without it

    return C, ffi


def _c_floats(values: Floats) -> Any:
    values = np.ascontiguousarray(values, np.float32)
    return _compiled()[1].from_buffer("float[]", values if values.flags.aligned else values.copy())


def few() -> int:
    """Return how many of the largest values, at most, a heap finds; more are found by sorting."""
    return int(_compiled()[0].GGUFPY_FEW)


def draw_likeliest(row: Floats, k: int, top_p: float, min_p: float, temperature: float, u: float) -> int:
    """Return the token that u, from 0 to 1, falls on after top_k, top_p, min_p and temperature, in one call of C.

    It is made of what the functions here call. While the model computed, its weights went through the caches: each call
    of NumPy is then a few microseconds. The row's largest logit is finite, k is at most all and `few`. `top_p` of 1,
    `min_p` of 0 and `temperature` of 1 change nothing.
    """
    return int(_compiled()[0].ggufpy_draw_likeliest(_c_floats(row), row.size, k, top_p, min_p, temperature, u))


def k_largest(values: Floats, k: int) -> Ids:
    """Return the places of the k largest values, k at most all, largest first and lowest place first among equals."""
    C, ffi = _compiled()  # noqa: N806
    places = np.empty(k, np.int64)
    C.ggufpy_largest(_c_floats(values), values.size, k, ffi.from_buffer("int64_t[]", places))
    return places


def softmax(logits: Floats, peak: float) -> Floats:
    """Return exp(logit - peak) of each, by the C library's expf, divided by their `total`."""
    result = np.empty(logits.size, np.float32)
    _compiled()[0].ggufpy_softmax(_c_floats(logits), logits.size, peak, _c_floats(result))
    return result


def logarithms(values: Floats) -> Floats:
    """Return natural logarithms by the C library's logf, -inf of 0."""
    result = np.empty(values.size, np.float32)
    _compiled()[0].ggufpy_logarithms(_c_floats(values), values.size, _c_floats(result))
    return result


def binary_logarithms(values: Floats) -> Floats:
    """Return binary logarithms by the C library's log2f, -inf of 0."""
    result = np.empty(values.size, np.float32)
    _compiled()[0].ggufpy_binary_logarithms(_c_floats(values), values.size, _c_floats(result))
    return result


def power(base: float, exponent: float) -> np.float32:
    """Return a power by the C library's powf."""
    raised: np.float32 = np.float32(_compiled()[0].ggufpy_power(base, exponent))
    return raised


def divided(logits: Floats, peak: float, divisor: float) -> Floats:
    """Return the logits, the peak being the largest, divided; where that overflows, what they are less than it."""
    result = np.empty(logits.size, np.float32)
    _compiled()[0].ggufpy_divide(_c_floats(logits), logits.size, peak, divisor, _c_floats(result))
    return result


def total(values: Floats) -> np.float32:
    """Return the sum in float32, one added after another; 0 of nothing."""
    added: np.float32 = np.float32(_compiled()[0].ggufpy_sum(_c_floats(values), values.size))
    return added


def deviation(logits: Floats) -> np.float32:
    """Return the standard deviation of the logits above -inf, its two sums as `total` adds."""
    found: np.float32 = np.float32(_compiled()[0].ggufpy_deviation(_c_floats(logits), logits.size))
    return found


def reach(shares: Floats, enough: float, *, exceed: bool = False) -> int:
    """Return how many shares reach, or exceed, enough; one more than there are where all together do not."""
    return int(_compiled()[0].ggufpy_reach(_c_floats(shares), shares.size, enough, exceed))


def floor(peak: float, share: float) -> float:
    """Return the least logit that is `share` times as probable as the peak."""
    return float(_compiled()[0].ggufpy_floor(peak, share))


def at_least(logits: Floats, peak: float, share: float) -> int:
    """Return how many logits, the largest first, are at least `share` times as probable as that, the peak."""
    return int(_compiled()[0].ggufpy_at_least(_c_floats(logits), logits.size, peak, share))


def drawn(logits: Floats, peak: float, u: float) -> int:
    """Return the place that u, from 0 to 1, falls on when weights as `softmax` has, summed as doubles, lie in a row."""
    weights = np.empty(logits.size, np.float32)
    return int(_compiled()[0].ggufpy_draw(_c_floats(logits), logits.size, peak, u, _c_floats(weights)))
