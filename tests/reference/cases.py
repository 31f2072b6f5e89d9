"""The situations in which ggufpy's logits are compared with llama.cpp's: a session's options and a script to run in it.

Owns the cases and the recorder that turns a script, run on the reference, into steps that ggufpy can replay. Used by
the live tests and by make_dumps.py. Needs neither library.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Case", "Recorder", "cases_of", "machine", "prompt", "random_ids"]

ROOT = Path(__file__).resolve().parents[2]
WINDOW_ROWS = (0, 63, 127, 511, 512, 513, 640, 699)  # before, at and behind the edge of Gemma's window


class Recorder:
    """Runs a script on a session and keeps its steps, in the form of `ggufpy.reference`, and its rows."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.steps: list[tuple[Any, ...]] = []
        self.rows: list[np.ndarray] = []

    def decode(self, *items: tuple[int, Sequence[int], Any]) -> list[np.ndarray]:
        """Decode (seq_id, ids, rows) items in one call."""
        self.steps.append(("decode", items))
        rows: list[np.ndarray] = self.session.decode_batch(items)
        self.rows += rows
        return rows

    def greedy(self, n: int, *seq_ids: int) -> None:
        """Decode n tokens of each sequence together, each the likeliest after the sequence's last row so far."""
        rows = dict(zip(seq_ids, self.rows[-len(seq_ids) :], strict=True))
        for _ in range(n):
            items = [(seq_id, (int(row[-1].argmax()),), "last") for seq_id, row in rows.items()]
            rows = dict(zip(seq_ids, self.decode(*items), strict=True))

    def manage(self, method: str, *arguments: int | None) -> None:
        """Trim, fork or clear."""
        self.steps.append((method, *arguments))
        getattr(self.session, method)(*arguments)


Script = Callable[[Recorder, list[int]], None]


@dataclass(frozen=True)
class Case:
    """One situation; `dump` says whether it is also kept as a file."""

    name: str
    script: Script
    n_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    dump: bool = False


def whole(rows: Any = "all", n_greedy: int = 32) -> Script:
    """Decode the prompt in one call, then continue greedily."""

    def script(run: Recorder, ids: list[int]) -> None:
        run.decode((0, ids, rows))
        run.greedy(n_greedy, 0)

    return script


def pieces(size: int, n_single: int = 0, n_greedy: int = 32) -> Script:
    """Decode the prompt in pieces, its end token by token, then continue greedily."""

    def script(run: Recorder, ids: list[int]) -> None:
        end = len(ids) - n_single
        for start in range(0, end, size):
            run.decode((0, ids[start : min(start + size, end)], "last"))
        for token in ids[end:]:
            run.decode((0, [token], "last"))
        run.greedy(n_greedy, 0)

    return script


def interleaved(run: Recorder, ids: list[int]) -> None:
    """Decode two sequences by turns, together, and unequal in length."""
    a, b = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    run.decode((0, a[:20], "all"))
    run.decode((1, b[:9], "all"))
    run.decode((0, a[20:], "all"))
    run.decode((1, b[9:], "all"))
    run.decode((0, b[:7], "all"), (1, a[:3], [0, 2]))
    run.greedy(16, 0, 1)
    run.decode((1, a[:5], "all"), (0, b[:5], "last"))
    run.greedy(4, 1, 0)


def edited(run: Recorder, ids: list[int]) -> None:
    """Trim and decode again, decode the same again, clear and start afresh."""
    half = len(ids) // 2
    run.decode((0, ids, "all"))
    run.greedy(4, 0)
    run.manage("trim", 0, half)
    run.decode((0, ids[:half], "all"))
    run.greedy(4, 0)
    run.manage("trim", 0, half - 1)
    run.decode((0, ids[half - 1 : half], "last"))
    run.greedy(8, 0)
    run.manage("clear", None)
    run.decode((0, ids, "all"))
    run.greedy(4, 0)


def corrected(run: Recorder, ids: list[int]) -> None:
    """Take back the last tokens again and again, as one who corrects what was typed."""
    for start in range(0, len(ids), 80):
        run.decode((0, ids[start : start + 80], "all"))
        run.manage("trim", 0, run.session.n_past(0) - 3)
        run.decode((0, ids[start + 77 : start + 80], "all"))
    run.greedy(8, 0)


def forked(run: Recorder, ids: list[int]) -> None:
    """Fork a sequence, continue both differently, drop one, and fork again into its place."""
    run.decode((0, ids, "last"))
    run.manage("fork", 0, 1)
    run.decode((0, ids[:5], "all"), (1, ids[5:10], "all"))
    run.greedy(6, 0, 1)
    run.manage("clear", 0)
    run.decode((1, ids[:4], "all"))
    run.manage("fork", 1, 0)
    run.decode((0, ids[7:9], "all"), (1, ids[3:4], "all"))
    run.greedy(4, 1, 0)


def random_ids(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Return token ids for a vocabulary that has no text."""
    generator = random.Random(seed)
    return [int(generator.random() * n_vocab) for _ in range(n)]


def prompt(tokenize: Callable[[str], list[int]], n: int) -> list[int]:
    """Return the first n token ids of a text that is always at hand: the licence, then this file."""
    ids = tokenize((ROOT / "LICENSE").read_text() + Path(__file__).read_text())[:n]
    assert len(ids) == n, "the text is too short"
    return ids


def machine() -> dict[str, str]:
    """Name what, besides ggml's build, decides about the last bits: the CPU and the mathematical library."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    facts = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    names = ("vendor_id", "cpu family", "model", "model name")
    return {"cpu": " ".join(facts.get(name, "?") for name in names), "libc": " ".join(platform.libc_ver())}


def _short(name: str, **options: Any) -> Case:
    return Case(name, whole(), 64, options)


_SMALL = [
    _short(f"fa{flash}-ubatch{ubatch}-threads{threads}", flash_attn=bool(flash), n_ubatch=ubatch, n_threads=threads)
    for flash in (1, 0)
    for ubatch in (512, 64, 1)
    for threads in (1, 2)
]
_SEQUENCES = [
    Case(f"{script.__name__}-{'unified' if unified else 'separate'}-fa{flash}", script, 80, options)
    for script in (interleaved, forked)
    for unified in (True, False)
    for flash in (1, 0)
    for options in [{"n_seq_max": 2, "kv_unified": unified, "flash_attn": bool(flash), "n_ctx": 1024}]
]
_EDITED = [Case(f"edited-fa{flash}", edited, 80, {"flash_attn": bool(flash)}) for flash in (1, 0)]
_CACHE_TYPES = [
    _short(f"cache-{k}-{v}-fa{flash}", type_k=k, type_v=v, flash_attn=bool(flash))
    for k, v in [
        ("f32", "f32"),
        ("bf16", "bf16"),
        ("q8_0", "q8_0"),
        ("q4_0", "q4_0"),
        ("q5_0", "q5_1"),
        ("q8_0", "f16"),
    ]
    for flash in (1, 0)
    if flash or not v.startswith("q")  # llama.cpp wants flash attention for a quantized V
]
_LONG = [
    # from 512 cells on flash attention splits the cache among the threads
    Case(f"long-threads{threads}", whole((0, 300, 559), 8), 560, {"n_ctx": 1024, "n_threads": threads})
    for threads in (1, 2)
]
_WINDOW = [
    Case(f"{name}-fa{flash}-swa{full}", script, 700, {"n_ctx": 1024, "flash_attn": bool(flash), "swa_full": bool(full)})
    for name, script in (
        ("whole", whole(WINDOW_ROWS)),
        ("chunks", pieces(128)),
        ("steps", pieces(512, n_single=100)),
    )
    for flash in (1, 0)
    for full in (1, 0)
]
_DUMPS = [
    Case(f"dump-fa{flash}", whole(range(40, 48)), 48, {"flash_attn": bool(flash), "n_threads": 2}, True)
    for flash in (1, 0)
]
_WINDOW_DUMPS = [
    Case(
        f"dump-fa{flash}-swa{full}",
        whole(WINDOW_ROWS),
        700,
        {"n_ctx": 1024, "flash_attn": bool(flash), "swa_full": bool(full), "n_threads": 2},
        True,
    )
    for flash, full in ((1, 1), (0, 1), (1, 0))
]

_SMALL_WINDOW = [  # for a window of a few tokens: with micro-batches of 16 its cache of 256 cells is walked round twice
    Case(
        f"window-{name}-fa{flash}-swa{full}",
        script,
        640,
        {"n_ctx": 1024, "n_ubatch": 16, "flash_attn": bool(flash), "swa_full": bool(full), **options},
    )
    for name, script, options in (
        ("whole", whole(), {}),
        ("steps", pieces(100, n_single=100), {}),
        ("corrected", corrected, {}),
        ("separate", interleaved, {"n_seq_max": 2}),
        ("unified", interleaved, {"n_seq_max": 2, "kv_unified": True}),
    )
    for flash in (1, 0)
    for full in (1, 0)
]

_REAL = {
    "smollm2": [*_SMALL, *_SEQUENCES, *_EDITED, *_CACHE_TYPES, *_LONG, *_DUMPS],
    "gemma3": [*_SMALL[::3], *_SEQUENCES[:4], *_EDITED, *_WINDOW, *_WINDOW_DUMPS],
}


def cases_of(name: str) -> list[Case]:
    """List the situations of a model: a real one, or a tiny one that is called ARCHITECTURE-VARIANT."""
    if name in _REAL:
        return _REAL[name]
    cases = [*_SMALL, *_DUMPS]
    if name.endswith(("-plain", "-experts")) or "-window" in name:
        cases += [*_SEQUENCES, *_EDITED]
    if name.endswith("-plain"):
        cases += [*_CACHE_TYPES, *_LONG]
    if "-window" in name:
        cases += _SMALL_WINDOW
    return cases
