"""The engine: many prompts at once, their places and order, shared prefixes, drafts, cancelling, threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.forced import Forced, Pieces, complete_all

from ggufpy import Model, SamplingParams, engine
from ggufpy.engine import Engine
from ggufpy.errors import ContextLengthError, GgufpyError, SamplingError, UnsupportedArchitectureError

Tiny = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def choose(held: Sequence[int]) -> int:
    """Choose a byte that depends on all tokens before it, so that a wrong cache shows."""
    return (sum((i + 1) * t for i, t in enumerate(held)) * 7 + 3) % 251


def counter(**options: int) -> Forced:
    return Forced(choose, **options)


def expected(prompt: Sequence[int], n: int) -> list[int]:
    """Say what the counter answers."""
    held = list(prompt)
    for _ in range(n):
        held.append(choose(held))
    return held[len(prompt) :]


class Watched(Forced):
    """A counter that notes which sequences each call has, and refuses what a session refuses."""

    def __init__(self, **options: int) -> None:
        super().__init__(choose, **options)
        self.batches: list[list[tuple[int, int]]] = []
        self.forks: list[tuple[int, int]] = []
        self.room: int | None = None
        self.searched: list[int] = []

    def argmax(self, rows: Sequence[np.ndarray]) -> list[int]:
        self.searched.append(len(rows))
        return super().argmax(rows)

    def fork(self, src: int, dst: int) -> None:
        self.forks.append((src, dst))
        super().fork(src, dst)

    def decode_batch(self, batch: Any, *, copy: bool = True) -> list[np.ndarray]:
        items = list(batch)
        held = sum(map(len, self.held.values())) + sum(len(ids) for _, ids, _ in items)
        if self.room is not None and held > self.room:
            raise ContextLengthError("no room")
        self.batches.append([(seq_id, len(ids)) for seq_id, ids, _ in items])
        return super().decode_batch(items, copy=copy)


# ------------------------------------------------------------------------------------------------ places and order


@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 8, 40])
def test_each_prompt_gets_what_it_gets_alone(n_seq_max: int) -> None:
    """Lists longer and shorter than the places, prompts of all lengths: each its own answer, in order."""
    prompts = [[(i * 37) % 200 + 1] * (1 + i * 7 % 23) + [i] for i in range(30)]
    session = Watched(n_seq_max=n_seq_max, n_ubatch=16)
    answers = complete_all(session, Pieces(), prompts, GREEDY)
    assert [expected(prompt, 12) for prompt in prompts] == [answer.token_ids for answer in answers]
    assert [len(prompt) for prompt in prompts] == [answer.usage.prompt_tokens for answer in answers]
    assert max(sum(n for _, n in batch) for batch in session.batches) <= max(16, n_seq_max)
    assert max(map(len, session.batches)) == min(n_seq_max, 30)


def test_rows_of_several_are_searched_together() -> None:
    """While two or more run; one searches its own row."""
    engine_ = Engine(session := Watched(n_seq_max=3), Pieces(), range(3))
    for i, n in enumerate([5, 3, 2]):
        engine_.submit([65 + i], SamplingParams(temperature=0, max_tokens=n), index=i)
    while engine_.busy:
        engine_.step()
    assert [3, 2] == session.searched


def test_the_last_moves_up_into_a_free_place() -> None:
    """Where nobody waits for the place of an answer that ended, running sequences stay neighbours."""
    lengths = [6, 2, 9, 9]
    engine_ = Engine(session := Watched(n_seq_max=4), Pieces(), range(4))
    for i, n in enumerate(lengths):
        engine_.submit([65 + i], SamplingParams(temperature=0, max_tokens=n), index=i)
    done = {}
    while engine_.busy:
        for request, chunk in engine_.step():
            if chunk.completion:
                done[request.index] = chunk.completion.token_ids
    assert {i: expected([65 + i], n) for i, n in enumerate(lengths)} == done
    assert list(done) != sorted(done)
    for batch in session.batches:
        numbers = [seq_id for seq_id, _ in batch]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [(3, 1)] == session.forks


def test_all_of_a_list_start_together() -> None:
    """Where nothing runs yet, prompts are computed to their end before the first sequence goes on."""
    session = Watched(n_seq_max=8, n_ubatch=16)
    complete_all(session, Pieces(), [[1 + i] * 10 for i in range(8)], GREEDY)
    sizes = [sum(n for _, n in batch) for batch in session.batches]
    assert [16] * 5 + [8] * 11 == sizes


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """A prompt that comes later is computed a micro-batch at a time, and the running ones go on in between."""
    session = Watched(n_seq_max=2, n_ubatch=4)
    engine_ = Engine(session, Pieces(), range(2))
    engine_.submit([65], SamplingParams(temperature=0, max_tokens=8))
    engine_.step()
    engine_.submit([66] * 12, SamplingParams(temperature=0, max_tokens=2), index=1)
    while engine_.busy:
        engine_.step()
    assert [(0, 1), (0, 1), (1, 4), (0, 1), (1, 4), (0, 1), (1, 4)] == [batch[0] for batch in session.batches[:7]]


def test_errors_of_one_prompt_come_before_anything_is_computed() -> None:
    """An empty or too long prompt, or a bad stop token, refuses the whole list at once."""
    session = counter(n_ctx=8)
    for prompts, params, error in [
        ([[65], []], GREEDY, SamplingError), ([[65], [65] * 9], GREEDY, ContextLengthError),
        ([[65]], SamplingParams(stop_token_ids=[999]), SamplingError),
    ]:  # fmt: skip
        with pytest.raises(error):
            engine.stream(session, Pieces(), prompts, params)
    assert [] == session.calls


def test_sequences_that_share_their_room_wait_for_it() -> None:
    """In a cache for all, prompts wait while there is no room, ended answers give theirs back, and all get answers."""
    prompts = [[i] * 10 for i in range(1, 9)]
    for room in (24, 36, 50, 200):
        session = Watched(n_seq_max=8, n_ubatch=16)
        session.room = room
        answers = complete_all(session, Pieces(), prompts, GREEDY)
        for prompt, answer in zip(prompts, answers, strict=True):
            n = len(answer.token_ids)
            assert 1 <= n <= 12
            assert expected(prompt, n) == answer.token_ids
        assert room < 200 or all(len(answer.token_ids) == 12 for answer in answers)


# ------------------------------------------------------------------------------------------------ shared prefixes


def test_a_prefix_that_prompts_share_is_computed_once() -> None:
    """Sixteen prompts with 100 tokens in common compute them once, and say so."""
    session = Watched(n_seq_max=16)
    prompts = [[7] * 100 + [i, i + 1] for i in range(16)]
    answers = complete_all(session, Pieces(), prompts, GREEDY)
    assert [expected(prompt, 12) for prompt in prompts] == [answer.token_ids for answer in answers]
    assert [0] + [100] * 15 == [answer.usage.cached_tokens for answer in answers]
    computed = sum(n for batch in session.batches for _, n in batch)
    assert 100 + 16 * 2 + 16 * 11 == computed


def test_prefixes_make_a_tree() -> None:
    """Prompts that share more with one than with another wait for the nearest."""
    session = Watched(n_seq_max=8)
    prompts = [[7] * 100 + [k] * 50 + [i] for k in (1, 2) for i in range(4)]
    answers = complete_all(session, Pieces(), prompts, GREEDY)
    assert [expected(prompt, 12) for prompt in prompts] == [answer.token_ids for answer in answers]
    assert [0, 150, 150, 150, 100, 150, 150, 150] == [answer.usage.cached_tokens for answer in answers]


def test_a_prompt_that_comes_later_takes_the_prefix_of_a_running_one() -> None:
    """More prompts than places: the later ones copy what an earlier one has in common with them."""
    session = Watched(n_seq_max=2)
    prompts = [[7] * 100 + [i] for i in range(6)]
    answers = complete_all(session, Pieces(), prompts, GREEDY)
    assert [expected(prompt, 12) for prompt in prompts] == [answer.token_ids for answer in answers]
    assert all(answer.usage.cached_tokens == 100 for answer in answers[1:])


def test_short_prefixes_are_not_worth_a_wait() -> None:
    """A few tokens in common, such as the first one that every prompt has, delay nobody."""
    session = Watched(n_seq_max=8)
    complete_all(session, Pieces(), [[1, 2, 3, 50 + i, 9, 9] for i in range(8)], GREEDY)
    assert [(i, 6) for i in range(8)] == session.batches[0]


def test_a_memory_that_cannot_go_back_shares_too() -> None:
    """Where sequences cannot be cut, the first stops at the end of the prefix and is copied there."""

    class Recurrent(Watched):
        def trim(self, seq_id: int, n: int) -> None:
            if 0 < n < len(self.tokens(seq_id)):
                raise ContextLengthError("no earlier state")
            super().trim(seq_id, n)

    session = Recurrent(n_seq_max=8)
    prompts = [[7] * 100 + [i, i + 1] for i in range(8)]
    answers = complete_all(session, Pieces(), prompts, GREEDY)
    assert [expected(prompt, 12) for prompt in prompts] == [answer.token_ids for answer in answers]
    assert [0] + [100] * 7 == [answer.usage.cached_tokens for answer in answers]


def test_several_answers_to_each_prompt() -> None:
    """With n the prompt is computed once, each answer has a seed of its own that counts on, and order is kept."""

    def flat(**options: int) -> Watched:
        session = Watched(**options)
        rows = session.rows
        session.rows = lambda *arguments: rows(*arguments) * 0.01  # type: ignore[method-assign]
        return session

    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=2**32 - 2, max_tokens=12, n=4)
    prompts = [[7] * 80 + [1], [9] * 80 + [2]]
    session = flat(n_seq_max=8)
    answers = complete_all(session, Pieces(), prompts, params)
    assert [2**32 - 2, 2**32 - 1, 0, 1] * 2 == [answer.seed for answer in answers]
    for i, answer in enumerate(answers):
        one = replace(params, n=1, seed=answer.seed)
        assert complete_all(flat(), Pieces(), [prompts[i // 4]], one)[0].token_ids == answer.token_ids
    assert 4 <= len({tuple(answer.token_ids) for answer in answers[:4]})
    assert [0, 80, 80, 80] * 2 == [answer.usage.cached_tokens for answer in answers]


# -------------------------------------------------------------------------------------------------------- drafts


class Guesser:
    """Proposes the right tokens up to a mistake."""

    def __init__(self, right: int, n: int) -> None:
        self.right, self.n, self.asked, self.closed = right, n, 0, False

    def propose(self, history: Sequence[int], n_max: int) -> Sequence[int]:
        self.asked += 1
        held = list(history)
        for i in range(min(self.n, n_max)):
            held.append(choose(held) if i < self.right else 250)
        return held[len(history) :]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("right", "n", "steps"), [(4, 4, 4), (2, 4, 5), (0, 4, 12), (0, 0, 12), (99, 99, 2)])
def test_drafts_change_nothing_but_the_number_of_steps(right: int, n: int, steps: int) -> None:
    """Right guesses, half right ones, wrong ones, none, and more than there is room for: the same answers."""
    guesser, session = Guesser(right, n), Watched()
    (answer,) = complete_all(session, Pieces(), [[65, 66]], GREEDY, drafter=lambda: guesser)
    assert expected([65, 66], 12) == answer.token_ids
    assert steps == len(session.batches)
    assert 12 - steps == answer.usage.accepted_tokens  # each token but these took a step
    assert guesser.closed


def test_nobody_guesses_while_several_run() -> None:
    """Of two prompts the one that is left alone is guessed for, from then on."""
    guessers: list[Guesser] = []

    def made() -> Guesser:
        guessers.append(Guesser(4, 4))
        return guessers[-1]

    prompts = [[65, 66], [67, 68]]
    answers = complete_all(Watched(), Pieces(), prompts, GREEDY, drafter=made)
    assert [expected(prompt, 12) for prompt in prompts] == [answer.token_ids for answer in answers]
    assert [0, 0] == [guesser.asked for guesser in guessers]
    assert all(guesser.closed for guesser in guessers)


# ---------------------------------------------------------------------------------------------------- cancelling


def test_cancelling_in_the_middle_of_a_prompt() -> None:
    """An event set while a prompt is computed ends it before its next micro-batch, with an empty answer."""
    cancel = threading.Event()
    session = Watched(n_ubatch=4)
    steps = engine.stream(session, Pieces(), [[65] * 100], GREEDY, cancel=cancel)
    assert [] == next(steps)
    thread = threading.Thread(target=cancel.set)
    thread.start()
    thread.join()
    (((index, chunk),),) = steps
    assert (0, "cancelled", "") == (index, chunk.finish_reason, chunk.text)
    assert 4 == sum(map(len, session.calls))
    answer = complete_all(session, Pieces(), [[65] * 6], GREEDY)[0]
    assert expected([65] * 6, 12) == answer.token_ids


def test_cancelling_ends_all_of_a_list() -> None:
    """Those that run keep what they have, those that wait get an empty answer."""
    cancel = threading.Event()
    steps = engine.stream(Watched(n_seq_max=2), Pieces(), [[65], [66], [67]], GREEDY, cancel=cancel)
    for _ in range(4):
        next(steps)
    cancel.set()
    answers = {index: chunk.completion for step in steps for index, chunk in step}
    assert ["cancelled"] * 3 == [answers[i].finish_reason for i in range(3)]
    assert [4, 4, 0] == [len(answers[i].token_ids) for i in range(3)]


def test_one_request_is_cancelled_and_its_followers_go_on() -> None:
    """Prompts that wait for the prefix of a cancelled one compute it themselves."""
    cancel = threading.Event()
    engine_ = Engine(Watched(n_seq_max=4, n_ubatch=8), Pieces(), range(4))
    prompts = [[7] * 40 + [i] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine_.submit(prompt, GREEDY, index=i, cancel=cancel if i == 0 else None)
    engine_.step()
    cancel.set()
    done = {}
    while engine_.busy:
        done |= {r.index: c.completion for r, c in engine_.step() if c.completion}
    assert "cancelled" == done[0].finish_reason
    assert [expected(prompt, 12) for prompt in prompts[1:]] == [done[i].token_ids for i in (1, 2, 3)]


# ------------------------------------------------------------------------------------- the prompt's probabilities


def check_prompt_logprobs(prompt: list[int], answer: Any) -> None:
    """Hold one entry for each token, each with the likeliest one, against what the counter's rows say."""
    first, *found = answer.prompt_logprobs
    assert None is first
    assert prompt[1:] == [entry.token_id for entry in found]
    for i, entry in enumerate(found):
        best, likely = choose(prompt[: i + 1]), np.log(np.e / (np.e + 256))
        assert [(best, pytest.approx(likely))] == list(entry.top)
        assert pytest.approx(likely - (prompt[i + 1] != best)) == entry.logprob


@pytest.mark.parametrize("n_ubatch", [1, 7, 512])
def test_prompt_logprobs_are_those_of_the_next_tokens(n_ubatch: int) -> None:
    """One entry for each token of a prompt, however it is cut; none before the first. Nothing held is taken for it."""
    session, params = counter(n_ubatch=n_ubatch), replace(GREEDY, prompt_logprobs=1)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, i, *expected([3, 1, 4, 1, 5, 9, 2, 6, i], 3)] for i in (10, 11)] + [[7]]
    for _ in range(2):
        for prompt, answer in zip(prompts, complete_all(session, Pieces(), prompts, params), strict=True):
            assert expected(prompt, 12) == answer.token_ids
            assert 0 == answer.usage.cached_tokens
            check_prompt_logprobs(prompt, answer)
    assert "prompt_logprobs" in str(answer.usage.cache_miss_reason)
    assert None is complete_all(session, Pieces(), prompts, GREEDY)[0].prompt_logprobs


def test_a_prompt_that_is_read_again_from_its_start_counts_once() -> None:
    """Without room for all, one begins again later."""
    session = Watched(n_seq_max=3, n_ubatch=6)
    session.room = 40
    prompts = [[i, *range(30, 50)] for i in range(4)]
    answers = complete_all(session, Pieces(), prompts, replace(GREEDY, prompt_logprobs=1))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_prompt_logprobs(prompt, answer)


def test_prompts_that_are_read_lead_others_and_follow_nobody() -> None:
    """Side by side on one engine: who wants no prompt_logprobs takes what is shared, who does computes all of it."""
    prompts = [[*range(1, 91), 100 + i] for i in range(4)]
    engine_ = Engine(session := Watched(n_ubatch=64), Pieces(), range(4))
    for i, prompt in enumerate(prompts):
        engine_.submit(prompt, replace(GREEDY, prompt_logprobs=None if i % 2 else 1), index=i)
    done = {}
    while engine_.busy:
        done |= {request.index: chunk.completion for request, chunk in engine_.step() if chunk.completion}
    assert [(0, 1), (0, 3)] == session.forks
    for i, prompt in enumerate(prompts):
        assert expected(prompt, 12) == done[i].token_ids
        assert (90 if i % 2 else 0) == done[i].usage.cached_tokens
        if i % 2:
            assert None is done[i].prompt_logprobs
        else:
            check_prompt_logprobs(prompt, done[i])


# ------------------------------------------------------------------------------------------- beyond a full context


def test_a_full_sequence_drops_tokens_and_goes_on() -> None:
    """Half of what stands behind the first n_keep; the answer is as long as asked, and says how much was dropped."""
    session = counter(n_ctx=16)
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
    answers = complete_all(session, Pieces(), prompts, replace(GREEDY, max_tokens=40), n_keep=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        held, made, discarded = list(prompt), [], 0
        while len(made) < 40:
            made.append(choose(held))
            if len(held) == 16:
                del held[4:10]
                discarded += 6
            held.append(made[-1])
        assert made == answer.token_ids
        assert ("length", discarded) == (answer.finish_reason, answer.usage.discarded_tokens)
    short = complete_all(session, Pieces(), prompts, replace(GREEDY, max_tokens=40))
    assert [10, 13] == [len(answer.token_ids) for answer in short]


def test_a_stop_string_is_found_across_a_shift() -> None:
    """It may begin before tokens are dropped and end behind: the text knows nothing of what the model still sees."""
    letters = Pieces({i: bytes([97 + i % 26]) for i in range(251)})
    params = replace(GREEDY, max_tokens=40)
    (whole,) = complete_all(counter(n_ctx=16), letters, [[1, 2, 3]], params, n_keep=4)
    stop = whole.text[12:16]  # the sequence is full after 13 tokens
    assert 12 == whole.text.find(stop)
    (answer,) = complete_all(counter(n_ctx=16), letters, [[1, 2, 3]], replace(params, stop=stop), n_keep=4)
    assert (whole.text[:12], whole.token_ids[:16], stop) == (answer.text, answer.token_ids, answer.stop_reason)
    assert 6 == answer.usage.discarded_tokens


@pytest.mark.parametrize("right", [0, 100])
def test_drafts_stay_within_the_context_when_it_shifts(right: int) -> None:
    """Guesses end where the sequence does; the text is the one without them."""
    params = replace(GREEDY, max_tokens=60)
    (alone,) = complete_all(counter(n_ctx=16), Pieces(), [[1, 2]], params, n_keep=0)
    guesser = Guesser(right, 5)
    (answer,) = complete_all(counter(n_ctx=16), Pieces(), [[1, 2]], params, n_keep=0, drafter=lambda: guesser)
    assert alone.token_ids == answer.token_ids
    assert answer.usage.draft_tokens > 0


def test_an_answer_ends_where_its_cells_cannot_move() -> None:
    """What a fork shares is not moved: the answer ends at the context's end, with all that it has."""
    session = counter(n_ctx=16)

    def shared(*_: int) -> None:
        raise ContextLengthError("a fork shares its cells")

    session.shift = shared  # type: ignore[method-assign]
    (answer,) = complete_all(session, Pieces(), [[1, 2, 3]], replace(GREEDY, max_tokens=40), n_keep=4)
    assert (expected([1, 2, 3], 14), "length") == (answer.token_ids, answer.finish_reason)


def test_what_an_ended_answer_left_is_in_nobodys_way() -> None:
    """Cells shared with an answer that ended, of the same prompt, are given up for one that goes on."""
    session = counter(n_ctx=16)
    shift = session.shift

    def alone(seq_id: int, n_keep: int, n_discard: int) -> None:
        if any(held for other, held in session.held.items() if other != seq_id):
            raise ContextLengthError("a fork shares its cells")
        shift(seq_id, n_keep, n_discard)

    session.shift = alone  # type: ignore[method-assign]
    engine_ = Engine(session, Pieces(), range(2))
    requests = [engine_.submit([1, 2, 3], replace(GREEDY, max_tokens=n), n_keep=2) for n in (1, 40)]
    while engine_.busy:
        engine_.step()
    assert [4, 43] == [len(request.generation.history) for request in requests]


# ------------------------------------------------------------------------------------------------- a tiny model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    from ggufpy.testing import write_tiny_model

    with Model.load(write_tiny_model("llama", tmp_path_factory.mktemp("engine") / "tiny.gguf")) as model:
        yield model


FIXED = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXTS = ["the an", "in on it", "a", "where is the rain", "0123", "on the rock, in the sea"]


def test_a_list_gives_what_each_prompt_gives_alone(tiny_model: Model) -> None:
    """Texts and ids, more than places, in order; streamed with their indices, the chunks add up."""
    alone = [tiny_model.generate(text, **FIXED).token_ids for text in TEXTS]
    ids = [tiny_model.tokenizer.encode(text) for text in TEXTS]
    assert alone == [answer.token_ids for answer in tiny_model.generate(TEXTS, **FIXED)]
    assert alone == [answer.token_ids for answer in tiny_model.generate(ids, max_num_seqs=2, **FIXED)]
    got: list[list[int]] = [[] for _ in TEXTS]
    for index, chunk in tiny_model.stream_generate(TEXTS, max_num_seqs=4, **FIXED):
        got[index] += chunk.token_ids
    assert alone == got


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "qwen35", "phi3"])
def test_other_memories_batch_too(name: str, tiny: Tiny) -> None:
    """Windows and recurrent states: a list gives what each prompt gives alone, a shared prefix included."""
    try:
        path = tiny(name)
    except (KeyError, GgufpyError, ValueError) as error:
        pytest.skip(str(error))
    prompts = [[9, 8, 7] * 10 + [i, i + 1] for i in range(5, 9)] + [[30 + i, 5] for i in range(3)]
    with Model.load(path) as model:
        alone = [model.generate(ids, **FIXED).token_ids for ids in prompts]
        answers = model.generate(prompts, max_num_seqs=5, **FIXED)
        assert alone == [answer.token_ids for answer in answers]
        assert sum(answer.usage.cached_tokens for answer in answers) >= 90


def test_prompt_logprobs_are_the_scores(tiny_model: Model) -> None:
    """Each token's is what `score` gives it behind those before; texts are batched, and nothing need be chosen."""
    for answer, text in zip(tiny_model.generate(TEXTS, prompt_logprobs=3, max_tokens=0), TEXTS, strict=True):
        ids = tiny_model.tokenizer.encode(text)
        assert ([], len(ids)) == (answer.token_ids, len(answer.prompt_logprobs or []))
        found = [entry for entry in answer.prompt_logprobs or [] if entry]
        logprobs = tiny_model.score(ids[:1], ids[1:]).logprobs if found else []
        assert logprobs == pytest.approx([entry.logprob for entry in found], abs=1e-3)
        assert all(3 == len(entry.top) and entry.logprob <= entry.top[0][1] for entry in found)


def test_a_full_context_shifts_as_a_session_does(tiny_model: Model) -> None:
    """Token by token what `Session.shift` and `decode` give; a list too, and the session can be used on."""
    prompt, n = list(range(10, 40)), 300
    with tiny_model.session(n_ctx=256, n_threads=1) as session:
        row, made = session.decode(prompt)[0], []
        while len(made) < n:
            row[list(tiny_model.tokenizer.eog_token_ids)] = -np.inf
            made.append(int(row.argmax()))
            if session.n_past() == 256:
                session.shift(0, 8, 124)
            row = session.decode([made[-1]])[0]
    with tiny_model.session(n_ctx=256, n_threads=1) as session:
        answer = tiny_model.generate(prompt, session=session, temperature=0, max_tokens=n, ignore_eos=True, n_keep=8)
        assert made == answer.token_ids
        assert 124 == answer.usage.discarded_tokens
        assert prompt[:8] == session.tokens()[:8]


@pytest.mark.parametrize(
    ("name", "options", "n_keep", "error", "named"),
    [
        ("lfm2", {}, 0, UnsupportedArchitectureError, "recurrent"),
        ("gemma3-windowed", {"swa_full": False}, 0, ContextLengthError, "swa_full=True"),
        ("llama", {}, 256, ValueError, "n_keep: expected an integer from 0 to 255, got 256"),
        ("llama", {}, -1, ValueError, "n_keep"), ("llama", {}, True, ValueError, "n_keep"),
    ],
)  # fmt: skip
def test_contexts_that_cannot_shift_say_so_at_once(
    name: str, options: dict[str, Any], n_keep: int, error: type[Exception], named: str, tiny: Tiny
) -> None:
    """Before anything is computed."""
    path = tiny("gemma3", n_swa=16, n_layer=3, swa_pattern=3) if "windowed" in name else tiny(name)
    with Model.load(path) as model, model.session(n_ctx=256, n_threads=1, **options) as session:
        with pytest.raises(error, match=named):
            model.generate([1, 2, 3], session=session, n_keep=n_keep, **FIXED)
        assert 0 == session.n_past()
        assert 8 == len(model.generate([1, 2, 3], session=session, **FIXED).token_ids)


def test_a_session_lends_its_sequences(tiny_model: Model) -> None:
    """A list uses all sequences of the caller's session, apart or sharing a cache, and goes on from what they hold."""
    alone = [tiny_model.generate(text, **FIXED).token_ids for text in TEXTS]
    for options in ({"n_seq_max": 1}, {"n_seq_max": 3}, {"n_seq_max": 3, "kv_unified": True, "n_ctx": 256}):
        with tiny_model.session(n_threads=1, **options) as session:  # type: ignore[arg-type]
            for _ in range(2):
                answers = tiny_model.generate(TEXTS, session=session, **FIXED)
                assert alone == [answer.token_ids for answer in answers]
            again = tiny_model.generate(TEXTS[3], session=session, **FIXED)
            assert alone[3] == again.token_ids


def test_a_dropped_stream_leaves_its_session_usable(tiny_model: Model) -> None:
    """Closed after some steps, dropped, or never begun."""
    alone = [tiny_model.generate(text, **FIXED).token_ids for text in TEXTS]
    with tiny_model.session(n_seq_max=4, n_threads=1) as session:
        for n in (0, 1, 5):
            chunks = tiny_model.stream_generate(TEXTS, session=session, **FIXED)
            for _ in range(n):
                next(chunks)
            if n == 5:
                chunks.close()
            del chunks
            gc.collect()
            answers = tiny_model.generate(TEXTS, session=session, **FIXED)
            assert alone == [answer.token_ids for answer in answers]


def test_threads_queue_on_one_session(tiny_model: Model) -> None:
    """Four threads that generate on one session each get their own answers: one call waits for the other."""
    alone = [tiny_model.generate(text, **FIXED).token_ids for text in TEXTS]
    with tiny_model.session(n_seq_max=2, n_threads=1) as session:
        got: dict[int, Any] = {}

        def work(i: int) -> None:
            got[i] = [tiny_model.generate(TEXTS, session=session, **FIXED) for _ in range(3)]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for answers in (answers for i in range(4) for answers in got[i]):
        assert alone == [answer.token_ids for answer in answers]


def test_n_makes_a_list(tiny_model: Model) -> None:
    """A single prompt with n above 1 has a list of answers; on a session of one sequence one after another."""
    answers = tiny_model.generate("the", n=3, max_tokens=4, seed=1)
    assert isinstance(answers, list)
    assert [1, 2, 3] == [answer.seed for answer in answers]
    with tiny_model.session(n_threads=1) as session:
        again = tiny_model.generate("the", n=3, max_tokens=4, seed=1, session=session)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in again]
    assert {0, 1, 2} == {index for index, _ in tiny_model.stream_generate("the", n=3, max_tokens=4)}


def test_wrong_numbers_of_sequences_are_refused(tiny_model: Model) -> None:
    """max_num_seqs is a number from 1 to 256."""
    for value in (0, 257, "2", True):
        with pytest.raises(ValueError, match="max_num_seqs"):
            tiny_model.generate(TEXTS, max_num_seqs=value, **FIXED)


@pytest.mark.parametrize("others", [range(4, 8), range(4)], ids=["other-sequences", "its-own"])
def test_a_processor_may_compute_with_the_session(others: range, tiny_model: Model) -> None:
    """What it computes there, and takes back, does not get into the rows of the other answers."""
    with tiny_model.session(n_ctx=1024, n_seq_max=8, kv_unified=True, n_threads=1) as session:

        def busy(_: Sequence[int], row: np.ndarray) -> np.ndarray:
            held = [session.n_past(seq_id) for seq_id in others]
            session.decode_batch([(seq_id, [7], "last") for seq_id in others])
            for seq_id, n in zip(others, held, strict=True):
                session.trim(seq_id, n)
            return row

        options = {**FIXED, "session": session}
        prompts = [[*range(5 + i, 25 + i)] for i in range(4)]
        alone = [tiny_model.generate(prompt, **FIXED).token_ids for prompt in prompts]
        assert alone == [answer.token_ids for answer in tiny_model.generate(prompts, **options)]
        session.clear()
        found = tiny_model.generate(prompts, logits_processors=[busy], **options)
        assert alone == [answer.token_ids for answer in found]


# ------------------------------------------------------------------------------------------------------- leaks


def resources() -> tuple[float, int, int]:
    """Return resident megabytes, open files and mappings of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * 4096 / 1e6,
        len(list(Path("/proc/self/fd").iterdir())),
        len(Path("/proc/self/maps").read_text().splitlines()),
    )


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_a_thousand_calls_leave_nothing_behind(tiny_model: Model) -> None:
    """Memory, files and mappings after 1,000 generate calls are those after the first hundred."""
    options = {"max_tokens": 2, "temperature": 0}
    for _ in range(100):
        tiny_model.generate(TEXTS[0], **options)
    before = resources()
    for _ in range(900):
        tiny_model.generate(TEXTS[0], **options)
    after = resources()
    assert after[0] - before[0] < 8
    assert before[1] == after[1]
    assert after[2] - before[2] < 8


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_fifty_loads_leave_nothing_behind(tiny: Tiny) -> None:
    """Memory, files and mappings after 50 cycles of load, generate, close are those after the first ten."""

    def cycle() -> None:
        with Model.load(tiny("llama")) as model:
            model.generate(TEXTS[:2], max_tokens=2, temperature=0)

    for _ in range(10):
        cycle()
    before = resources()
    for _ in range(40):
        cycle()
    after = resources()
    assert after[0] - before[0] < 8
    assert before[1] == after[1]
    assert after[2] - before[2] < 8
