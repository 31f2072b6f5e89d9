"""What a sequence holds already of a prompt, what of it can be kept, and why not more.

Knows neither rows nor text; whoever generates calls `keep_prefix` before it computes a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ggufpy.errors import ContextLengthError

__all__ = ["Keeper", "common_prefix", "keep_prefix", "reusable_prefix"]

Ids = Sequence[int] | npt.NDArray[Any]


class Keeper(Protocol):
    """The part of a session that this file needs."""

    def tokens(self, seq_id: int = 0) -> Sequence[int]:
        """Return the token ids that the sequence holds, in order."""

    def trim(self, seq_id: int, n: int) -> None:
        """Keep the first n tokens of the sequence. ContextLengthError, with nothing changed, where that cannot be."""


def common_prefix(a: Ids, b: Ids) -> int:
    """Return how many tokens two sequences have in common at their start."""
    n = min(len(a), len(b))
    different = np.asarray(a[:n]) != np.asarray(b[:n])
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


def reusable_prefix(held: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Return how many tokens at the prompt's start are held already; the last one is always computed again."""
    return min(common_prefix(held, prompt_ids), len(prompt_ids) - 1)


def keep_prefix(session: Keeper, prompt_ids: Sequence[int], seq_id: int = 0) -> tuple[int, str | None]:
    """Cut a sequence down to what the prompt begins with; return that length, and why it is not all that was held.

    The reason is None where the prompt begins with all that the sequence held, or is the beginning of it.
    """
    held = session.tokens(seq_id)
    n = reusable_prefix(held, prompt_ids)
    reason = _difference(held, prompt_ids, n)
    try:
        session.trim(seq_id, n)
    except ContextLengthError as error:  # a window or a state has left behind what a continuation there needs
        n, reason = 0, str(error)
        session.trim(seq_id, n)
    return n, reason


def _difference(held: Sequence[int], prompt_ids: Sequence[int], n: int) -> str | None:
    if not held:
        return "the sequence was empty"
    if n < min(len(held), len(prompt_ids)) and held[n] != prompt_ids[n]:
        return f"differs at token {n} (held {held[n]}, prompt {prompt_ids[n]})"
    return None
