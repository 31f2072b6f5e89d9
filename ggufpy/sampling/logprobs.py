"""Log-probabilities of chosen tokens, under the softmax of the whole row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ggufpy.sampling.filters import Floats, largest

__all__ = ["TokenLogprob", "token_logprob"]


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
    top = [] if n_top < 1 else [i for i in largest(row, n_top).tolist() if row[i] > -math.inf]
    return TokenLogprob(token_id, float(row[token_id]) - total, tuple((i, float(row[i]) - total) for i in top))
