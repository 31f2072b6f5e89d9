"""What the benchmarks share: two libraries measured by turns in worker processes, pairs, spreads, and tables.

Each library runs in processes of its own, so that neither sees the other's ggml, threads or memory. One works while
the others wait for their pipe: OpenMP's idle threads spin for some milliseconds only, then sleep. A second process of
the reference is measured along with the first: how far the two are apart is what a ratio can be trusted to.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Paired", "Worker", "environment", "markdown", "resident_bytes", "run_pairs", "started"]

HERE = Path(__file__).resolve().parent


class Worker:
    """A process that holds one library's model and session, and answers calls one at a time."""

    def __init__(self, side: str, **settings: Any) -> None:
        command = [sys.executable, str(HERE / "worker.py"), side, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the worker and return its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended with code {self._process.wait()} in {method}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def started(sides: Sequence[str], first: int, **settings: Any) -> Iterator[list[Worker]]:
    """Start a worker for each side, another one first in each round, and end them.

    A new process gets the memory that the last one gave back: with one order, the same memory in every round.
    """
    with contextlib.ExitStack() as stack:
        workers: dict[int, Worker] = {}
        for turn in range(len(sides)):
            which = (first + turn) % len(sides)
            workers[which] = stack.enter_context(Worker(sides[which], **settings))
        yield [workers[which] for which in range(len(sides))]


@dataclass(frozen=True, slots=True)
class Paired:
    """Seconds of the same work, round by round, in ggufpy, in the reference, and in a second process of it."""

    ours: list[float]
    theirs: list[float]
    control: list[float]

    @classmethod
    def joined(cls, parts: Sequence[Paired]) -> Paired:
        """Put the rounds of several sets of processes together."""
        names = ("ours", "theirs", "control")
        return cls(*([seconds for part in parts for seconds in getattr(part, name)] for name in names))

    @property
    def ratio(self) -> float:
        """Return the median over the rounds of the reference's time over ours: above 1 we are faster."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Return the quartiles of the reference's time over its own in the second process."""
        ratios = [theirs / control for control, theirs in zip(self.control, self.theirs, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        return low, high


def run_pairs(rounds: int, measures: Sequence[Callable[[], float]], *, first: int = 0) -> Paired:
    """Measure ours, theirs and the control by turns, another one first in each round, in the first that one."""
    seconds: list[list[float]] = [[], [], []]
    for index in range(first, first + rounds):
        for turn in range(3):
            which = (index + turn) % 3
            seconds[which].append(measures[which]())
    return Paired(*seconds)


def resident_bytes(path: Path) -> int:
    """Return how much of a file the page cache holds (mincore)."""
    import ctypes

    import numpy as np

    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapping, np.uint8)
        arguments = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        failed = ctypes.CDLL(None, use_errno=True).mincore(*arguments)
        del view  # the mapping cannot be closed under it
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((pages & 1).sum()) * mmap.PAGESIZE


def environment() -> dict[str, Any]:
    """Describe the machine: CPU, cores this process may use, system."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load": os.getloadavg()[0],
    }


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
