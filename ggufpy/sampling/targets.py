"""Choosing with an aim that is followed from token to token: mirostat 1 and 2, and adaptive-p.

Each is made for one sequence, called with the candidates of each step, and chooses. All arithmetic is float32, as
llama.cpp's. Does not own what comes before them in the chain.
"""

from __future__ import annotations

import math

import numpy as np

from ggufpy.sampling.draws import Random, pick
from ggufpy.sampling.filters import NEG_INF, Candidates, Floats, in_order, probabilities
from ggufpy.sampling.native import binary_logarithms, logarithms, power, total

__all__ = ["AdaptiveP", "Mirostat", "MirostatV2"]

_ONE = np.float32(1)


class MirostatV2:
    """Leave out tokens of more surprise than a bound that moves until the mean surprise is tau (arXiv:2007.14966)."""

    __slots__ = ("_eta", "_mu", "_random", "_tau")

    def __init__(self, tau: float, eta: float, seed: int) -> None:
        """Start with a bound of twice the aim. `tau`: bits; `eta`: how fast the bound follows."""
        self._tau, self._eta = np.float32(tau), np.float32(eta)
        self._mu = np.float32(2) * self._tau
        self._random = Random(seed)

    def __call__(self, c: Candidates) -> int:
        """Return the next token's id."""
        c = in_order(c)
        c = c.take(slice(max(1, self._bound(probabilities(c)))), ordered=True)
        shares = probabilities(c)
        place = pick(shares, self._random)
        surprise = -binary_logarithms(shares[place : place + 1])[0]
        self._mu -= self._eta * (surprise - self._tau)
        return int(c.ids[place])

    def _bound(self, shares: Floats) -> int:
        """Return how many of the candidates, likeliest first, to keep."""
        return int((-binary_logarithms(shares)).searchsorted(self._mu, side="right"))


class Mirostat(MirostatV2):
    """Estimate Zipf's exponent from the likeliest tokens, and from it how many give the surprise aimed at."""

    __slots__ = ("_n_vocab", "_steps")

    _M = 100  # tokens to estimate from: llama.cpp's and the paper's

    def __init__(self, tau: float, eta: float, seed: int, n_vocab: int) -> None:
        """Start as MirostatV2 does."""
        super().__init__(tau, eta, seed)
        self._n_vocab = np.float32(n_vocab)
        places = np.arange(1, self._M + 1, dtype=np.float32)
        self._steps = logarithms(places[1:] / places[:-1])

    def _bound(self, shares: Floats) -> int:
        with np.errstate(all="ignore"):  # shares of 0, and one alone: NaN, which keeps one
            head = shares[: self._M]
            falls = logarithms(head[:-1] / head[1:])
            steps = self._steps[: falls.size]
            exponent = total(steps * falls) / total(steps * steps)
            excess = exponent - _ONE
            kept = (excess * power(2, self._mu)) / (_ONE - power(self._n_vocab, -excess))
            kept = power(kept, _ONE / exponent)
        return 1 if math.isnan(kept) else int(min(kept, np.float32(shares.size)))


class AdaptiveP:
    """Prefer tokens with a probability near a target, which makes up for those chosen before (llama.cpp 17927)."""

    __slots__ = ("_decay", "_random", "_sum", "_target", "_weight")

    _WIDTH, _PEAK, _SHARPNESS = np.float32(0.3), np.float32(5), np.float32(10)

    def __init__(self, target: float, decay: float, seed: int) -> None:
        """Start as if all tokens so far had been on target. `decay`: 0 … 0.99, over about 1/(1 - decay) tokens."""
        self._target, self._decay = np.float32(target), np.float32(decay)
        self._weight = _ONE / (_ONE - self._decay)
        self._sum = self._target / (_ONE - self._decay)
        self._random = Random(seed)

    def __call__(self, c: Candidates) -> int:
        """Return the next token's id."""
        shares = probabilities(c)
        aim = min(max(np.float32(2) * self._target - self._sum / self._weight, np.float32(0)), _ONE)
        distance = np.abs((shares - aim) * (_ONE / self._WIDTH))
        logits = self._PEAK - self._SHARPNESS * distance * distance / (_ONE + distance)
        logits = np.where(c.logits == NEG_INF, NEG_INF, logits)
        place = pick(probabilities(Candidates(c.ids, logits, c.ordered)), self._random)
        self._sum = shares[place] + self._decay * self._sum
        self._weight = _ONE + self._decay * self._weight
        return int(c.ids[place])
