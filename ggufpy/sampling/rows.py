"""Row of logits → row of logits: what changes single tokens' logits before anything is cut.

Every function leaves the row it is given alone and returns a changed copy, float32 [n_vocab].
Does not own DRY (dry.py), nor the order of all these (chain.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ggufpy.errors import SamplingError
from ggufpy.sampling.filters import NEG_INF, Floats, Ids
from ggufpy.sampling.params import LogitsProcessor

__all__ = ["add_bias", "allow", "ban", "best_token", "penalties", "process", "repeat_penalty"]


def best_token(row: Floats, found: int | None = None) -> int:
    """Return the token with the largest logit, the lowest id among equals. `found`: what row.argmax() gives, if known.

    Raises SamplingError when a logit is NaN (naming the first) or every one is -inf.
    """
    best = int(row.argmax()) if found is None else found  # NumPy's argmax is the first NaN's index where there is one
    value = row.item(best)
    if value != value:
        raise SamplingError(f"logits[{best}] is NaN: the model's computation went wrong")
    if value == -math.inf:
        raise SamplingError("no candidate left: every logit is -inf")
    return best


def process(row: Floats, history: Sequence[int], processors: Iterable[LogitsProcessor]) -> Floats:
    """Return what the processors make of a copy of the row, one after another.

    Raises SamplingError, naming the processor, when it returns anything but n_vocab numbers, NaN not among them.
    """
    seen, size = tuple(history), row.size
    row = row.copy()
    for i, processor in enumerate(processors):
        result: Any = processor(seen, row)
        try:
            with np.errstate(over="ignore"):
                row = np.array(result, np.float32)  # a copy: what a processor keeps of its own stays its own
        except (TypeError, ValueError):
            raise SamplingError(f"logits_processors[{i}]: expected a row of logits, got {result!r:.60}") from None
        if row.shape != (size,):
            raise SamplingError(f"logits_processors[{i}]: expected shape [{size}], got {list(row.shape)}")
        if np.isnan(row[row.argmax()]):
            raise SamplingError(f"logits_processors[{i}]: returned NaN at index {row.argmax()}")
    return row


def add_bias(row: Floats, ids: Ids | Sequence[int], biases: Floats) -> Floats:
    """Add a bias to the logit of each of the ids, which differ (llama_sampler_init_logit_bias)."""
    row = row.copy()
    row[ids] += biases
    return row


def ban(row: Floats, ids: Ids | Sequence[int]) -> Floats:
    """Make the ids impossible."""
    row = row.copy()
    row[ids] = NEG_INF
    return row


def allow(row: Floats, mask: Any) -> Floats:
    """Make every token impossible but those where the mask, bool [n_vocab or more], is True.

    Raises SamplingError for a mask of another kind, or one that allows nothing.
    """
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.ndim != 1 or mask.size < row.size:
        raise SamplingError(f"mask: expected bool [{row.size}], got {mask!r:.60}")
    mask = mask[: row.size]
    if not mask.any():
        raise SamplingError("mask: no token is allowed")
    return np.where(mask, row, NEG_INF)


def penalties(row: Floats, history: Iterable[int], repeat: float, frequency: float, presence: float) -> Floats:
    """Make every token of the history less likely (llama_sampler_init_penalties).

    Its logit is divided by `repeat` if positive, else multiplied; then `frequency` for each time it was seen and
    `presence` once are taken off.
    """
    counts = {token: count for token, count in Counter(history).items() if token < row.size}
    seen, factor = list(counts), np.float32(repeat)
    row = row.copy()
    logits = row[seen]
    with np.errstate(over="ignore"):
        logits = np.where(logits <= 0, logits * factor, logits / factor)
        times = np.array(list(counts.values()), np.float32)
        row[seen] = logits - (times * np.float32(frequency) + np.float32(presence))
    return row


def repeat_penalty(row: Floats, history: Iterable[int], penalty: float) -> Floats:
    """Make every token of the history less likely, however often it was seen: `penalties` with that one alone."""
    return penalties(row, history, penalty, 0.0, 0.0)
