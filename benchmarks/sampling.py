"""Choosing a token, ggufpy beside llama.cpp, in one process: `python benchmarks/sampling.py [--n-vocab N] [--json]`.

Random rows of one vocabulary's size, and the same chain on both sides, by turns. Before each call 64 MB are read, as a
model's weights are between two tokens, and the row is written; `--warm` leaves out the reading. llama.cpp works on an
array of tokens, which llama_sampler_sample fills from the row; here that is one copy of bytes, which takes no longer.
Medians; the control is llama.cpp's chain measured twice. Needs llama-cpp-python beside ggufpy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from harness import environment, markdown

from ggufpy.sampling import Sampler, SamplingParams

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # a draw from all tokens
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {},
    "nothing cut": PLAIN,
    "top_k 1000": {**PLAIN, "top_k": 1000},
    "top_p 0.95 alone": {**PLAIN, "top_p": 0.95},
    "min_p 0.05 alone": {**PLAIN, "min_p": 0.05},
    "typical_p 0.9 alone": {**PLAIN, "typical_p": 0.9},
    "top_n_sigma 2 alone": {**PLAIN, "top_n_sigma": 2.0},
    "xtc alone": {**PLAIN, "xtc_probability": 1.0},
    "dynamic temperature alone": {**PLAIN, "dynatemp_range": 0.5},
    "adaptive_p alone": {**PLAIN, "adaptive_target": 0.3},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "default + typical_p": {"typical_p": 0.9},
    "default + top_n_sigma": {"top_n_sigma": 2.0},
    "default + xtc": {"xtc_probability": 1.0},
    "default + dynamic temperature": {"dynatemp_range": 0.5},
    "default + adaptive_p": {"adaptive_target": 0.3},
    "default + penalties": {"repeat_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "default + DRY": {"dry_multiplier": 0.8},
    "default + logit_bias": {"logit_bias": dict.fromkeys(range(0, 1000, 10), -1.0)},
}
HISTORY = [(i * i) % 997 for i in range(400)] + list(range(30)) + list(range(30))


class Theirs:
    """llama.cpp's chain for the same parameters."""

    def __init__(self, p: SamplingParams, n_vocab: int) -> None:
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for name, *arguments in self._samplers(p, n_vocab):
            sampler = getattr(llama_cpp, f"llama_sampler_init_{name}")(*arguments)
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        for token in HISTORY:
            llama_cpp.llama_sampler_accept(self._chain, token)
        self._data = (llama_cpp.llama_token_data * n_vocab)()

    @staticmethod
    def _samplers(p: SamplingParams, n_vocab: int) -> list[tuple[Any, ...]]:
        if p.greedy:
            return [("greedy",)]
        if p.mirostat == 1:
            return [("temp", p.temperature), ("mirostat", n_vocab, p.seed, p.mirostat_tau, p.mirostat_eta, 100)]
        if p.mirostat == 2:
            return [("temp", p.temperature), ("mirostat_v2", p.seed, p.mirostat_tau, p.mirostat_eta)]
        biases = dict(p.logit_bias)
        array = (llama_cpp.llama_logit_bias * max(1, len(biases)))(*biases.items())
        vocab = ctypes.cast(ctypes.create_string_buffer(8), ctypes.c_void_p)  # not read where there are no breakers
        return [
            *([("logit_bias", n_vocab, len(biases), array)] if biases else []),
            ("penalties", n_vocab, p.repeat_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty),
            ("dry", vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n, None, 0),
            ("top_n_sigma", p.top_n_sigma),
            ("top_k", p.top_k),
            ("typical", p.typical_p, 0),
            ("top_p", p.top_p, 0),
            ("min_p", p.min_p, 0),
            ("xtc", p.xtc_probability, p.xtc_threshold, 0, p.seed),
            ("temp_ext", p.temperature, p.dynatemp_range, p.dynatemp_exponent),
            ("dist", p.seed) if p.adaptive_target < 0 else ("adaptive_p", p.adaptive_target, p.adaptive_decay, p.seed),
        ]

    def sample(self, tokens: np.ndarray) -> int:
        """Choose from the tokens of a row."""
        ctypes.memmove(self._data, tokens.ctypes.data, tokens.nbytes)
        array = llama_cpp.llama_token_data_array(data=self._data, size=len(self._data), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        return array.data[array.selected].id

    def close(self) -> None:
        """Free it."""
        llama_cpp.llama_sampler_free(self._chain)


def compare(settings: dict[str, Any], rows: list[np.ndarray], rounds: int, weights: np.ndarray) -> dict[str, float]:
    """Return medians in milliseconds, the median of the ratios theirs / ours, and the control's."""
    p = SamplingParams(**settings, seed=1)
    n_vocab = rows[0].size
    theirs, again, ours = Theirs(p, n_vocab), Theirs(p, n_vocab), Sampler(p, n_vocab, breakers={})
    sides = [lambda row: ours.sample(row, HISTORY), theirs.sample, again.sample]
    given = [np.empty_like(rows[0]), np.empty(3 * n_vocab, np.float32), np.empty(3 * n_vocab, np.float32)]
    seconds: list[list[float]] = [[], [], []]
    for index in range(rounds + 2):
        row = rows[index % len(rows)]
        tokens = np.zeros((n_vocab, 3), np.float32)  # what llama.cpp calls llama_token_data: id, logit, p
        tokens.view(np.int32)[:, 0], tokens[:, 1] = np.arange(n_vocab), row
        tokens = tokens.ravel()
        for turn in range(3):
            side = (index + turn) % 3
            weights.sum()
            np.copyto(given[side], tokens if side else row)
            start = perf_counter()
            sides[side](given[side])
            seconds[side].append(perf_counter() - start)
    theirs.close()
    again.close()
    mine, other, control = (times[2:] for times in seconds)  # the first two warm up
    return {
        "ours_ms": 1000 * statistics.median(mine),
        "llama_cpp_ms": 1000 * statistics.median(other),
        "ratio": statistics.median(b / a for a, b in zip(mine, other, strict=True)),
        "control": statistics.median(b / a for a, b in zip(control, other, strict=True)),
    }


def main() -> None:
    """Measure every chain and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n-vocab", type=int, default=262_144)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [(np.random.RandomState(i).randn(args.n_vocab) * 3).astype(np.float32) for i in range(8)]
    weights = np.ones(0 if args.warm else 1 << 24, np.float32)
    found = {name: compare(settings, rows, args.rounds, weights) for name, settings in CHAINS.items()}
    if args.json:
        print(json.dumps({"n_vocab": args.n_vocab, "rounds": args.rounds, **environment(), "chains": found}, indent=1))
        return
    print(
        markdown(
            [f"{args.n_vocab:,} tokens", "ggufpy, ms", "llama.cpp, ms", "times as quick", "control"],
            [
                [
                    name,
                    *(f"{r[key]:.3f}" for key in ("ours_ms", "llama_cpp_ms")),
                    f"{r['ratio']:.2f}",
                    f"{r['control']:.2f}",
                ]
                for name, r in found.items()
            ],
        )
    )


if __name__ == "__main__":
    main()
