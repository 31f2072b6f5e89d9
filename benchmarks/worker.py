"""A worker of the benchmarks: worker.py ggufpy|llama.cpp|llama-cpp-python SETTINGS, then calls as JSON lines on stdin.

Owns what is timed on each side: prefill is one decode of a prompt into an empty cache, greedy a loop of one decode and
one argmax a token, generate a user's call with its defaults. Sides have the same methods, but that llama.cpp's own loop
stands for it in the first two and llama-cpp-python's class in the last. Settings: path, repack, options of the session.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Ours:
    """Runs ggufpy."""

    def __init__(self, path: str, repack: bool, options: dict[str, Any]) -> None:
        from ggufpy import Model

        start = time.perf_counter()
        self.model = Model.load(path, repack=repack)
        self.load_seconds = time.perf_counter() - start
        self.session = self.model.session(**options)

    def prefill(self, ids: list[int]) -> tuple[int, float]:
        """Decode a prompt into an empty cache; return the greedy next token and the seconds taken."""
        self.session.clear()
        start = time.perf_counter()
        token = int(self.session.decode(ids, copy=False)[0].argmax())
        return token, time.perf_counter() - start

    def greedy(self, token: int, n: int) -> tuple[list[int], float]:
        """Decode n tokens, each the argmax of the row before; return them and the seconds taken."""
        made, decode = [], self.session.decode
        start = time.perf_counter()
        for _ in range(n):
            token = int(decode([token], copy=False)[0].argmax())
            made.append(token)
        return made, time.perf_counter() - start

    def generate(self, prompt: str, n: int, seed: int) -> float:
        """Answer a prompt as users do; return the seconds for each token of the answer."""
        start = time.perf_counter()
        answer = self.model.generate(prompt, max_tokens=n, seed=seed)
        return (time.perf_counter() - start) / answer.usage.completion_tokens

    def share(self, token: int, n: int) -> float:
        """Return the share of a greedy loop's time that is not spent inside the compute call."""
        from ggufpy.backend import Scheduler

        compute, inside = Scheduler.compute, 0.0

        def timed(*arguments: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            try:
                return compute(*arguments)
            finally:
                inside += time.perf_counter() - start

        Scheduler.compute = timed  # type: ignore[method-assign]
        try:
            _, seconds = self.greedy(token, n)
        finally:
            Scheduler.compute = compute  # type: ignore[method-assign]
        return 1 - inside / seconds


class Theirs:
    """Runs llama.cpp through the tests' driver."""

    def __init__(self, path: str, repack: bool, options: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        from reference.llama import ReferenceModel

        start = time.perf_counter()
        self.model = ReferenceModel(path, repack=repack)
        self.load_seconds = time.perf_counter() - start
        self.session = self.model.session(**options)
        self.prefill, self.greedy = self.session.prefill, self.session.greedy


class Called:
    """Runs llama-cpp-python as its users do, with all its defaults."""

    def __init__(self, path: str, repack: bool, options: dict[str, Any]) -> None:
        from llama_cpp import Llama

        self.llm = Llama(path, verbose=False)

    def generate(self, prompt: str, n: int, seed: int) -> float:
        """Answer a prompt as users do; return the seconds for each token of the answer."""
        start = time.perf_counter()
        answer = self.llm(prompt, max_tokens=n, seed=seed)
        return (time.perf_counter() - start) / int(answer["usage"]["completion_tokens"])


SIDES = {"ggufpy": Ours, "llama.cpp": Theirs, "llama-cpp-python": Called}


def beyond_mapping(path: str) -> int:
    """Return this process's resident bytes, the mapping of the file left out (Linux)."""
    total, name = 0, ""
    real = str(Path(path).resolve())
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            name = line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
        elif first == "Rss:" and name != real:
            total += int(line.split()[1]) * 1024
    return total


def main() -> None:
    """Answer calls until standard input ends."""
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    worker: Any = SIDES[side](**settings)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        if method == "memory":
            result: Any = beyond_mapping(settings["path"])
        elif method == "load_seconds":
            result = worker.load_seconds
        else:
            result = getattr(worker, method)(*arguments)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
