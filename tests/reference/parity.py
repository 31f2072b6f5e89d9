"""The situations in which every architecture is compared with llama.cpp, and the files of what llama.cpp gave there.

Owns the script, which runs on either side's sessions, and the committed rows: `dumps/parity/ARCHITECTURE.npz` holds a
few rows of every variant, for machines without llama.cpp. Made by make_parity.py. Needs neither library.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ggufpy import Model, arch
from ggufpy.testing import variants

__all__ = ["FOLDER", "VARIANTS", "distance", "outputs", "read", "sample", "write"]

FOLDER = Path(__file__).parent / "dumps" / "parity"
VARIANTS = {(name, label): options for name in arch.names() for label, options in variants(name).items()}
PROMPT = [3 + i * 7919 % 61 for i in range(40)]
N_STEPS = 8
RULED_OUT = -1e30
N_COLUMNS = 32  # kept at either end of a row


def outputs(name: str, model: Any) -> Iterator[np.ndarray]:
    """Run either library's model: in small pieces, token by token, then two sequences in one call.

    Yields what each call gives, float32 [n_outputs, n_vocab], or the embeddings [n_tokens or 1, n_embd] of models that
    give no logits: with flash attention, then without.
    """
    declaration = arch.find(name)
    for flash_attn in (True, False):
        options = {"n_ctx": 256, "n_threads": 1, "flash_attn": flash_attn}
        if not declaration.logits:
            yield from embeddings(model, options)
            continue
        with model.session(n_ubatch=64 if declaration.cacheless else 16, **options) as session:
            yield session.decode(PROMPT, logits="all")
            for token in PROMPT[:N_STEPS]:
                yield session.decode([token])
        with model.session(n_seq_max=2, **options) as session:
            yield from session.decode_batch([(0, PROMPT, "all"), (1, PROMPT[::-1], "all")])
            yield from session.decode_batch([(0, PROMPT[:1], "last"), (1, PROMPT[1:2], "last")])


def embeddings(model: Any, options: dict[str, Any]) -> Iterator[np.ndarray]:
    """Compute the prompt's embeddings: of each token, and pooled in every way."""
    for pooling in (None, "mean", "last", "cls"):
        if isinstance(model, Model):
            with model.session(**options) as session:
                yield np.atleast_2d(session.embed(PROMPT, pooling=pooling))
        else:
            with model.session(embeddings=True, pooling=pooling, **options) as session:
                yield np.atleast_2d(session.embed(PROMPT))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Compare rows: 0 for the same bits, else the squared error relative to the squares, of tokens not ruled out."""
    if found.tobytes() == expected.tobytes():
        return 0.0
    allowed = expected > RULED_OUT
    if found.shape != expected.shape or not np.array_equal(allowed, found > RULED_OUT):
        return float("inf")
    found, expected = found[allowed].astype(np.float64), expected[allowed].astype(np.float64)
    return float(np.square(found - expected).sum() / np.square(expected).sum())


def sample(rows: list[np.ndarray]) -> np.ndarray:
    """Choose the rows and columns that are committed, [3, at most 64]."""
    last = np.stack([rows[i][-1] for i in (0, 3, len(rows) // 2)])  # the last is the first without flash attention
    return last if last.shape[1] <= 2 * N_COLUMNS else np.hstack((last[:, :N_COLUMNS], last[:, -N_COLUMNS:]))


def write(name: str, rows: dict[str, np.ndarray], files: dict[str, bytes], meta: dict[str, Any]) -> None:
    """Write an architecture's rows by variant, with checksums of the model files they belong to."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    about = json.dumps({**meta, "crc32": {label: zlib.crc32(data) for label, data in files.items()}})
    np.savez_compressed(FOLDER / f"{name}.npz", **rows, meta=np.frombuffer(about.encode(), np.uint8))


def read(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read what `write` wrote."""
    with np.load(FOLDER / f"{name}.npz") as file:
        rows = {label: file[label] for label in file.files if label != "meta"}
        return rows, json.loads(file["meta"].tobytes())
