"""Sampling parameters, the functions on a row of logits, and the chain: llama.cpp's vectors, edges, broken rows."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from ggufpy.errors import GgufpyError, SamplingError
from ggufpy.sampling import (
    Candidates,
    Random,
    Sampler,
    SamplingParams,
    best_token,
    candidates,
    draw,
    min_p,
    probabilities,
    repeat_penalty,
    temperature,
    token_logprob,
    top_k,
    top_p,
)

ALL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # a chain that cuts nothing
SHARES = [0.1, 0.2, 0.3, 0.4]


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def shares(c: Candidates) -> dict[int, float]:
    return dict(zip(c.ids.tolist(), probabilities(c).tolist(), strict=True))


def random_row(n: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.RandomState(seed).randn(n) * scale).astype(np.float32)


# ------------------------------------------------------------------------------------------------- parameters


def test_defaults_are_llama_cpps() -> None:
    """A plain SamplingParams samples as llama.cpp's command line does."""
    p = SamplingParams()
    assert (0.8, 40, 0.95, 0.05) == (p.temperature, p.top_k, p.top_p, p.min_p)
    assert (1.0, 0.0, 0.0, 64) == (p.repeat_penalty, p.frequency_penalty, p.presence_penalty, p.repeat_last_n)
    assert (0.0, 1.0, 1.0, -1.0, 0.0, 0.1) == (
        p.dynatemp_range, p.dynatemp_exponent, p.typical_p, p.top_n_sigma, p.xtc_probability, p.xtc_threshold,
    )  # fmt: skip
    assert (0.0, 1.75, 2, 64) == (p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n)
    assert ("\n", ":", '"', "*") == p.dry_sequence_breakers
    assert (0, 5.0, 0.1, -1.0, 0.9) == (p.mirostat, p.mirostat_tau, p.mirostat_eta, p.adaptive_target, p.adaptive_decay)
    assert ((), (), (), 0, 1, False, None) == (
        p.logit_bias, p.banned_token_ids, p.logits_processors, p.min_tokens, p.n, p.include_stop, p.prompt_logprobs,
    )  # fmt: skip
    assert (None, None, (), (), False, None) == (
        p.seed, p.max_tokens, p.stop, p.stop_token_ids, p.ignore_eos, p.logprobs,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan), ("temperature", math.inf), ("temperature", -math.inf), ("temperature", True),
        ("temperature", "0.8"), ("temperature", None), ("temperature", 1e39), ("temperature", 1 + 0j),
        ("top_k", -2), ("top_k", 40.0), ("top_k", True), ("top_k", None), ("top_k", 2**31),
        ("top_p", 1.01), ("top_p", -0.1), ("top_p", math.nan), ("top_p", False),
        ("min_p", 1.05), ("min_p", -0.1), ("min_p", math.nan),
        ("repeat_penalty", 0), ("repeat_penalty", -1.1), ("repeat_penalty", math.nan), ("repeat_penalty", math.inf),
        ("repeat_last_n", -2), ("repeat_last_n", 1.5),
        ("seed", -1), ("seed", 2**32), ("seed", True), ("seed", 1.0), ("seed", "7"),
        ("max_tokens", -1), ("max_tokens", 1.0), ("max_tokens", True), ("max_tokens", math.nan),
        ("stop", ""), ("stop", ["a", ""]), ("stop", b"x"), ("stop", [b"x"]), ("stop", 3), ("stop", [None]),
        ("stop", None), ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", "12"),
        ("stop_token_ids", 5), ("stop_token_ids", None),
        ("ignore_eos", 1), ("ignore_eos", None), ("logprobs", -1), ("logprobs", True),
        ("temperature", 10**400), ("top_p", Fraction(10**400)), ("top_k", np.array([1, 2])), ("top_k", np.array(0.5)),
        ("seed", int), ("stop", np.array(3)), ("stop", range(2**40)), ("stop_token_ids", np.array(3)),
        ("dynatemp_range", -0.1), ("dynatemp_range", math.inf), ("dynatemp_exponent", -1), ("typical_p", 1.1),
        ("typical_p", math.nan), ("top_n_sigma", -1.5), ("top_n_sigma", math.inf), ("xtc_probability", -0.1),
        ("xtc_probability", 1.1), ("xtc_threshold", 2), ("frequency_penalty", math.inf), ("frequency_penalty", "1"),
        ("presence_penalty", math.nan), ("dry_multiplier", -1), ("dry_base", 0.5), ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2), ("dry_sequence_breakers", ""), ("dry_sequence_breakers", [1]), ("mirostat", 3),
        ("mirostat", True), ("mirostat_tau", -1), ("mirostat_eta", math.nan), ("adaptive_target", 1.1),
        ("adaptive_target", -1.1), ("adaptive_decay", 0.991), ("adaptive_decay", -0.1),
        ("logit_bias", {1.5: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}), ("logit_bias", 5),
        ("logit_bias", {1: math.inf}), ("logit_bias", {1: "a"}), ("logit_bias", [1, 2]), ("logit_bias", [(1, 2, 3)]),
        ("logit_bias", [(1, 2.0), (1, 3.0)]), ("logit_bias", None), ("banned_token_ids", [-1]),
        ("banned_token_ids", 3), ("min_tokens", -1), ("min_tokens", None), ("n", 0), ("n", None), ("n", 1.0),
        ("include_stop", 1), ("prompt_logprobs", -1), ("prompt_logprobs", False), ("logits_processors", [3]),
        ("logits_processors", len), ("logits_processors", None),
    ],
)  # fmt: skip
def test_a_bad_value_is_an_error_that_names_the_parameter(name: str, value: object) -> None:
    """Nothing out of range, of the wrong type or NaN gets through, and the message says which parameter it was."""
    with pytest.raises(SamplingError, match=rf"^{name}\b") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GgufpyError)


@pytest.mark.parametrize("name", ["temperature", "top_k", "stop", "stop_token_ids", "ignore_eos"])
def test_what_is_found_is_shown_in_short(name: str) -> None:
    """A whole text given in the wrong place does not fill the screen."""
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{name: [b"x" * 10000]})
    assert len(str(caught.value)) < 200


def test_min_tokens_above_max_tokens_is_an_error() -> None:
    """An answer cannot be longer than it may be."""
    with pytest.raises(SamplingError, match=r"^min_tokens: expected at most max_tokens, 3, got 4$"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert 3 == SamplingParams(min_tokens=3, max_tokens=3).min_tokens


def test_an_unknown_name_is_refused_when_made_and_when_changed() -> None:
    """A misspelt parameter is never swallowed."""
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        dataclasses.replace(SamplingParams(), temprature=0.5)  # type: ignore[call-arg]


def test_values_are_stored_as_plain_types() -> None:
    """NumPy numbers are accepted, one stop string is a list of one, and the result is hashable and frozen."""
    p = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop="x", stop_token_ids=[np.int32(7)], seed=0, max_tokens=0,
    )  # fmt: skip
    assert (0.5, 3, ("x",), (7,), 0, 0) == (p.temperature, p.top_k, p.stop, p.stop_token_ids, p.seed, p.max_tokens)
    assert [float, int, int] == [type(p.temperature), type(p.top_k), type(p.stop_token_ids[0])]
    p = dataclasses.replace(p, logit_bias={np.int64(3): np.float32(0.5), 4: -np.inf}, logits_processors=[max])
    assert (((3, 0.5), (4, -np.inf)), (max,)) == (p.logit_bias, p.logits_processors)
    assert p == dataclasses.replace(p)
    assert hash(p) == hash(dataclasses.replace(p))
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.top_k = 5  # type: ignore[misc]


def test_a_generator_of_stop_strings_is_read_once() -> None:
    """Any iterable of strings will do, and what was given can be read again."""
    p = SamplingParams(stop=(s for s in ("a", "b")))  # type: ignore[arg-type]
    assert ("a", "b") == tuple(p.stop) == tuple(p.stop)


# -------------------------------------------------------------------------------- llama.cpp's own test vectors


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (0, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        (-1, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        (1, {3: 1.0}),
        (3, {3: 0.44444, 2: 0.33333, 1: 0.22222}),
        (4, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        (10, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
    ],
)
def test_top_k_vectors(k: int, expected: dict[int, float]) -> None:
    """top_k keeps those tokens in that order (llama.cpp tests/test-sampling.cpp)."""
    kept = shares(top_k(candidates(np.log(row(*SHARES))), k))
    assert list(expected) == list(kept)
    assert pytest.approx(expected, abs=1e-5) == kept


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, {3: 1.0}),
        (0.7, {3: 0.571429, 2: 0.428571}),
        (0.8, {3: 0.44444, 2: 0.33333, 1: 0.22222}),
        (1.0, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
    ],
)
def test_top_p_vectors(p: float, expected: dict[int, float], ordered: bool) -> None:
    """top_p keeps those tokens, whether top_k has put them in order before or not."""
    c = candidates(np.log(row(*SHARES)))
    assert pytest.approx(expected, abs=1e-5) == shares(top_p(top_k(c, 4) if ordered else c, p))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        (0.24, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        (0.26, {1: 0.222222, 2: 0.333333, 3: 0.444444}),
        (0.49, {1: 0.222222, 2: 0.333333, 3: 0.444444}),
        (0.51, {2: 0.428571, 3: 0.571429}),
        (0.74, {2: 0.428571, 3: 0.571429}),
        (0.76, {3: 1.0}),
        (1.0, {3: 1.0}),
        (1.05, {3: 1.0}),
    ],
)
def test_min_p_vectors(p: float, expected: dict[int, float], ordered: bool) -> None:
    """min_p keeps those tokens, and one at least."""
    c = candidates(np.log(row(*SHARES)))
    assert pytest.approx(expected, abs=1e-5) == shares(min_p(top_k(c, 4) if ordered else c, p))


def test_repeat_penalty_vectors() -> None:
    """Every token seen is penalised once, however often it was seen; the row given stays as it was."""
    logits = np.log(row(0.2, 0.2, 0.2, 0.2, 0.2))
    for history, expected in [
        ([0], {0: 0.0, 1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}),
        ([0, 1, 2], {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.5, 4: 0.5}),
        ([0, 1, 2, 0, 0], {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.5, 4: 0.5}),
    ]:
        assert pytest.approx(expected, abs=1e-5) == shares(candidates(repeat_penalty(logits, history, 50.0)))
    assert np.array_equal(np.log(row(0.2, 0.2, 0.2, 0.2, 0.2)), logits)


def test_repeat_penalty_lowers_positive_and_negative_logits() -> None:
    """A positive logit is divided, one of 0 or less multiplied, an id past the row ignored."""
    assert np.array_equal(row(1, -4, 0, 3), repeat_penalty(row(2, -2, 0, 3), [0, 1, 2, 1, 99], 2.0))


def test_temperature_divides() -> None:
    """Temperature 2 halves the logits; one so small that the quotient overflows leaves only the best."""
    assert np.array_equal(row(0.5, 1, 1.5), temperature(candidates(row(1, 2, 3)), 2.0).logits)
    assert {0: 0.5, 1: 0.5, 2: 0.0} == shares(temperature(candidates(row(30, 30, 29)), 1e-38))


def test_shares_too_small_or_too_near_to_one_for_float32_cut_nothing() -> None:
    """As in llama.cpp, whose parameters are floats."""
    c = candidates(np.log(row(*SHARES)))
    assert c is min_p(c, 1e-60)
    assert c is top_p(c, 1 - 1e-12)


# ------------------------------------------------------------------------------------------------ long rows


@pytest.mark.parametrize("n", [1, 2, 1000, 4096, 5001, 49152])
@pytest.mark.parametrize("k", [1, 40, 300, 100_000])
def test_top_k_of_a_long_row_equals_a_stable_sort(n: int, k: int) -> None:
    """The shortcut for long rows finds exactly the k largest, equal ones by id, and what is impossible last."""
    logits = np.round(random_row(n, seed=n), 1)  # rounded: many equal values
    logits[:: max(2, n // 3)] = -np.inf
    logits[5::7], logits[6::7] = 0.0, -0.0  # which are equal
    expected = np.argsort(-logits, kind="stable")[:k].tolist()
    kept = top_k(candidates(logits), k)
    assert expected == kept.ids.tolist()
    assert np.array_equal(logits[expected], kept.logits)


@pytest.mark.parametrize("order", [1, -1])
def test_top_k_of_a_row_in_order(order: int) -> None:
    """Neither a row that rises, where each value displaces another, nor one that falls is a special case."""
    logits = np.sort(random_row(5000, seed=3))[::order]  # a view with steps backwards, for one
    for k in (1, 31, 1024, 1025):
        assert np.argsort(-logits, kind="stable")[:k].tolist() == top_k(candidates(logits), k).ids.tolist()


@pytest.mark.parametrize("possible", [0, 3, 40, 41, 6000])
def test_top_k_of_a_row_of_few_possible_tokens(possible: int) -> None:
    """Where fewer than k tokens are possible, impossible ones fill up to k, as in llama.cpp, lowest id first."""
    logits = np.full(9000, -np.inf, np.float32)
    logits[np.random.RandomState(0).permutation(9000)[:possible]] = random_row(possible, seed=possible)
    assert np.argsort(-logits, kind="stable")[:40].tolist() == top_k(candidates(logits), 40).ids.tolist()


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 9.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.95, 0.9999])
def test_top_p_of_a_long_row_equals_the_definition(scale: float, p: float) -> None:
    """The shortcut for long rows keeps as many tokens as a sort of the whole row would."""
    logits = random_row(5000, seed=1, scale=scale)
    order = np.argsort(-logits, kind="stable")
    reached = np.cumsum(probabilities(candidates(logits))[order]) >= np.float32(p)
    expected = order[: int(reached.argmax()) + 1] if reached.any() else order
    assert expected.tolist() == top_p(candidates(logits), p).ids.tolist()


def test_log_probabilities_are_those_of_the_whole_row() -> None:
    """The chosen token's log-probability and the likeliest ones come from the softmax over all logits, in nats."""
    logits = random_row(3000, seed=5)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    found = token_logprob(logits, 17, 3)
    order = np.argsort(-logits)[:3].tolist()
    assert (17, order) == (found.token_id, [i for i, _ in found.top])
    assert pytest.approx([exact[17], *exact[order]], abs=1e-5) == [found.logprob, *(p for _, p in found.top)]
    assert () == token_logprob(logits, 17).top


# ------------------------------------------------------------------------------------------- the chain in one call


def test_the_usual_chain_in_one_call_is_its_stages_one_by_one() -> None:
    """300 rows, of equal values, few possible tokens and huge logits too: the same token of each random number."""
    for seed in range(300):
        state = np.random.RandomState(seed)
        n, k = int(state.choice([1, 2, 39, 40, 41, 300, 5000])), int(state.choice([1, 2, 40, 1024, 1025]))
        p, share = float(state.choice([0, 0.5, 0.95, 1])), float(state.choice([0, 0.05, 0.5, 1]))
        t = float(state.choice([1e-44, 1e-8, 0.8, 1, 3]))
        logits = np.round(random_row(n, seed), seed % 3) * np.float32(state.choice([0.1, 1, 1e37]))
        logits[state.rand(n) < state.choice([0, 0.9])] = -np.inf
        logits[state.randint(n)] = 0.5
        sampler = Sampler(SamplingParams(temperature=t, top_k=k, top_p=p, min_p=share, seed=seed), n)
        random = Random(seed)
        for _ in range(5):
            left = temperature(min_p(top_p(top_k(candidates(logits), k), p), share), t)
            assert draw(left, random.double()) == sampler.sample(logits), f"seed {seed}"


@pytest.mark.parametrize("k", [40, 1024])
def test_a_sampler_in_two_threads_harms_nobody(k: int) -> None:
    """It is not made for them, but what they get is a token."""
    script = f"""
import threading, numpy as np
from ggufpy.sampling import Sampler, SamplingParams
sampler = Sampler(SamplingParams(temperature=1.0, top_k={k}, seed=1), 150_000)
def use(seed):
    row = np.random.RandomState(seed).randn(150_000).astype(np.float32)
    tokens.extend(sampler.sample(row) for _ in range(300))
tokens, threads = [], [threading.Thread(target=use, args=(seed,)) for seed in (1, 2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(tokens), all(0 <= token < 150_000 for token in tokens))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (0, "600 True\n") == (done.returncode, done.stdout), done.stderr


# ------------------------------------------------------------------------------------------- greedy, broken rows


def test_the_best_token_is_the_lowest_id_among_equals() -> None:
    """Of equal logits the first counts; +inf beats all."""
    assert (0, 1, 2) == (best_token(row(3, 3, 1)), best_token(row(1, 3, 3)), best_token(row(1, 3, np.inf)))


@pytest.mark.parametrize("cold", [0, 0.0, -1.0, -1e30])
def test_temperature_zero_or_less_is_argmax_with_the_lowest_id_on_ties(cold: float) -> None:
    """No seed and no other setting changes a greedy choice."""
    for seed in (None, 0, 7):
        sampler = Sampler(SamplingParams(temperature=cold, seed=seed, top_k=3, top_p=0.1), 3)
        assert [0] * 20 == [sampler.sample(row(3, 3, 1)) for _ in range(20)]
        assert 1 == sampler.sample(row(1, 3, 3))


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    """1e-8 and less are not mistaken for anything but cold, and draw among exact equals only."""
    for cold in (1e-8, 1e-38, 1e-44):
        sampler = Sampler(SamplingParams(**{**ALL, "temperature": cold}, seed=3), 4)
        assert {1} == {sampler.sample(row(1, 30, 29.9999, 2)) for _ in range(50)}


CHAINS = [
    {"temperature": 0}, {}, ALL, {"top_k": 0}, {"repeat_penalty": 1.3}, {"frequency_penalty": 0.5, "dry_multiplier": 1},
    {"mirostat": 1}, {"mirostat": 2}, {"adaptive_target": 0.4}, {"typical_p": 0.9}, {"top_n_sigma": 2, "top_k": 0},
    {"xtc_probability": 1.0, "temperature": 0}, {"dynatemp_range": 0.7, "top_k": 0}, {"logit_bias": {0: 1.0, 2: -2.0}},
]  # fmt: skip


def test_a_view_with_steps_is_a_row_too() -> None:
    """Every second number of an array gives the tokens that a copy of them gives."""
    logits = random_row(6000, seed=8)[::2]
    for chain in CHAINS:
        one, other = (Sampler(SamplingParams(**chain, seed=4), 3000) for _ in range(2))
        assert one.sample(logits.copy(), [1, 2]) == other.sample(logits, [1, 2]), chain


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("n", [10, 6000])
def test_nan_is_an_error_that_names_the_index(chain: dict, n: int) -> None:
    """A broken forward pass never looks like text: the first NaN is reported wherever it is."""
    sampler = Sampler(SamplingParams(**chain), n)
    for where in (0, n // 2, n - 1):
        logits = random_row(n, seed=2)
        logits[where] = np.nan
        with pytest.raises(SamplingError, match=rf"logits\[{where}\] is NaN"):
            sampler.sample(logits, [where])
    with pytest.raises(SamplingError, match=r"logits\[0\] is NaN"):
        sampler.sample(np.full(n, np.nan, np.float32))


@pytest.mark.parametrize("chain", CHAINS)
def test_infinite_logits(chain: dict) -> None:
    """+inf is that token; -inf is never chosen; only -inf is an error."""
    sampler = Sampler(SamplingParams(**chain), 6000)
    logits = random_row(6000, seed=2)
    logits[4321] = np.inf
    assert 4321 == sampler.sample(logits, [4321])
    logits[:] = -np.inf
    with pytest.raises(SamplingError, match="no candidate left"):
        sampler.sample(logits, [1])
    logits[77] = -5
    assert {77} == {sampler.sample(logits, [77]) for _ in range(20)}


def test_banned_tokens_are_never_chosen() -> None:
    """A banned token is out in every chain; a NaN under it is still seen; banning all leaves nothing."""
    for chain in CHAINS:
        sampler = Sampler(SamplingParams(**chain, seed=1), 3, banned={0, 2})
        assert {1} == {sampler.sample(row(9, 1, 9)) for _ in range(20)}
        with pytest.raises(SamplingError, match=r"logits\[2\] is NaN"):
            sampler.sample(row(9, 1, np.nan))
        with pytest.raises(SamplingError, match="no candidate left"):
            Sampler(SamplingParams(**chain), 3, banned=range(3)).sample(row(9, 1, 9))


def test_padding_past_the_vocabulary_is_never_chosen() -> None:
    """A row may be longer than the vocabulary; a shorter or two-dimensional one is an error."""
    assert 1 == Sampler(SamplingParams(temperature=0), 3).sample(row(1, 2, 0, 50, np.nan))
    for bad in (row(1, 2), np.zeros((1, 3), np.float32)):
        with pytest.raises(SamplingError, match=r"logits: expected shape \[3\]"):
            Sampler(SamplingParams(), 3).sample(bad)


def test_the_row_given_is_not_changed() -> None:
    """Sampling reads the logits and leaves them alone, whatever the chain does."""
    for chain in CHAINS:
        logits = random_row(5000, seed=9)
        before = logits.copy()
        Sampler(SamplingParams(**chain), 5000, banned=[3]).sample(logits, [1, 2, 3])
        assert np.array_equal(before, logits)


# ------------------------------------------------------------------------------------------------- the seed


def test_one_seed_gives_one_sequence_and_zero_is_a_seed() -> None:
    """Two samplers with one seed agree for ever; another seed differs; the seed in use is reported."""

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(**ALL, seed=seed), 500)
        assert seed is None or seed == sampler.seed
        return [sampler.sample(random_row(500, seed=i, scale=0.5)) for i in range(40)]

    assert tokens(7) == tokens(7)
    assert tokens(0) == tokens(0)
    assert len({tuple(tokens(seed)) for seed in (0, 1, 7, 2**32 - 1, None, None)}) == 6


def test_the_seed_drawn_when_absent_replays_the_sequence() -> None:
    """seed=None reports a seed with which the same tokens come again."""
    first = Sampler(SamplingParams(**ALL), 500)
    again = Sampler(SamplingParams(**ALL, seed=first.seed), 500)
    logits = random_row(500, seed=1, scale=0.1)
    assert [first.sample(logits) for _ in range(30)] == [again.sample(logits) for _ in range(30)]


def test_two_processes_without_a_seed_differ() -> None:
    """Nothing in a new process fixes the seed that is drawn."""
    code = "from ggufpy.sampling import *; print(Sampler(SamplingParams(), 9).seed)"
    seeds = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)]
    assert seeds[0] != seeds[1]


def test_every_token_occurs_when_nothing_is_cut() -> None:
    """top_k 0 and top_p 1 leave all tokens in: over 2,000 draws each occurs about as often as it should."""
    sampler = Sampler(SamplingParams(**ALL, seed=11), 4)
    counts = np.bincount([sampler.sample(np.log(row(*SHARES))) for _ in range(2000)], minlength=4)
    assert np.allclose(SHARES, counts / 2000, atol=0.04)


def test_draw_covers_its_ends() -> None:
    """The smallest and the largest random number both fall on a token that is possible."""
    c = candidates(row(-np.inf, 1, 1, -np.inf))
    assert (1, 2) == (draw(c, 2**-64), draw(c, 1 - 2**-53))
