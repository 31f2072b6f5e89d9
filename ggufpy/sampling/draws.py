"""Random numbers as libstdc++ makes them, and the choices made with them.

Owns std::mt19937's stream and what is drawn from it. Does not own what a draw is for.
"""

from __future__ import annotations

import numpy as np

from ggufpy.sampling.filters import Candidates, Floats, peak
from ggufpy.sampling.native import drawn

__all__ = ["Random", "draw", "pick"]


class Random:
    """std::mt19937 with a seed of 32 bits."""

    __slots__ = ("_word",)

    def __init__(self, seed: int) -> None:
        """Start the stream."""
        generator = np.random.MT19937()
        np.random.RandomState(generator).seed(seed)  # a seeding that NumPy has frozen: it is std::mt19937's
        self._word = generator.random_raw

    def double(self) -> float:
        """Return a double in (0, 1), made from two 32-bit words, the low one first."""
        word = self._word() | self._word() << 32
        return min(max(word, 1) / 2**64, 1 - 2**-53)

    def single(self) -> np.float32:
        """Return a float32 in [0, 1), made from one word."""
        return min(np.float32(self._word()) / np.float32(2**32), np.float32(1 - 2**-24))


def draw(c: Candidates, u: float) -> int:
    """Return the token that the uniform number u in (0, 1) falls on (llama_sampler_dist_apply)."""
    return c.ids.item(drawn(c.logits, peak(c), u))


def pick(shares: Floats, random: Random) -> int:
    """Return a place in the shares, each as likely as its share; one alone costs no number (discrete_distribution)."""
    if shares.size < 2:
        return 0
    doubles = shares.astype(np.float64)
    doubles /= doubles.sum()
    running = np.cumsum(doubles, out=doubles)
    running[-1] = 1.0
    return int(running.searchsorted(random.double()))
