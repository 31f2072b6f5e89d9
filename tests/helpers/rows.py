"""Token ids for the tiny vocabulary, and how rows of logits or embeddings are compared."""

from __future__ import annotations

import numpy as np

Rows = np.ndarray


def ids(n: int, seed: int = 0) -> list[int]:
    """Random tokens of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(2, 64, n).tolist()


def same(a: Rows, b: Rows) -> bool:
    """Equal to the last bit."""
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def near(a: Rows, b: Rows) -> bool:
    """Equal but for the order of sums."""
    return a.shape == b.shape and bool(np.square(a - b).sum() <= 5e-5 * np.square(b).sum())
