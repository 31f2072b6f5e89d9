"""Measures ggufpy against llama.cpp on the same machine in one run, pair by pair: benchmarks/vs_llama_cpp.py MODEL…

Prints a Markdown table and, with --json, every number. Needs llama-cpp-python built from source with the same options
as ggufpy's ggml. docs/performance.md says what is measured and how to read it. Absolute times are never judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import Paired, Worker, environment, markdown, resident_bytes, run_pairs, started

from ggufpy import GgufpyError, arch
from ggufpy.testing import write_tiny_model

N_PREFILL, N_START, N_DECODE = 512, 16, 64
PROMPT = "{} years ago, in a village between the mountains and the sea, there lived a"
HEAD = ("figure", "model", "weights", "ggufpy", "llama.cpp", "ggufpy ÷ llama.cpp", "llama.cpp ÷ itself", "aim")
MB = 1e6
LARGE: dict[str, Any] = {"n_embd": 1024, "n_ff": 2816, "n_head": 16, "n_head_kv": 4, "n_layer": 8, "n_vocab": 16384}
LARGER_LAYERS = {"n_embd": 1024, "n_ff": 4096, "n_head": 16, "n_vocab": 16384}

FIRST_TOKEN = {
    "ggufpy": """
from ggufpy import Model
session = Model.load({path!r}).session(n_ctx=512, n_threads={n_threads})
print(int(session.decode({ids})[0].argmax()), flush=True)
""",
    "llama.cpp": """
from llama_cpp import Llama
llm = Llama({path!r}, n_ctx=512, n_threads={n_threads}, n_threads_batch={n_threads}, flash_attn=True, verbose=False)
llm.eval({ids})
print(llm.sample(temp=0.0), flush=True)
""",
}
OPEN = {
    "GGUFFile": "from ggufpy import GGUFFile; GGUFFile({path!r})",
    "ggufpy": "from ggufpy import Model; Model.load({path!r})",
    "llama.cpp": "import sys; sys.path.insert(0, {tests!r}); from reference.llama import ReferenceModel as Model; "
    "Model({path!r})",
}
TESTS = str(Path(__file__).resolve().parents[1] / "tests")

Row = dict[str, Any]


def row(figure: str, model: str, weights: str, unit: str, ours: float, theirs: float, **more: Any) -> Row:
    """Make one line of the table."""
    facts = {"figure": figure, "model": model, "weights": weights, "unit": unit, "ggufpy": ours, "llama.cpp": theirs}
    return {**facts, **more}


def token_ids(n: int, n_vocab: int = 40_000) -> list[int]:
    """Return ids that every vocabulary of so many tokens and a thousand has."""
    generator = random.Random(0)
    return [1000 + int(generator.random() * n_vocab) for _ in range(n)]


def speeds(path: Path, repack: bool, n_threads: int, rounds: int, n_vocab: int = 40_000) -> Iterator[Row]:
    """Measure prefill and decode, and Python's share of a decode step, in new processes each round."""
    options = {"n_ctx": 1024, "n_threads": n_threads, "flash_attn": True}
    settings = {"path": str(path), "repack": repack, "options": options}
    prompt, weights = token_ids(N_PREFILL, n_vocab), "repacked" if repack else "mapped"

    def prefill(worker: Worker) -> float:
        return float(worker.call("prefill", prompt)[1])

    def decode(worker: Worker) -> float:
        token, _ = worker.call("prefill", prompt[:N_START])
        return float(worker.call("greedy", token, N_DECODE)[1])

    figures = {f"prefill {N_PREFILL}": (prefill, N_PREFILL), "decode": (decode, N_DECODE)}
    pairs: dict[str, list[Paired]] = {figure: [] for figure in figures}
    shares = []
    for index in range(rounds):
        with started(("ggufpy", "llama.cpp", "llama.cpp"), index, **settings) as workers:
            starts = [worker.call("prefill", prompt[:N_START])[0] for worker in workers]
            tokens = [worker.call("greedy", token, 8)[0] for worker, token in zip(workers, starts, strict=True)]
            if tokens[0] != tokens[1]:
                print(f"{path.name}, {weights}: the two libraries choose other tokens", file=sys.stderr)
            for figure, (measure, _) in figures.items():
                measures = [lambda m=measure, w=worker: m(w) for worker in workers]
                run_pairs(1, measures)  # warm
                pairs[figure].append(run_pairs(1, measures, first=index))
            workers[0].call("prefill", prompt[:N_START])
            shares.append(workers[0].call("share", tokens[0][-1], N_DECODE))
    for figure, (_, n_tokens) in figures.items():
        found = Paired.joined(pairs[figure])
        ours, theirs = (n_tokens / statistics.median(seconds) for seconds in (found.ours, found.theirs))
        more = {"ratio": found.ratio, "spread": found.spread, "aim": "≥ 0.98", "seconds": vars_of(found)}
        yield row(figure, path.stem, weights, "tokens/s", ours, theirs, **more)
    share = 100 * statistics.median(shares)
    yield row("Python's share of decode", path.stem, weights, "%", share, float("nan"), aim="< 1.5 (SmolLM2)")


def calls(path: Path, rounds: int) -> Row:
    """Measure a user's call with all defaults, sampling, text and threads included, in new processes each round."""
    settings = {"path": str(path), "repack": True, "options": {}}
    pairs = []
    for index in range(rounds):
        with started(("ggufpy", "llama-cpp-python", "llama-cpp-python"), index, **settings) as workers:
            for years in (100, 110 + index):  # warm, then measured
                arguments = PROMPT.format(years), N_DECODE, index
                measures = [lambda w=worker, a=arguments: float(w.call("generate", *a)) for worker in workers]
                found = run_pairs(1, measures, first=index)
            pairs.append(found)
    joined = Paired.joined(pairs)
    ours, theirs = (1 / statistics.median(seconds) for seconds in (joined.ours, joined.theirs))
    more = {"ratio": joined.ratio, "spread": joined.spread, "aim": "≥ 1.25", "seconds": vars_of(joined)}
    return row(f"generate {N_DECODE}, default call", path.stem, "repacked", "tokens/s", ours, theirs, **more)


def random_model(name: str, folder: Path) -> Path:
    """Write a random model of an architecture, of some 100 MB in Q8_0 unless its shapes are tied to each other."""
    path, large = folder / f"{name}.gguf", dict(LARGE)
    if isinstance(heads := arch.find(name).tiny.get("n_head_kv"), list):  # layers without any keep a state
        large["n_head_kv"] = [LARGE["n_head_kv"] * bool(n) for n in heads] * 2
    for shape in (large, LARGER_LAYERS):
        with contextlib.suppress(GgufpyError, ValueError):
            return write_tiny_model(name, path, type="q8_0", **shape)
    return write_tiny_model(name, path, type="q8_0", n_vocab=LARGE["n_vocab"])


def families() -> list[str]:
    """Return one architecture that continues text for each file of ggufpy/arch."""
    found = {}
    for name in arch.names():
        declaration = arch.find(name)
        if declaration.logits and not declaration.cacheless:
            found.setdefault(declaration.__module__, name)
    return list(found.values())


def vars_of(pairs: Paired) -> dict[str, list[float]]:
    """Return the seconds of every round."""
    return {"ggufpy": pairs.ours, "llama.cpp": pairs.theirs, "llama.cpp again": pairs.control}


def first_token(path: Path, n_threads: int, rounds: int) -> Row:
    """Measure from the start of a Python process to the first token of a short prompt."""

    def start(side: str) -> float:
        code = FIRST_TOKEN[side].format(path=str(path), n_threads=n_threads, ids=token_ids(N_START))
        begin = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - begin
        if not line:
            raise RuntimeError(f"{side}: no first token of {path}")
        return seconds

    sides = ("ggufpy", "llama.cpp", "llama.cpp")
    for side in set(sides):
        start(side)  # the page cache and the byte code
    pairs = run_pairs(rounds, [lambda side=side: start(side) for side in sides])
    ours, theirs = statistics.median(pairs.ours), statistics.median(pairs.theirs)
    ratio = 1 / pairs.ratio
    more = {"ratio": ratio, "spread": pairs.spread, "aim": "≤ 0.5", "seconds": vars_of(pairs)}
    return row("process start to first token", path.stem, "default", "s", ours, theirs, **more)


def memory(path: Path, n_threads: int) -> Iterator[Row]:
    """Measure resident memory beyond the mapping, and the seconds of loading, with mapped weights."""
    options = {"n_ctx": 1024, "n_threads": n_threads, "flash_attn": True}
    found = []
    for side in ("ggufpy", "llama.cpp"):
        with Worker(side, path=str(path), repack=False, options=options) as worker:
            seconds, opened = worker.call("load_seconds"), worker.call("memory")
            token, _ = worker.call("prefill", token_ids(N_PREFILL))
            worker.call("greedy", token, 4)
            found.append((opened / MB, worker.call("memory") / MB, seconds))
    names = ("memory beyond the mapping, session made", "the same after 512 tokens", "load")
    for name, unit, ours, theirs in zip(names, ("MB", "MB", "s"), *found, strict=True):
        yield row(name, path.stem, "mapped", unit, ours, theirs, ratio=ours / theirs, aim="≤ 1")


def bytes_read(path: Path, folder: Path) -> Row | None:
    """Measure how much of a file that is not in memory opening it reads; None where the cache cannot be dropped."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    read = {}
    for side, code in OPEN.items():
        with copy.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = resident_bytes(copy)
        if before > path.stat().st_size / 100:
            return None
        subprocess.run([sys.executable, "-c", code.format(path=str(copy), tests=TESTS)], check=True)
        read[side] = resident_bytes(copy) - before
    copy.unlink()
    more = {"ratio": read["ggufpy"] / read["llama.cpp"], "aim": "no tensor data", "GGUFFile": read["GGUFFile"] / MB}
    return row("read by opening", path.stem, "mapped", "MB", read["ggufpy"] / MB, read["llama.cpp"] / MB, **more)


def show(line: Row) -> Sequence[str]:
    """Format one line of the table."""
    unit = line["unit"]
    sides = ["–" if line[side] != line[side] else f"{line[side]:.3g} {unit}" for side in ("ggufpy", "llama.cpp")]
    ratio = f"{line['ratio']:.3f}" if "ratio" in line else ""
    spread = "{:.3f} – {:.3f}".format(*line["spread"]) if "spread" in line else ""
    return (line["figure"], line["model"], line["weights"], *sides, ratio, spread, line["aim"])


def main() -> None:
    """Measure every model given and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code, a checkout shall too
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument(
        "--random", nargs="*", metavar="ARCH", help="random models of these architectures too; of each family, if none"
    )
    parser.add_argument("--rounds", type=int, default=9, help="pairs measured for each figure (9)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of both, but in calls (all cores)"
    )
    parser.add_argument("--skip", default="", help="comma-separated: speeds, calls, start, memory, read")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder on a disk for one copy of a model")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    arguments = parser.parse_args()
    skip, rows, facts_before = arguments.skip.split(","), [], environment()

    def add(line: Row | None) -> None:
        if line is not None:
            rows.append(line)
            print(f"{line['figure']}, {line['model']}, {line['weights']}: {show(line)[3:6]}", file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=arguments.scratch or "/var/tmp") as folder:
        for path in arguments.models:
            for repack in (False, True) if "speeds" not in skip else ():
                for line in speeds(path, repack, arguments.threads, arguments.rounds):
                    add(line)
            if "calls" not in skip:
                add(calls(path, arguments.rounds))
            if "start" not in skip:
                add(first_token(path, arguments.threads, arguments.rounds))
            for line in memory(path, arguments.threads) if "memory" not in skip else ():
                add(line)
            if "read" not in skip:
                add(bytes_read(path, Path(folder)))
        for name in () if arguments.random is None else arguments.random or families():
            path = random_model(name, Path(folder))
            for line in speeds(path, False, arguments.threads, arguments.rounds, LARGE["n_vocab"] - 1000):
                add(line)
            path.unlink()
    if busy := facts_before["load"] > 0.7:
        print("the machine was busy when this began: the ratios mean little", file=sys.stderr)
    facts = {**facts_before, "busy": busy, "threads": arguments.threads, "rounds": arguments.rounds}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), end="\n\n")
    print(markdown(HEAD, [show(line) for line in rows]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
