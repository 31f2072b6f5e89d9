"""The samplers beyond llama.cpp's default chain, held against numbers worked out by hand, and what the chain adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ggufpy.errors import SamplingError
from ggufpy.sampling import (
    AdaptiveP,
    Candidates,
    Mirostat,
    MirostatV2,
    Sampler,
    SamplingParams,
    add_bias,
    allow,
    ban,
    candidates,
    dry,
    dynamic_temperature,
    penalties,
    probabilities,
    process,
    sequence_breakers,
    temperature,
    top_k,
    top_n_sigma,
    typical_p,
    xtc,
)

SHARES = [0.1, 0.2, 0.3, 0.4]
INF = np.inf


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def of_shares(*values: float) -> Candidates:
    return candidates(np.log(row(*values)))


def how_often(choose: Callable[[int], int], n: int = 3000) -> dict[int, float]:
    """The share of each token over many seeds."""
    return {token: count / n for token, count in Counter(map(choose, range(n))).items()}


# ------------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.0, [2]), (0.25, [2]), (0.4, [2, 1]), (0.6, [2, 1, 3]), (0.95, [2, 1, 3, 0]), (1.0, [0, 1, 2, 3])],
)
def test_typical_p_vectors(p: float, expected: list[int]) -> None:
    """The entropy of 0.1 … 0.4 is 1.280; surprises 2.303, 1.609, 1.204, 0.916 are 1.023, 0.330, 0.076, 0.364 off."""
    assert expected == typical_p(of_shares(*SHARES), p).ids.tolist()


def test_typical_p_may_leave_out_the_likeliest() -> None:
    """Entropy 1.332: a surprise of 1.609 is nearer than the likeliest's 0.916, and two of them do not exceed 0.5."""
    assert [1, 2, 3] == typical_p(of_shares(0.4, 0.2, 0.2, 0.2), 0.5).ids.tolist()
    assert [0] == typical_p(of_shares(0.97, 0.01, 0.01, 0.01), 0.5).ids.tolist()


def test_typical_p_sees_no_impossible_token() -> None:
    """A token of probability 0 changes neither the entropy nor the choice."""
    c = candidates(np.append(np.log(row(*SHARES)), row(-INF)))
    assert [2, 1] == typical_p(c, 0.4).ids.tolist()
    assert [2, 1, 3, 0] == typical_p(c, 0.95).ids.tolist()


@pytest.mark.parametrize("n", [5, 1000])
def test_typical_p_of_equal_tokens_keeps_more_than_p(n: int) -> None:
    """Of n equal tokens those with the lowest ids stay, as many as exceed p."""
    assert list(range(n // 2 + 1)) == typical_p(candidates(np.zeros(n, np.float32)), 0.5 + 1e-4).ids.tolist()


@pytest.mark.parametrize(
    ("n", "expected"), [(0, 5), (-1, 5), (0.5, 1), (1, 1), (2.4, 1), (2.5, 5), (1e38, 5), (1e-30, 1)]
)
def test_top_n_sigma_vectors(n: float, expected: int) -> None:
    """1, 1, 1, 1, 6: mean 2, standard deviation 2; -inf beside them counts for neither."""
    for before in ([], [-INF, -INF]):
        found = top_n_sigma(candidates(row(*before, 1, 1, 1, 1, 6)), n)
        assert expected == np.count_nonzero(found.logits > -INF)
        assert len(before) + 5 == found.ids.size
        assert 6 == found.logits[-1]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.0, [0]), (0.09, [0]), (0.19, [1, 0]), (0.29, [2, 1, 0]), (0.39, [3, 2, 1, 0]), (0.5, [3, 2, 1, 0])],
)
def test_xtc_vectors(threshold: float, expected: list[int]) -> None:
    """All over the threshold go but the last of them; one alone stays, and so do all where none is over it."""
    assert expected == xtc(of_shares(*SHARES), threshold).ids.tolist()


def test_xtc_happens_as_often_as_asked() -> None:
    """With probability 0.3 the top choice 3 is left out in 3 of 10 rows; with 0 never; above threshold 0.5 never."""

    def share(**settings: float) -> float:
        p = SamplingParams(top_k=1000, top_p=1, min_p=0, temperature=0, seed=5, **settings)
        sampler = Sampler(p, 4)
        return sum(sampler.sample(np.log(row(*SHARES))) != 3 for _ in range(2000)) / 2000

    assert pytest.approx(0.3, abs=0.03) == share(xtc_probability=0.3, xtc_threshold=0.25)
    assert 1.0 == share(xtc_probability=1, xtc_threshold=0.25)
    assert 0.0 == share(xtc_probability=0, xtc_threshold=0.25)
    assert 0.0 == share(xtc_probability=1, xtc_threshold=0.51)


@pytest.mark.parametrize(("exponent", "expected"), [(1.0, 2.26753), (2.0, 3.05189), (0.0, 1.46482)])
def test_dynamic_temperature_vectors(exponent: float, expected: float) -> None:
    """0.9 and 0.1: entropy 0.32508 of ln 2, 0.46900; from 0.5 to 1.5 that is 0.96900, its square 0.71996, 1 is 1.5."""
    found = dynamic_temperature(candidates(row(0, np.log(9))), 1.0, 0.5, exponent)
    assert [1, 0] == found.ids.tolist()
    assert pytest.approx([expected, 0], abs=1e-4) == found.logits.tolist()


def test_dynamic_temperature_at_its_ends() -> None:
    """Equal tokens get the hottest, a certain one the coldest, which is never below 0; one alone is left as it is."""
    assert pytest.approx([2, 2], rel=1e-6) == dynamic_temperature(candidates(row(3, 3)), 1, 0.5, 1).logits.tolist()
    assert [400, 0] == dynamic_temperature(candidates(row(200, 0)), 1, 0.5, 1).logits.tolist()
    assert [200, -INF] == dynamic_temperature(candidates(row(200, 0)), 1, 3, 1).logits.tolist()
    assert [7] == dynamic_temperature(candidates(row(7)), 1, 0.5, 1).logits.tolist()


def test_temperature_zero_leaves_the_first_of_the_likeliest() -> None:
    """The others become impossible but stay candidates."""
    assert [-INF, 3, -INF] == temperature(candidates(row(1, 3, 3)), 0).logits.tolist()


# ---------------------------------------------------------------------------------------------- single tokens


def test_penalties_vectors() -> None:
    """Repeat 2, frequency 0.5 and presence 0.25, token 0 seen twice: 2/2 - 1.25; token 1 once: -2·2 - 0.75."""
    logits = row(2, -2, 0, 1)
    assert [-0.25, -4.75, 0, 1] == penalties(logits, [0, 0, 1, 99], 2.0, 0.5, 0.25).tolist()
    assert [3, -1.5, 0, 1] == penalties(logits, [0, 0, 1], 1.0, -0.5, 0.0).tolist()
    assert [2, -2, 0, 1] == penalties(logits, [], 2.0, 0.5, 0.25).tolist()
    assert [2, -2, 0, 1] == logits.tolist()


def test_bias_ban_and_mask() -> None:
    """Each gives a changed copy."""
    logits = row(1, 2, 3)
    assert [1.5, 2, 1] == add_bias(logits, [0, 2], row(0.5, -2)).tolist()
    assert [1, -INF, -INF] == ban(logits, [1, 2]).tolist()
    assert [1, -INF, 3] == allow(logits, np.array([True, False, True, True])).tolist()
    assert [1, 2, 3] == logits.tolist()


@pytest.mark.parametrize("mask", [np.ones(3, np.int8), np.ones((1, 3), bool), np.ones(2, bool), [True] * 3, 5])
def test_a_mask_of_another_kind_is_refused(mask: Any) -> None:
    """Not everything that NumPy could index with is a mask."""
    with pytest.raises(SamplingError, match=r"^mask: expected bool \[3\]"):
        Sampler(SamplingParams(), 3).sample(row(1, 2, 3), mask=mask)


def test_a_mask_rules_tokens_out_in_every_chain() -> None:
    """A grammar's mask holds for one row, and beats a bias; one that allows nothing is an error."""
    allowed = np.array([False, True, False])
    for settings in ({}, {"temperature": 0}, {"mirostat": 2}, {"logit_bias": {0: 100.0}}):
        sampler = Sampler(SamplingParams(seed=1, **settings), 3)
        assert {1} == {sampler.sample(row(9, 1, 9), mask=allowed) for _ in range(20)}
        assert 1 != sampler.sample(row(9, -99, 9))
        with pytest.raises(SamplingError, match="mask: no token is allowed"):
            sampler.sample(row(9, 1, 9), mask=np.zeros(3, bool))


# -------------------------------------------------------------------------------------------------------- DRY

A, B, C, X, Y = range(5)
ALONE = frozenset({()})


@pytest.mark.parametrize(
    ("breakers", "expected"),
    [
        ({}, {C: 4.0, B: 1.0, Y: 2.0}),
        ({Y: ALONE}, {C: 4.0, B: 1.0}),
        ({B: ALONE}, {C: 1.0, Y: 1.0}),
        ({C: ALONE}, {}),
        ({A: frozenset({(B,), (X,)})}, {C: 1.0, B: 1.0, Y: 1.0}),
        ({A: frozenset({(B, C, C)})}, {C: 4.0, B: 1.0, Y: 2.0}),
        ({A: frozenset({(B, C)})}, {}),
    ],
)
def test_dry_vectors(breakers: dict[int, frozenset[tuple[int, ...]]], expected: dict[int, float]) -> None:
    """a b c c b c y a b c: "abc" stands before c, "c" before b, "bc" before y; of lengths 3, 1, 2, 1 is free: 4, 1, 2.

    A breaker is never punished, and what is before the last one does not count: after y three tokens, after b one,
    after the beginning "ab" of a breaker one, after c or "abc" none. "abcc" breaks only what comes after it.
    """
    found = dry(np.zeros(5, np.float32), [A, B, C, C, B, C, Y, A, B, C], 1.0, 2.0, 1, breakers)
    assert [-expected.get(token, 0.0) for token in range(5)] == found.tolist()


def test_dry_leaves_short_repetitions_alone() -> None:
    """Nothing is taken off below the length allowed, in a history no longer than that, or for an id past the row."""
    logits = row(1, 2, 3)
    assert logits is dry(logits, [0, 1], 5.0, 2.0, 2, {})
    assert [1, 2, 3] == dry(logits, [0, 1, 0, 1], 5.0, 2.0, 3, {}).tolist()
    assert [1, 2, 3] == dry(logits, [0, 1, 7, 0, 1], 5.0, 2.0, 2, {}).tolist()
    assert [1 - 5, 2, 3] == dry(logits, [0, 1, 0, 1], 5.0, 2.0, 2, {}).tolist()


def test_dry_of_an_endless_repetition_is_finite_work_and_no_nan() -> None:
    """The penalty stops growing where a float32 does; thousands of equal tokens are no loop over all pairs."""
    found = dry(np.zeros(2, np.float32), [1] * 5000, 1.0, 1.75, 2, {})
    assert [0, pytest.approx(-(1.75**158), rel=1e-6)] == found.tolist()
    assert [0, -3] == dry(np.zeros(2, np.float32), [1] * 500, 3.0, 1.0, 2, {}).tolist()


class Pieces:
    """A vocabulary of five pieces that encodes a text byte by byte, the bytes' ids after these."""

    pieces = (b"ab", b"b", b"xab cy", b"cab", b"a")
    n_vocab = 5
    reads = 0

    def token_to_piece(self, id: int) -> bytes:
        Pieces.reads += 1
        return self.pieces[id]

    def encode(self, text: bytes, *, add_special: bool) -> list[int]:
        assert not add_special
        return [1000 + byte for byte in text]


def test_sequence_breakers_are_found_in_the_vocabulary() -> None:
    """A token with the whole string breaks alone; one that ends with its beginning, before the tokens of its end."""
    vocabulary = Pieces()
    rest = tuple(1000 + byte for byte in b" c")
    whole = tuple(1000 + byte for byte in b"b c")
    expected = {0: frozenset({rest}), 2: ALONE, 3: frozenset({rest}), 4: frozenset({whole})}
    assert expected == sequence_breakers(vocabulary, ["ab c"])
    assert {0: ALONE, 1: ALONE, 2: ALONE, 3: ALONE} == sequence_breakers(vocabulary, ["b"])
    assert {} == sequence_breakers(vocabulary, [])
    reads = Pieces.reads
    assert expected == sequence_breakers(vocabulary, ("ab c",))
    assert reads == Pieces.reads


def test_long_breakers_are_cut() -> None:
    """40 bytes of a string count, and 20 tokens of its end: llama.cpp's limits."""
    found = sequence_breakers(Pieces(), ["b" + "z" * 60])
    assert {id: frozenset({(1000 + ord("z"),) * 20}) for id in (0, 1, 3)} == found
    assert sequence_breakers(Pieces(), ["ab c" + "z" * 60]) == sequence_breakers(Pieces(), ["ab c" + "z" * 36])


# ------------------------------------------------------------------------------------------ mirostat, adaptive-p


def test_mirostat_v2_keeps_what_surprises_less_than_twice_tau() -> None:
    """tau 1: at first 2 bits are the bound, which 1/2 and 1/4 keep and 1/8 does not; they are drawn 2 : 1."""
    c = of_shares(0.25, 0.5, 0.125, 0.125)
    found = how_often(lambda seed: MirostatV2(1.0, 0.1, seed)(c))
    assert pytest.approx({1: 2 / 3, 0: 1 / 3}, abs=0.03) == found


def test_mirostat_v2_moves_its_bound() -> None:
    """A certain token, surprise 0, moves the bound up by eta·tau: after two of them 4 bits, which 1/16 keeps."""

    def third(seed: int) -> int:
        mirostat = MirostatV2(1.0, 1.0, seed)
        assert [0, 0] == [mirostat(candidates(row(500, 0))) for _ in range(2)]
        return mirostat(of_shares(1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32))

    assert {0, 1, 2, 3} == how_often(third, 400).keys()


def test_mirostat_v2_always_keeps_one() -> None:
    """tau 0: the bound is 0 bits, which no uncertain token keeps."""
    assert {2: 1.0} == how_often(lambda seed: MirostatV2(0.0, 0.1, seed)(of_shares(0.2, 0.3, 0.5)), 50)


def test_mirostat_estimates_zipfs_exponent() -> None:
    """Shares as 1/i²: exponent 2, so that tau 2 keeps (1·2⁴ / (1 - 1/1000))^(1/2) = 4.002 tokens of 1,000."""
    c = candidates(np.log(np.arange(1, 1001, dtype=np.float32) ** -2.0))
    assert {0, 1, 2, 3} == how_often(lambda seed: Mirostat(2.0, 0.1, seed, 1000)(c), 600).keys()


@pytest.mark.parametrize("mirostat", [1, 2])
def test_mirostat_reaches_its_mean_surprise(mirostat: int) -> None:
    """Over many rows the surprise of the tokens chosen is tau on average, under the probabilities they had."""
    shares = np.arange(1, 501) ** -1.2
    shares /= shares.sum()
    sampler = Sampler(SamplingParams(temperature=1, mirostat=mirostat, mirostat_tau=3, seed=1), 500)
    chosen = [sampler.sample(np.log(shares).astype(np.float32)) for _ in range(1500)]
    assert pytest.approx(3.0, abs=0.7) == -np.log2(shares[chosen[200:]]).mean()


def test_mirostat_ignores_the_filters() -> None:
    """As in llama.cpp, only temperature and what changes single tokens count beside it."""
    one = {"top_k": 1, "top_p": 0.0, "repeat_penalty": 9.0, "dry_multiplier": 9.0, "typical_p": 0.1}
    logits = np.random.RandomState(0).randn(500).astype(np.float32)
    for mirostat in (1, 2):
        plain = Sampler(SamplingParams(mirostat=mirostat, seed=3), 500)
        more = Sampler(SamplingParams(mirostat=mirostat, seed=3, **one), 500)
        assert [plain.sample(logits, [1]) for _ in range(20)] == [more.sample(logits, [1]) for _ in range(20)]


def test_adaptive_p_vectors() -> None:
    """Shares 0.5, 0.3, 0.2 and target 0.3: distances 2/3, 0, 1/3 of a width give 5 - 10·d²/(1 + d) = 2.333, 5, 4.167.

    After a certain token, with decay 0, the aim is 0.6 - 1, that is 0: distances 5/3, 1, 2/3 give -5.417, 0, 2.333.
    """
    c = of_shares(0.5, 0.3, 0.2)
    assert pytest.approx({0: 0.0462, 1: 0.6649, 2: 0.2889}, abs=0.03) == how_often(lambda s: AdaptiveP(0.3, 0, s)(c))

    def second(seed: int) -> int:
        adaptive = AdaptiveP(0.3, 0.0, seed)
        assert 0 == adaptive(of_shares(1.0))
        return adaptive(c)

    assert pytest.approx([0.0884, 0.9112], abs=0.03) == [how_often(second)[token] for token in (1, 2)]


def test_adaptive_p_never_chooses_what_is_impossible() -> None:
    """A logit of -inf stays so, though its probability 0 may be near the target."""
    c = candidates(row(1, -INF, 1.1, -INF))
    assert {0, 2} == how_often(lambda seed: AdaptiveP(0.0, 0.9, seed)(c), 200).keys()


# ------------------------------------------------------------------------------------------------- the chain


def test_greedy_stays_greedy_where_llama_cpps_chain_does() -> None:
    """Temperature 0 takes the likeliest, with mirostat and adaptive-p too; a range, typical_p and XTC may not."""
    cold = {"temperature": 0}
    for settings in ({}, {"top_k": 5, "top_p": 0.1}, {"mirostat": 1}, {"mirostat": 2, "typical_p": 0.2},
                     {"adaptive_target": 0.1}, {"temperature": -1, "dynatemp_range": 1}, {"top_n_sigma": 1.0},
                     {"mirostat": 1, "dynatemp_range": 3}, {"xtc_probability": 1, "xtc_threshold": 0.6}):  # fmt: skip
        assert SamplingParams(**{**cold, **settings}).greedy, settings
    for settings in ({"dynatemp_range": 0.5}, {"typical_p": 0.9}, {"xtc_probability": 0.5}):
        assert not SamplingParams(**{**cold, **settings}).greedy, settings
    assert 1 == Sampler(SamplingParams(temperature=0, typical_p=0.5), 4).sample(np.log(row(0.4, 0.2, 0.2, 0.2)))


def test_stages_that_are_off_are_not_in_the_chain() -> None:
    """A parameter that changes nothing costs nothing in a step."""
    off = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, xtc_threshold=0.6, xtc_probability=1)
    sampler = Sampler(off, 10)
    assert () == sampler._filters == sampler._biases == sampler._penalties
    assert 4 == len(Sampler(SamplingParams(), 10)._filters)
    assert Sampler(SamplingParams(temperature=0), 10)._choose is None


def test_biases_and_bans_of_the_parameters() -> None:
    """A bias is added, one of -inf bans even what the model is sure of, and an id past the vocabulary is an error."""
    assert 0 == Sampler(SamplingParams(temperature=0, logit_bias={0: 2.5}), 3).sample(row(1, 2, 3))
    assert 1 == Sampler(SamplingParams(temperature=0, logit_bias={2: -INF}), 3).sample(row(1, 2, INF))
    assert 1 == Sampler(SamplingParams(temperature=0, banned_token_ids=[2]), 3).sample(row(1, 2, 3))
    for settings in ({"logit_bias": {3: 1.0}}, {"banned_token_ids": [1, 3]}):
        (name,) = settings
        with pytest.raises(SamplingError, match=rf"^{name}: 3 is not below the vocabulary's size, 3$"):
            Sampler(SamplingParams(**settings), 3)


def test_min_tokens_keeps_ends_away() -> None:
    """Ending tokens cannot be chosen until so many tokens follow the prompt."""
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2), 3, ends=[2], n_prompt=1)
    history = [0]
    for _ in range(3):
        history.append(sampler.sample(row(1, 2, 3), history))
    assert [0, 1, 1, 2] == history


def test_the_windows_of_penalties_and_dry() -> None:
    """The last n tokens count, -1 means all, 0 none."""
    logits, history = row(0, 0.5, 1), [2, 0, 0, 0]
    for last, expected in ((0, 2), (3, 2), (4, 1), (-1, 1)):
        p = SamplingParams(temperature=0, presence_penalty=3, repeat_last_n=last)
        assert expected == Sampler(p, 3).sample(logits, history), last
    history = [0, 1, 2, 0, 1]
    for last, expected in ((0, 2), (4, 2), (5, 1), (-1, 1)):
        p = SamplingParams(temperature=0, dry_multiplier=3, dry_penalty_last_n=last)
        assert expected == Sampler(p, 3).sample(logits, history), last


def test_top_k_one_needs_no_luck() -> None:
    """Whatever follows it, one candidate is chosen."""
    for settings in ({"typical_p": 0.5}, {"xtc_probability": 1.0}, {"dynatemp_range": 0.5}, {"adaptive_target": 0.9}):
        sampler = Sampler(SamplingParams(top_k=1, **settings), 3)
        assert {2} == {sampler.sample(row(1, 2, 3)) for _ in range(20)}
    assert [7] == top_n_sigma(top_k(candidates(row(7, 1)), 1), 0.1).logits.tolist()


# ------------------------------------------------------------------------------------------ logits processors


def test_processors_are_called_in_turn_and_before_all_else() -> None:
    """Each gets the ids so far and a row it may write to; bans and masks have the last word."""
    seen: list[Any] = []

    def first(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        seen.append((ids, logits.tolist()))
        logits[0] = 9
        return logits

    def second(ids: Sequence[int], logits: np.ndarray) -> list[float]:
        seen.append((ids, logits.tolist()))
        return [logits[0] + 1, 0.0, 0.0]

    p = SamplingParams(temperature=0, logits_processors=[first, second])
    given = row(1, 2, 3)
    assert 0 == Sampler(p, 3).sample(given, [5, 6])
    assert [((5, 6), [1, 2, 3]), ((5, 6), [9, 2, 3])] == seen
    assert [1, 2, 3] == given.tolist()
    assert 1 == Sampler(p, 3, banned=[0]).sample(given, [5, 6])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"expected shape \[3\], got \[\]"), ("abc", "expected a row of logits, got 'abc'"),
        ([1, 2], r"expected shape \[3\], got \[2\]"), ([[1, 2, 3]], r"expected shape \[3\], got \[1, 3\]"),
        ([1, float("nan"), 2], "returned NaN at index 1"), ({}, "expected a row of logits, got {}"),
        ([[1], [1, 2]], "expected a row of logits"),
    ],
)  # fmt: skip
def test_a_bad_result_of_a_processor_is_an_error_that_names_it(result: Any, message: str) -> None:
    """Which processor it was, and what it returned."""
    with pytest.raises(SamplingError, match=rf"^logits_processors\[1\]: {message}"):
        process(row(1, 2, 3), [], [lambda ids, logits: logits, lambda ids, logits: result])


def test_an_error_in_a_processor_comes_out_as_it_is() -> None:
    """What goes wrong in a caller's function is the caller's to see."""

    def fails(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Sampler(SamplingParams(logits_processors=[fails]), 3).sample(row(1, 2, 3))


def test_what_a_processor_keeps_is_not_changed_later() -> None:
    """Bans and the next step do not write into an array of the processor's."""
    kept = row(1, 2, 3)
    p = SamplingParams(temperature=0, logits_processors=[lambda ids, logits: kept], banned_token_ids=[2])
    assert 1 == Sampler(p, 3).sample(row(0, 0, 0))
    assert [1, 2, 3] == kept.tolist()
    assert 1.0 == probabilities(candidates(kept)).sum()
