"""Many prompts at once against llama.cpp: benchmarks/batch.py MODEL… [--batched-bench PATH].

Two figures for each model, mapped and repacked, both sides by turns in new processes, as median ratios over the rounds:

decode    32 sequences, 64 tokens each: `Model.generate`'s steps with all they do (choosing, text) beside
          llama-batched-bench, which decodes random tokens and chooses none; one stream a sequence on both sides
job       32 different prompts, 64 tokens each, from strings to strings: `Model.generate(list)` beside
          llama-cpp-python, one prompt after another (repacked only, as llama-cpp-python always is); each uses as many
          threads as it does by itself

llama-batched-bench is built from the archive that vendor/ggml/UPSTREAM.toml names, for the machine's own CPU:
cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama-batched-bench. Without it, or without
llama-cpp-python, its figure is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import environment, markdown

N_SEQ, N_PROMPT, N_NEW, N_CTX_SEQ = 32, 16, 64, 256
SUBJECTS = """sun moon river mountain ocean king queen forest city road house book song game war peace law painter
science mathematician physics music poem film cook wine baker car train ship garden winter"""
PROMPTS = [f"Write a short story about the {subject}. Once upon a time, the {subject}" for subject in SUBJECTS.split()]
AIMS = {"decode": "≥ 1.0", "job smollm2": "≥ 2.5", "job": "≥ 2.0"}


def our_decode(path: str, repack: bool, n_threads: int) -> float:
    """Return the tokens a second of all sequences together, after their first ones."""
    from ggufpy import Model, SamplingParams
    from ggufpy.engine import stream

    prompts = [[1000 + 37 * i + j for j in range(N_PROMPT)] for i in range(N_SEQ)]
    params = SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)
    options = {"n_ctx": N_SEQ * N_CTX_SEQ, "n_seq_max": N_SEQ, "n_threads": n_threads}
    with Model.load(path, repack=repack) as model, model.session(**options) as session:
        for _ in stream(session, model.tokenizer, prompts, SamplingParams(temperature=0, max_tokens=2)):
            pass
        session.clear()
        ends = [chunk.completion for step in stream(session, model.tokenizer, prompts, params) for _, chunk in step]
        timings = [completion.timings for completion in ends if completion]
        return N_SEQ * (N_NEW - 1) / max(t.decode_s for t in timings)


def their_decode(tool: str, path: str, repack: bool, n_threads: int) -> float:
    """Return what llama-batched-bench prints as S_TG."""
    command = [
        tool, "-m", path, "-c", str(N_SEQ * N_CTX_SEQ), "-b", "2048", "-ub", "512", "-npp", str(N_PROMPT),
        "-ntg", str(N_NEW), "-npl", str(N_SEQ), "-t", str(n_threads), "-tb", str(n_threads), "-fa", "on",
        "--no-kv-unified", "--output-format", "jsonl", "--repack" if repack else "--no-repack",
    ]  # fmt: skip
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    return float(json.loads(lines[0])["speed_tg"])


def our_job(path: str, repack: bool) -> float:
    """Return the new tokens a second of the whole job."""
    from ggufpy import Model

    with Model.load(path, repack=repack) as model:
        model.generate(PROMPTS[:1], max_tokens=2, temperature=0)
        start = time.perf_counter()
        answers = model.generate(PROMPTS, max_tokens=N_NEW, temperature=0, max_num_seqs=N_SEQ)
        return sum(answer.usage.completion_tokens for answer in answers) / (time.perf_counter() - start)


def their_job(path: str) -> float:
    """Return the same of llama-cpp-python, one prompt after another."""
    from llama_cpp import Llama

    llm = Llama(path, verbose=False)
    llm.create_completion(PROMPTS[0], max_tokens=2, temperature=0)
    start, n = time.perf_counter(), 0
    for prompt in PROMPTS:
        n += llm.create_completion(prompt, max_tokens=N_NEW, temperature=0)["usage"]["completion_tokens"]
    return n / (time.perf_counter() - start)


def in_new_process(*arguments: str) -> float:
    """Measure one side in a process of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def work(figure: str, side: str, path: str, repack: str, n_threads: str, tool: str) -> float:
    """Do what a worker is told to."""
    if figure == "decode":
        options = path, repack == "repacked", int(n_threads)
        return our_decode(*options) if side == "ggufpy" else their_decode(tool, *options)
    return our_job(path, True) if side == "ggufpy" else their_job(path)


def measure(figure: str, path: Path, weights: str, arguments: argparse.Namespace) -> Sequence[str]:
    """Measure both sides by turns, another one first in each round; return a line of the table."""
    pairs = []
    for index in range(arguments.rounds):
        found = {}
        for side in ("ggufpy", "llama.cpp") if index % 2 else ("llama.cpp", "ggufpy"):
            tool = str(arguments.batched_bench)
            found[side] = in_new_process(figure, side, str(path), weights, str(arguments.threads), tool)
        pairs.append((found["ggufpy"], found["llama.cpp"]))
        print(f"{figure}, {path.stem}, {weights}: {pairs[-1][0]:.1f} and {pairs[-1][1]:.1f}", file=sys.stderr)
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    aim = AIMS.get(f"{figure} {path.stem}", AIMS[figure])
    spread = f"{ratios[0]:.2f} – {ratios[-1]:.2f}"
    return (
        figure, path.stem, weights, f"{ours:.0f} tokens/s", f"{theirs:.0f} tokens/s",
        f"{statistics.median(ratios):.2f}", spread, aim,
    )  # fmt: skip


def main() -> None:
    """Measure every model given and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument("--batched-bench", type=Path, help="llama.cpp's llama-batched-bench")
    parser.add_argument("--rounds", type=int, default=5, help="pairs measured for each figure (5)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of both, in decode (all cores)"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(work(*json.loads(arguments.worker)))
        return
    rows = []
    for path in arguments.models:
        if arguments.batched_bench:
            rows += [measure("decode", path, weights, arguments) for weights in ("mapped", "repacked")]
        if importlib.util.find_spec("llama_cpp"):
            rows.append(measure("job", path, "repacked", arguments))
    print(", ".join(f"{name} {value}" for name, value in environment().items()), end="\n\n")
    head = ("figure", "model", "weights", "ggufpy", "llama.cpp", "ggufpy ÷ llama.cpp", "rounds", "aim")
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
