"""Speculation: guesses from the text and from a model, and that they change nothing but the time an answer takes."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufpy import DraftModel, Model, PromptLookup, SamplingParams
from ggufpy.errors import UnsupportedArchitectureError

PROMPT = [5, 9, 13, 7, 21, 8, 30, 11, 5, 9, 13, 7, 21, 8, 30, 11, 5, 9, 13]


class Oracle:
    """Guesses what it was told, with every `wrong`-th token made wrong; records what it was asked."""

    def __init__(self, answer: Sequence[int], n_prompt: int, n: int = 5, wrong: int = 0, n_vocab: int = 64) -> None:
        self.answer, self.n_prompt, self.n, self.wrong, self.n_vocab = answer, n_prompt, n, wrong, n_vocab
        self.asked: list[int] = []
        self.n_closed = 0

    def start(self, target: Model, n_ctx: int) -> Oracle:
        return self

    def propose(self, history: Sequence[int], n_max: int, /) -> list[int]:
        self.asked.append(n_max)
        first = len(history) - self.n_prompt
        guess = list(self.answer[first : first + min(self.n, n_max)])
        return [
            (token + 1) % self.n_vocab if self.wrong and (first + i) % self.wrong == 0 else token
            for i, token in enumerate(guess)
        ]

    def close(self) -> None:
        self.n_closed += 1


# ------------------------------------------------------------------------------------------------ from the text


def propose(history: list[int], n_max: int = 100, **options: Any) -> list[int]:
    return list(PromptLookup(**options).start().propose(history, n_max))


def test_lookup_guesses_what_followed_before() -> None:
    """The tokens that followed the last three are proposed, at most as many as fit."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [4, 5, 6, 7, 8, 9, 10] == propose([*text, 99, 1, 2, 3])
    assert [4, 5] == propose([*text, 99, 1, 2, 3], 2)
    assert [4, 5, 6] == propose([*text, 99, 1, 2, 3], num_speculative_tokens=3)


def test_lookup_guesses_nothing_without_a_match() -> None:
    """Fewer matching tokens than prompt_lookup_min are no match."""
    assert [] == propose([1, 2, 3, 4, 5, 6, 99, 2, 3])
    assert [] == propose([])
    assert [] == propose([1, 2])
    assert [4, 5, 6, 99, 2, 3, 4] == propose([1, 2, 3, 4, 5, 6, 99, 2, 3], prompt_lookup_min=2)


def test_lookup_prefers_the_longest_match_and_then_the_last() -> None:
    """Of several places the one whose longer beginning matches too wins; among equals the one nearest to the end."""
    far, near = [7, 1, 2, 3, 40, 41, 42], [8, 1, 2, 3, 50, 51, 52]
    assert [40, 41, 42] == propose([*far, *near, 7, 1, 2, 3])[:3]
    assert [50, 51, 52] == propose([*far, *near, 9, 1, 2, 3])[:3]


def test_lookup_continues_a_repetition_past_its_end() -> None:
    """Where the match runs into the end of the text, what is repeated is expected again."""
    assert [1, 2, 1, 2, 1, 2, 1] == propose([1, 2, 1, 2, 1, 2], prompt_lookup_max=3)


def test_lookup_guesses_longer_the_longer_the_match() -> None:
    """7 tokens after a short match, 15 once 8 tokens agree, 31 once 16 do."""
    text, drafter = list(range(200)), PromptLookup(31).start()
    history = [*text, *text[:3]]
    lengths = []
    for n in (3, 7, 8, 15, 16):
        history += text[len(history) - len(text) : n]
        lengths.append(len(drafter.propose(history, 100)))
    assert [7, 7, 15, 15, 31] == lengths


def test_lookup_hardly_guesses_where_guesses_fail() -> None:
    """Text in which three tokens often recur with another continuation soon gets no guesses any more."""
    choose, drafter, history, guesses = random.Random(1), PromptLookup().start(), [0], 0
    for i in range(2000):
        history += [1, 2, 3, choose.randrange(10, 10_000)] if i % 5 == 0 else [choose.randrange(10, 10_000)]
        guesses += bool(drafter.propose(history, 100))
    assert guesses < 40


def test_lookup_does_not_depend_on_how_often_it_is_asked() -> None:
    """A drafter asked once finds what one asked for each token finds, where no guess has failed."""
    choose = random.Random(3)
    text = [choose.randrange(50) for _ in range(300)]
    history = [*text, *text[100:120]]
    often = PromptLookup(prompt_lookup_min=8).start()
    for n in range(1, len(history)):
        often.propose(history[:n], 0)
    assert text[120:127] == often.propose(history, 7) == propose(history, 7, prompt_lookup_min=8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PromptLookup(0), "num_speculative_tokens"),
        (lambda: PromptLookup(2.5), "num_speculative_tokens"),  # type: ignore[arg-type]
        (lambda: PromptLookup(prompt_lookup_min=0), "prompt_lookup_min"),
        (lambda: PromptLookup(prompt_lookup_min=5, prompt_lookup_max=4), "prompt_lookup_max"),
    ],
)
def test_options_out_of_range(make: Callable[[], object], name: str) -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match=f"^{name}: expected an integer of at least"):
        make()


# -------------------------------------------------------------------------------------------- nothing is changed


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2", "gpt2", "phi3"])
@pytest.mark.parametrize("repack", [False, True], ids=["mapped", "repacked"])
def test_greedy_answers_are_the_same(tiny: Callable[..., Path], arch: str, repack: bool) -> None:
    """With right, half right and wrong guesses, from the text and from a model, tokens are those of plain decoding."""
    with Model.load(tiny(arch), repack=repack) as model:
        options = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
        plain = model.generate(PROMPT, **options)
        n_vocab = model.config.n_vocab
        drafts = [Oracle(plain.token_ids, len(PROMPT), wrong=k, n_vocab=n_vocab) for k in (0, 1, 2, 3, 7)]
        for draft in (*drafts, PromptLookup(prompt_lookup_min=1), model, DraftModel(model, p_min=0)):
            answer = model.generate(PROMPT, draft=draft, **options)
            assert plain.token_ids == answer.token_ids, draft
            assert plain.text == answer.text


def test_usage_reports_the_gain(llama: Model) -> None:
    """Right guesses need no step of their own; plain answers have none."""
    options = {"temperature": 0, "max_tokens": 31, "ignore_eos": True}
    plain = llama.generate(PROMPT, **options)
    assert (0, 0) == (plain.usage.draft_tokens, plain.usage.accepted_tokens)
    right = llama.generate(PROMPT, draft=Oracle(plain.token_ids, len(PROMPT)), **options)
    assert (25, 25) == (right.usage.draft_tokens, right.usage.accepted_tokens)  # 1 + 5 · (5 + 1)
    wrong = llama.generate(PROMPT, draft=Oracle(plain.token_ids, len(PROMPT), wrong=1), **options)
    assert 0 == wrong.usage.accepted_tokens < wrong.usage.draft_tokens
    same = llama.generate(PROMPT, draft=DraftModel(llama, p_min=0), **options)
    assert same.usage.draft_tokens == same.usage.accepted_tokens > 20


def beyond_chance(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> float:
    """Return how many standard deviations chi-squared of two equally large samples is above its mean."""
    x, y = Counter(a), Counter(b)
    common = [kind for kind, count in (x + y).items() if count >= 20]
    rest = [len(sample) - sum(counted[kind] for kind in common) for sample, counted in ((a, x), (b, y))]
    pairs = np.array([*((x[kind], y[kind]) for kind in common), rest], float)
    pairs = pairs[pairs.sum(axis=1) > 0]
    freedom = len(pairs) - 1
    assert freedom >= 5
    return float((((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs.sum(axis=1)).sum() - freedom) / (2 * freedom) ** 0.5)


def test_sampled_answers_have_the_same_distribution(llama: Model) -> None:
    """The second and third token, over many seeds, are distributed as without guesses; a bias would be seen."""
    n, session = 1200, llama.session(n_ctx=256)
    options = {"temperature": 0.7, "top_k": 4, "max_tokens": 3, "ignore_eos": True}
    guess = llama.generate(PROMPT, temperature=0, max_tokens=3, ignore_eos=True).token_ids

    def sample(first_seed: int, draft: Any) -> list[tuple[int, ...]]:
        seeds = range(first_seed, first_seed + n)
        answers = (llama.generate(PROMPT, seed=seed, session=session, draft=draft, **options) for seed in seeds)
        return [tuple(answer.token_ids[1:]) for answer in answers]

    plain, drafted = sample(0, None), sample(n, Oracle(guess, len(PROMPT)))
    assert beyond_chance(plain, drafted) < 3
    assert beyond_chance(plain, [tuple(guess[1:]) if i % 6 == 0 else pair for i, pair in enumerate(drafted)]) > 5


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_draws_the_same_tokens(llama: Model, seed: int) -> None:
    """Each token takes one random number, guessed or not."""
    options = {"seed": seed, "temperature": 1.2, "max_tokens": 40, "ignore_eos": True}
    plain = llama.generate(PROMPT, **options)
    guess = Oracle(plain.token_ids, len(PROMPT), wrong=3)
    assert plain.token_ids == llama.generate(PROMPT, draft=guess, **options).token_ids


# ------------------------------------------------------------------------------------------------- ends of answers


def test_endings_inside_a_guess(llama: Model) -> None:
    """max_tokens, a stop token and a stop string end an answer as without guesses, wherever the guess goes on."""
    plain = llama.generate(PROMPT, temperature=0, max_tokens=40, ignore_eos=True)
    guess = Oracle(plain.token_ids, len(PROMPT), n=9)
    text = plain.text
    cases: list[dict[str, Any]] = [{"max_tokens": n} for n in range(12)]
    cases += [{"stop_token_ids": [plain.token_ids[n]]} for n in (0, 1, 5, 11)]
    cases += [{"stop": text[n : n + 3]} for n in (1, 4, 9, 15)]
    for case in cases:
        options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, **case}
        with llama.session(n_ctx=256) as one, llama.session(n_ctx=256) as other:
            a = llama.generate(PROMPT, session=one, **options)
            b = llama.generate(PROMPT, session=other, draft=guess, **options)
            assert one.tokens() == other.tokens(), case  # the session keeps nothing of the guess either
        assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
            b.token_ids, b.text, b.finish_reason, b.stop_reason,
        ), case  # fmt: skip


def test_end_of_generation_inside_a_guess(llama: Model) -> None:
    """An ending token ends the answer though the guess has it and goes on."""
    end = llama.tokenizer.eos_token_id
    assert end is not None
    plain = llama.generate(PROMPT, temperature=0, max_tokens=4, ignore_eos=True)
    guess = Oracle([*plain.token_ids, end, 1, 2, 3], len(PROMPT), n=9)
    answer = llama.generate(PROMPT, temperature=0, max_tokens=4, stop_token_ids=[plain.token_ids[-1]], draft=guess)
    assert plain.token_ids[-1] not in answer.token_ids
    assert "stop" == answer.finish_reason


def test_guesses_never_pass_the_end_of_the_context(llama: Model) -> None:
    """An answer fills the context to its last token, and no guess asks for more."""
    with llama.session(n_ctx=256) as session:
        plain = llama.generate(PROMPT, temperature=0, ignore_eos=True, session=session)
        guess = Oracle(plain.token_ids, len(PROMPT), n=50)
        session.clear()
        answer = llama.generate(PROMPT, temperature=0, ignore_eos=True, session=session, draft=guess)
    assert ("length", 256 - len(PROMPT)) == (answer.finish_reason, len(answer.token_ids))
    assert plain.token_ids == answer.token_ids
    assert max(guess.asked) <= 256 - len(PROMPT) - 1


def test_a_draft_model_with_a_shorter_context_stops_guessing(llama: Model) -> None:
    """Beyond its own context it proposes nothing, and the answer goes on."""
    draft = DraftModel(llama, p_min=0, n_ctx=256)
    options = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
    answer = llama.generate(PROMPT, draft=draft, **options)
    assert llama.generate(PROMPT, **options).token_ids == answer.token_ids
    assert 0 < answer.usage.accepted_tokens < 256


def test_cancel_between_guesses(llama: Model) -> None:
    """Setting the event ends a stream after the step that is under way."""
    cancel, seen = threading.Event(), 0
    for chunk in llama.stream_generate(
        PROMPT, temperature=0, max_tokens=500, ignore_eos=True, cancel=cancel, draft=DraftModel(llama, p_min=0)
    ):
        seen += len(chunk.token_ids)
        if seen > 20:
            cancel.set()
    assert "cancelled" == chunk.finish_reason
    assert 20 < seen < 60


def test_the_drafter_is_closed(llama: Model) -> None:
    """At the end of an answer, and when a stream is dropped."""
    guess = Oracle([1, 2, 3], len(PROMPT))
    llama.generate(PROMPT, max_tokens=5, draft=guess)
    assert 1 == guess.n_closed
    chunks = llama.stream_generate(PROMPT, max_tokens=50, ignore_eos=True, draft=guess)
    next(chunks)
    del chunks
    gc.collect()
    assert 2 == guess.n_closed


# -------------------------------------------------------------------------------------------- memories and models


@pytest.mark.parametrize("n_ubatch", [4, 32])
def test_windowed_caches(tiny: Callable[..., Path], n_ubatch: int) -> None:
    """With swa_full=False a wrong guess can be taken back too, long after the window has gone round."""
    with Model.load(tiny("gemma3")) as model:
        options = {"temperature": 0, "max_tokens": 450, "ignore_eos": True}
        with model.session(n_ctx=512, swa_full=False, n_ubatch=n_ubatch) as session:
            plain = model.generate(PROMPT, session=session, **options)
            session.clear()
            guess = Oracle(plain.token_ids, len(PROMPT), n=15, wrong=11)
            answer = model.generate(PROMPT, session=session, draft=guess, **options)
        assert plain.token_ids == answer.token_ids
        assert max(guess.asked) < n_ubatch
        assert 100 < answer.usage.accepted_tokens < answer.usage.draft_tokens


def test_recurrent_models_are_refused(tiny: Callable[..., Path], llama: Model) -> None:
    """Their state knows no way back: a plain error before anything is computed, for the model and for its draft."""
    with Model.load(tiny("lfm2")) as lfm2:
        with pytest.raises(UnsupportedArchitectureError, match=r"draft: the model \(lfm2\) has recurrent layers"):
            lfm2.generate(PROMPT, draft=PromptLookup())
        with pytest.raises(UnsupportedArchitectureError, match=r"draft: the draft model \(lfm2\) has recurrent"):
            llama.generate(PROMPT, draft=lfm2)


def test_drafts_without_logits_are_refused(tiny: Callable[..., Path], llama: Model) -> None:
    """Before anything is computed, not with the first guess."""
    with Model.load(tiny("bert")) as bert, pytest.raises(UnsupportedArchitectureError, match="give no logits"):
        llama.stream_generate(PROMPT, draft=bert)


def test_another_vocabulary_is_refused(llama: Model, smollm2_path: Path) -> None:
    """The error says how the vocabularies differ."""
    with Model.load(smollm2_path) as smollm2, pytest.raises(ValueError, match="its vocabulary has 49152 tokens"):
        llama.generate(PROMPT, draft=smollm2)


def test_what_is_no_draft_is_refused(llama: Model) -> None:
    """The error says what there is."""
    with pytest.raises(ValueError, match=r"draft: expected PromptLookup\(\), a Model or DraftModel"):
        llama.generate(PROMPT, draft=True)
    with pytest.raises(ValueError, match="p_min: expected a number from 0 to 1"):
        DraftModel(llama, p_min=1.5)


def test_lists_answer_as_without_guesses(llama: Model) -> None:
    """Guesses are made while one sequence runs; several prompts and their order are left alone."""
    prompts = [PROMPT[:n] for n in (19, 7, 12)]
    options = {"temperature": 0, "ignore_eos": True}
    for max_tokens in (1, 30):
        params = SamplingParams(max_tokens=max_tokens, **options)
        plain = llama.generate(prompts, params)
        drafted = llama.generate(prompts, params, draft=PromptLookup(prompt_lookup_min=1))
        assert [a.token_ids for a in plain] == [b.token_ids for b in drafted]


# ------------------------------------------------------------------------------------------------ a real model


def test_smollm2_repeats_faster_and_the_same(smollm2_path: Path) -> None:
    """A text that repeats itself takes less than half as many steps, and its tokens are those of plain decoding.

    Rows computed together come from other kernels than single ones, with other roundings: where the two likeliest
    tokens are close, plain decoding's choice is one of two. Up to the first such token answers are equal.
    """
    with Model.load(smollm2_path, repack=True) as model:
        ids = model.tokenizer.encode("one two three four five six seven eight nine ten. " * 3 + "one two")
        options = {"temperature": 0, "max_tokens": 80, "ignore_eos": True}
        plain = model.generate(ids, logprobs=2, **options)
        for draft in (PromptLookup(), DraftModel(model, num_speculative_tokens=4)):
            answer = model.generate(ids, draft=draft, **options)
            assert answer.usage.accepted_tokens > 40
            pairs = zip(plain.token_ids, answer.token_ids, strict=True)
            if (other := next((i for i, (a, b) in enumerate(pairs) if a != b), None)) is not None:
                assert plain.logprobs is not None
                (_, first), (_, second) = plain.logprobs[other].top
                assert first - second < 0.5
