"""`ggufpy bench`: load time, prefill and decode speed and memory of one model, measured as llama-bench does it.

A prefill decodes `--n-prompt` random tokens into an empty context; a decode test takes `--n-gen` tokens one by one from
an empty context, the likeliest each time. Each is run once to warm up, then as often as `--repetitions` says.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufpy.cli.loading import find, load, open_session
from ggufpy.cli.terminal import Status, one_line, size, table

if TYPE_CHECKING:
    from ggufpy.session import Session

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of one test, one value for each repetition."""

    name: str
    tokens_per_s: list[float]

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        values = self.tokens_per_s
        return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}

    def row(self) -> tuple[str, ...]:
        """Return the figures for the table."""
        values = self.tokens_per_s
        return (self.name, *(f"{value:.1f}" for value in (statistics.median(values), min(values), max(values))))


def run(args: Namespace) -> int:
    """Measure a model and print the figures."""
    import ggufpy.model  # noqa: F401 (before the clock starts)

    path = find(args.model)
    started = perf_counter()
    model = load(path, args)
    loaded = perf_counter()
    with model, open_session(model, args, n_ctx=max(args.n_prompt, args.n_gen)) as session:
        session.decode([0])
        first = perf_counter()
        speeds = _measure(session, model.config.n_vocab, args)
        report = {
            "model": str(path),
            "architecture": model.config.architecture,
            "n_threads": session.n_threads,
            "n_threads_batch": session.n_threads_batch,
            "n_ctx": session.n_ctx,
            "flash_attn": session.options.flash_attn,
            "repack": getattr(args, "repack", False),
            "n_tensors": len(model.weights),
            "n_repacked": model.weights.n_repacked,
            "load_s": loaded - started,
            "first_decode_s": first - loaded,
            "tokens_per_s": {speed.name: speed.summary() for speed in speeds},
            "memory": _memory(),
        }
    print(json.dumps(report, indent=2) if args.json else _text(report, speeds))
    return 0


def _measure(session: Session, n_vocab: int, args: Namespace) -> list[Speed]:
    ids = np.random.default_rng(0).integers(0, n_vocab, args.n_prompt).tolist()

    def prefill() -> None:
        session.decode(ids)

    def decode() -> None:
        token = ids[0]
        for _ in range(args.n_gen):
            token = int(session.decode([token])[-1].argmax())

    tests = ((f"prefill {args.n_prompt}", prefill, args.n_prompt), (f"decode {args.n_gen}", decode, args.n_gen))
    return [Speed(name, _repeat(session, name, test, n, args.repetitions)) for name, test, n in tests]


def _repeat(session: Session, name: str, test: Callable[[], None], n_tokens: int, repetitions: int) -> list[float]:
    speeds = []
    with Status(name) as status:
        for i in range(repetitions + 1):
            status.what = f"{name}, {f'{i} of {repetitions}' if i else 'warming up'}"
            session.clear()
            started = perf_counter()
            test()
            speeds.append(n_tokens / (perf_counter() - started))
    return speeds[1:]


def _text(report: dict[str, Any], speeds: list[Speed]) -> str:
    threads = f"{report['n_threads']} thread{'s' if report['n_threads'] > 1 else ''}"
    if report["n_threads_batch"] != report["n_threads"]:
        threads += f" ({report['n_threads_batch']} for prefill)"
    attention = "flash attention" if report["flash_attn"] else "no flash attention"
    packed = f"{report['n_repacked']} of {report['n_tensors']} tensors repacked"
    weights = packed if report["repack"] else "mapped weights"
    lines = [f"{one_line(report['model'])} ({one_line(report['architecture'])}), {threads}, {attention}, {weights}", ""]
    lines += [
        table([("tokens a second", "median", "min", "max"), *(speed.row() for speed in speeds)], right=(1, 2, 3)),
        "",
    ]
    times = [("load", f"{report['load_s']:.3f} s"), ("first decode", f"{report['first_decode_s']:.3f} s")]
    lines.append(table(times + [(f"memory, {name}", size(n)) for name, n in report["memory"].items()], right=(1,)))
    return "\n".join(lines)


def _memory() -> dict[str, int]:
    """Return bytes of memory: the peak and, where the system tells them apart, our own and that of mapped files."""
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    found = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if sys.platform == "linux":
        with Path("/proc/self/status").open(encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        found |= {
            "own": int(fields["RssAnon"].split()[0]) * 1024,
            "mapped files": int(fields["RssFile"].split()[0]) * 1024,
        }
    return found
