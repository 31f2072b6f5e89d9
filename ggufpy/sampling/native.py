"""The inner loops of sampling in C (`_ffi/sampling.c`): the largest values, exponentials, sums one after another.

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
    "LikeliestDraw",
    "at_least",
    "deviation",
    "divided",
    "drawn",
    "k_largest",
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
    return _compiled()[1].from_buffer("float[]", np.ascontiguousarray(values, np.float32))


class LikeliestDraw:
    """top_k, top_p, min_p, temperature and a draw in one call of C, made of what the functions here call.

    While the model computed its weights went through the caches: each call of NumPy is then a few microseconds.
    """

    __slots__ = ("_memory", "_settings")

    def __init__(self, n_vocab: int, k: int, top_p: float, min_p: float, temperature: float) -> None:
        """Prepare. `top_p` of 1, `min_p` of 0 and `temperature` of 1 change nothing, as elsewhere."""
        ffi = _compiled()[1]
        self._settings = (min(k, n_vocab), top_p, min_p, temperature)
        self._memory = (ffi.new("int64_t[]", k), ffi.new("float[]", k), ffi.new("float[]", k))

    def choose(self, row: Floats, u: float) -> int:
        """Return the token that u, from 0 to 1, falls on; the row has a largest logit, which is finite."""
        C = _compiled()[0]  # noqa: N806
        return int(C.ggufpy_draw_likeliest(_c_floats(row), row.size, *self._settings, u, *self._memory))


def k_largest(values: Floats, k: int) -> Ids:
    """Return the places of the k largest values, k at most all, largest first and lowest place first among equals."""
    C, ffi = _compiled()  # noqa: N806
    places = np.empty(k, np.int64)
    C.ggufpy_largest(_c_floats(values), values.size, k, ffi.from_buffer("int64_t[]", places))
    return places


def softmax(logits: Floats, peak: float) -> Floats:
    """Return exp(logit - peak) of each, rounded once to float32, divided by their `total`."""
    result = np.empty(logits.size, np.float32)
    _compiled()[0].ggufpy_softmax(_c_floats(logits), logits.size, peak, _c_floats(result))
    return result


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


def at_least(logits: Floats, peak: float, share: float) -> int:
    """Return how many logits, the largest first, are at least `share` times as probable as that, the peak."""
    return int(_compiled()[0].ggufpy_at_least(_c_floats(logits), logits.size, peak, share))


def drawn(logits: Floats, peak: float, u: float) -> int:
    """Return the place that u, from 0 to 1, falls on when weights as `softmax` has, summed as doubles, lie in a row."""
    weights = np.empty(logits.size, np.float32)
    return int(_compiled()[0].ggufpy_draw(_c_floats(logits), logits.size, peak, u, _c_floats(weights)))
