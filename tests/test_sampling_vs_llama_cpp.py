"""Every sampler and the whole chain beside llama.cpp's own, through llama-cpp-python, on the same rows and seeds.

Rows have no two equal logits: which of equals comes first is left open by std::sort.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufpy.sampling import (
    Candidates,
    Sampler,
    SamplingParams,
    candidates,
    dry,
    dynamic_temperature,
    min_p,
    penalties,
    sequence_breakers,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical_p,
    xtc,
)
from ggufpy.tokenizer import Tokenizer

pytest.importorskip("llama_cpp")

from helpers.llama_samplers import LlamaChain, bias, breakers
from helpers.llama_vocabulary import LlamaVocabulary

SIZES = (1, 2, 7, 60, 500, 1500, 5000, 20_000)
Vocabularies = tuple[LlamaVocabulary, Tokenizer]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Vocabularies]:
    theirs = LlamaVocabulary(smollm2_path)
    yield theirs, Tokenizer.from_file(smollm2_path)
    theirs.close()


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Iterator[Vocabularies]:
    theirs = LlamaVocabulary(gemma3_path)
    yield theirs, Tokenizer.from_file(gemma3_path)
    theirs.close()


def distinct_row(n: int, seed: int, scale: float) -> np.ndarray:
    """n random logits, no two equal."""
    state = np.random.RandomState(seed)
    values = np.unique(state.randn(n + n // 8 + 16).astype(np.float32) * np.float32(scale))
    return state.permutation(values)[:n]


# --------------------------------------------------------------------------------------------- one by one


def share(rng: random.Random) -> float:
    return rng.choice([0.0, 0.01, 0.1, 0.5, 0.9, 0.99, rng.random(), rng.random()])


Filter = tuple[Callable[..., Candidates], Callable[[random.Random], Any], Callable[..., tuple[Any, ...]]]
FILTERS: dict[str, Filter] = {  # ours, the arguments after the candidates, theirs with these
    "top_k": (top_k, lambda rng: [rng.choice([0, 1, 40, 128, 129, 1000])], lambda k: ("top_k", k)),
    "top_p": (top_p, lambda rng: [share(rng)], lambda p: ("top_p", p, 0)),
    "min_p": (min_p, lambda rng: [share(rng)], lambda p: ("min_p", p, 0)),
    "top_n_sigma": (top_n_sigma, lambda rng: [rng.uniform(-1, 4)], lambda n: ("top_n_sigma", n)),
    "xtc": (xtc, lambda rng: [rng.uniform(0, 0.5)], lambda threshold: ("xtc", 1.0, threshold, 0, 7)),
    "temperature": (temperature, lambda rng: [rng.choice([0, -1, 0.1, 1.5, rng.random()])], lambda t: ("temp", t)),
    "dynamic_temperature": (
        dynamic_temperature,
        lambda rng: [rng.uniform(0, 2), rng.uniform(0.01, 2), rng.uniform(0, 3)],
        lambda t, spread, exponent: ("temp_ext", t, spread, exponent),
    ),
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_gives_llama_cpps_candidates(name: str, ordered: bool) -> None:
    """The same ids in the same order with the same logits, to the last bit, in 160 rows each."""
    ours, draw, theirs = FILTERS[name]
    for seed in range(160):
        rng = random.Random(seed)
        logits = distinct_row(rng.choice(SIZES), seed, rng.choice([0.3, 1, 3, 6]))
        arguments = draw(rng)
        before = [("top_k", logits.size)] if ordered else []
        with LlamaChain(*before, theirs(*arguments)) as chain:
            ids, values, _ = chain.apply(logits)
        c = candidates(logits)
        found = ours(top_k(c, logits.size) if ordered else c, *arguments)
        assert ids == found.ids.tolist(), f"seed {seed}"
        assert np.array_equal(values, found.logits), f"seed {seed}"


@pytest.mark.parametrize("ordered", [False, True])
def test_the_last_bits_of_logarithms_and_exponentials_are_llama_cpps(ordered: bool) -> None:
    """Rows at a boundary: a logit at the floor of min_p, shares that just reach top_p, sums of squares, an entropy."""
    wide = (np.random.RandomState(0).randn(4, 2000) * 3).astype(np.float32)
    cases = [("min_p", [share], [0.0, *near(math.log(share)), -30.0]) for share in (0.824, 0.889, 0.915, 0.975, 0.981)]
    cases += [("top_p", [p], [0.0, -1.5331116914749146]) for p in near(0.8224611878395081)]
    cases += [("top_n_sigma", [n], row) for row in wide for n in near(4.613572120666504, 40)]
    cases += [("dynamic_temperature", [1.0, 1.0, 1.0], [2.831228733062744, -2.1705727577209473, -1.2326160669326782])]
    for name, arguments, logits in cases:
        ours, _, theirs = FILTERS[name]
        row = np.array(logits, np.float32)
        with LlamaChain(*[("top_k", row.size)] * ordered, theirs(*arguments)) as chain:
            ids, expected, _ = chain.apply(row)
        c = candidates(row)
        found = ours(top_k(c, row.size) if ordered else c, *arguments)
        assert (sorted(ids), sorted(expected)) == (sorted(found.ids.tolist()), sorted(found.logits)), (name, arguments)


def test_a_surprise_at_mirostats_bound_is_llama_cpps() -> None:
    """Two tokens, of which the second is kept or not: its surprise is not the float nearest to it."""
    row = np.array([0.0, -0.2313999980688095], np.float32)
    for mu, seed in itertools.product(near(1.176554560661316), range(8)):
        p = SamplingParams(mirostat=2, mirostat_tau=mu / 2, temperature=1, seed=seed)
        with LlamaChain(*their_chain(p, row.size, None)) as chain:
            assert chain.choose(row) == Sampler(p, row.size).sample(row), (mu, seed)


def near(value: float, n: int = 4) -> list[float]:
    """Return a number in single precision and its nearest neighbours."""
    bits = np.float32(value).view(np.int32) + np.arange(-n, n + 1, dtype=np.int32)
    return [float(x) for x in bits.view(np.float32)]


def test_typical_p_keeps_llama_cpps_candidates() -> None:
    """The same ids; in the same order where the scores differ: near the mean many probabilities are equal floats."""
    for seed in range(160):
        rng = random.Random(seed)
        n = rng.choice(SIZES[:-1])
        logits, p = distinct_row(n, seed, rng.choice([0.3, 1, 3, 6])), share(rng)
        with LlamaChain(("typical", p, 0)) as chain:
            ids, values, _ = chain.apply(logits)
        found = typical_p(candidates(logits), p)
        if n <= 500:
            assert ids == found.ids.tolist(), f"seed {seed}"
        assert len(ids) == found.ids.size, f"seed {seed}"
        assert np.allclose(values, found.logits, atol=1e-2) or set(ids) == set(found.ids.tolist()), f"seed {seed}"


def test_penalties_give_llama_cpps_logits() -> None:
    """To the last bit, whatever the three penalties and the window."""
    for seed in range(160):
        rng = random.Random(seed)
        logits = distinct_row(rng.choice(SIZES), seed, 3)
        history = [rng.randrange(min(50, logits.size)) for _ in range(rng.randrange(1, 150))]
        three = (
            rng.choice([1.0, 0.8, 1.3]),
            rng.choice([0.0, rng.uniform(-1, 2)]),
            rng.choice([0.0, rng.uniform(-1, 2)]),
        )
        last = rng.choice([1, 5, 64, 1000])
        with LlamaChain(("penalties", logits.size, last, *three)) as chain:
            chain.accept(history)
            _, values, _ = chain.apply(logits)
        assert np.array_equal(values, penalties(logits, history[-last:], *three)), f"seed {seed}"


TEXT = (
    'The cat sat on the mat: "hello", she said.\nThe cat sat on the mat: "hello", he said.\nCafé 😀😀 — the cat sat on'
)
BREAKERS = [("\n", ":", '"', "*"), ("the cat", "é", "😀", " she said", "said.\nThe"), ("x" * 50,), ()]


@pytest.mark.parametrize("strings", BREAKERS, ids=["default", "long", "cut", "none"])
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_dry_gives_llama_cpps_logits(model: str, strings: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    """To the last bit, with breakers found in a byte-level and in a SentencePiece vocabulary."""
    theirs, tokenizer = request.getfixturevalue(model)
    found = sequence_breakers(tokenizer, strings)
    text = tokenizer.encode(TEXT)
    changed = 0
    for seed in range(24 if model == "smollm2" else 8):  # a sampler of llama.cpp reads the whole vocabulary
        rng = random.Random(seed)
        history = list(text)
        for _ in range(3):
            start = rng.randrange(len(history))
            history += history[start : start + rng.randrange(12)]
        settings = rng.uniform(0.1, 3), rng.uniform(1, 2), rng.choice([0, 1, 2, 4])
        last, logits = rng.choice([5, 20, 64, 1000]), np.zeros(tokenizer.n_vocab, np.float32)
        with LlamaChain(("dry", theirs._vocab, *settings, last, *breakers(strings))) as chain:
            chain.accept(history)
            _, values, _ = chain.apply(logits)
        assert np.array_equal(values, dry(logits, history[-last:], *settings, found)), f"seed {seed}"
        changed += bool(values.any())
    assert changed


# ------------------------------------------------------------------------------------------------ the chain


def their_chain(p: SamplingParams, n: int, vocab: Any) -> list[tuple[Any, ...]]:
    """List llama.cpp's chain for the parameters, as its common_sampler_init puts it together."""
    biases = {**dict(p.logit_bias), **dict.fromkeys(p.banned_token_ids, -np.inf)}
    head = [("logit_bias", n, *bias(biases))]
    if p.mirostat == 1:
        return [*head, ("temp", p.temperature), ("mirostat", n, p.seed, p.mirostat_tau, p.mirostat_eta, 100)]
    if p.mirostat == 2:
        return [*head, ("temp", p.temperature), ("mirostat_v2", p.seed, p.mirostat_tau, p.mirostat_eta)]
    return [
        *head,
        ("penalties", n, p.repeat_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty),
        ("dry", vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n,
         *breakers(p.dry_sequence_breakers)),
        ("top_n_sigma", p.top_n_sigma),
        ("top_k", p.top_k),
        ("typical", p.typical_p, 0),
        ("top_p", p.top_p, 0),
        ("min_p", p.min_p, 0),
        ("xtc", p.xtc_probability, p.xtc_threshold, 0, p.seed),
        ("temp_ext", p.temperature, p.dynatemp_range, p.dynatemp_exponent),
        ("dist", p.seed) if p.adaptive_target < 0 else ("adaptive_p", p.adaptive_target, p.adaptive_decay, p.seed),
    ]  # fmt: skip


def random_params(rng: random.Random, n: int) -> SamplingParams:
    """Draw parameters. typical_p stands alone: beside a logit of -inf llama.cpp's entropy is NaN."""
    ranges: dict[str, tuple[float, Callable[[], Any]]] = {
        "temperature": (0.7, lambda: rng.choice([0, 0.1, 0.5, 1.0, 1.5, rng.uniform(0, 2)])),
        "dynatemp_range": (0.3, rng.random),
        "dynatemp_exponent": (0.3, lambda: rng.uniform(0, 3)),
        "top_k": (0.6, lambda: rng.choice([0, 1, 5, 40, 200, 1000])),
        "top_p": (0.6, lambda: rng.choice([1.0, 0.5, 0.9, rng.random()])),
        "min_p": (0.6, lambda: rng.choice([0.0, 0.01, 0.2, rng.random()])),
        "xtc_probability": (0.25, lambda: rng.choice([0.5, 1.0])),
        "xtc_threshold": (0.5, lambda: rng.uniform(0, 0.5)),
        "repeat_penalty": (0.4, lambda: rng.choice([1.1, 1.5, 0.9])),
        "frequency_penalty": (0.3, rng.random),
        "presence_penalty": (0.3, lambda: rng.uniform(-0.2, 0.8)),
        "repeat_last_n": (0.5, lambda: rng.choice([0, 5, 64, 300])),
        "dry_multiplier": (0.4, lambda: rng.uniform(0, 2)),
        "dry_base": (0.4, lambda: rng.uniform(1, 2)),
        "dry_allowed_length": (0.4, lambda: rng.randrange(4)),
        "dry_penalty_last_n": (0.4, lambda: rng.choice([0, 3, 64, 1000])),
        "adaptive_target": (0.3, rng.random),
        "adaptive_decay": (0.3, lambda: rng.uniform(0, 0.99)),
        "mirostat": (0.25, lambda: rng.choice([1, 2])),
        "mirostat_tau": (0.5, lambda: rng.uniform(0, 5)),
        "mirostat_eta": (0.5, lambda: rng.uniform(0, 0.2)),
    }
    settings = {name: draw() for name, (chance, draw) in ranges.items() if rng.random() < chance}
    biases = {rng.randrange(n): rng.gauss(0, 3) for _ in range(3)} if rng.random() < 0.3 else {}
    banned: list[int] = []
    if rng.random() < 0.3:
        settings["typical_p"] = rng.random()
    else:
        settings["top_n_sigma"] = rng.choice([-1, rng.uniform(0, 3)])
        banned = [rng.randrange(n) for _ in range(rng.choice([0, 0, 3]))]
    return SamplingParams(**settings, logit_bias=biases, banned_token_ids=banned, seed=rng.randrange(2**32 - 1))


@pytest.mark.parametrize("part", range(6))
def test_a_seed_picks_what_llama_cpp_picks(part: int, smollm2: Vocabularies) -> None:
    """50 times: random parameters, history and seed, and 12 rows one after another: the same tokens."""
    theirs, tokenizer = smollm2
    for seed in range(50 * part, 50 * part + 50):
        rng = random.Random(seed)
        n = rng.choice([50, 500, 5000, 20_000, tokenizer.n_vocab])
        p = random_params(rng, n)
        few = [rng.randrange(min(n, 60)) for _ in range(rng.choice([3, 7, 400]))]
        history = [rng.choice(few) for _ in range(rng.randrange(1, 200))]
        start = rng.randrange(len(history))
        history += history[start : start + 8]
        ours = Sampler(p, n, breakers=sequence_breakers(tokenizer, p.dry_sequence_breakers))
        with LlamaChain(*their_chain(p, n, theirs._vocab)) as chain:
            chain.accept(history)
            for step in range(12):
                logits = distinct_row(n, 100 * seed + step, rng.choice([0.5, 1, 3, 5]))
                expected = chain.choose(logits)
                assert expected == ours.sample(logits, history), f"seed {seed}, step {step}: {p}"
                history.append(expected)


@pytest.mark.parametrize("settings", [{}, {"top_k": 0}, {"mirostat": 2}, {"top_n_sigma": 1.5}, {"temperature": 0}])
def test_on_a_large_vocabulary_too(settings: dict[str, Any]) -> None:
    """Rows of 262,144 logits."""
    p, n = SamplingParams(**settings, seed=99), 262_144
    ours = Sampler(p, n)
    with LlamaChain(*their_chain(p, n, None)) as chain:
        for step in range(6):
            logits = distinct_row(n, step, 3)
            assert chain.choose(logits) == ours.sample(logits)
