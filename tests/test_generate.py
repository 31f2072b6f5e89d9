"""Generation: stop strings, endings, limits, streaming, cache reuse and cancelling, on forced tokens and on SmolLM2."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.forced import EOS, Forced, Pieces, complete, complete_all, forced, stream, text_session

from ggufpy.errors import ContextLengthError, GgufpyError, SamplingError
from ggufpy.generate import Completion, CompletionChunk, TextAssembler, Usage
from ggufpy.sampling import SamplingParams, token_logprob

GREEDY = SamplingParams(temperature=0)


def counter() -> Forced:
    """Each token is a byte that depends on all tokens before it, so a wrong cache shows."""
    return Forced(lambda held: (sum((i + 1) * t for i, t in enumerate(held)) * 7 + 3) % 251)


def both_ways(make: Callable[[], Forced], vocabulary: Pieces, params: SamplingParams) -> Completion:
    """Generate streamed and not, check that both agree and that the chunks add up, and return the completion."""
    whole = complete(make(), vocabulary, [65], params)
    chunks = list(stream(make(), vocabulary, [65], params))
    last = chunks[-1].completion
    assert [None] * (len(chunks) - 1) == [c.completion for c in chunks[:-1]]
    assert last is not None
    for answer in (whole, last):
        assert answer.text == "".join(c.text for c in chunks)
        assert answer.token_ids == [t for c in chunks for t in c.token_ids]
    assert (whole.finish_reason, whole.stop_reason) == (chunks[-1].finish_reason, chunks[-1].stop_reason)
    return whole


# ------------------------------------------------------------------------------------------------ stop strings

WORDS = {
    13433: b"alpha", 11345: b" beta", 16439: b" gamma", 504: b"The", 36588: b" END", 30: b".",
    10813: b"\xf0\x9f", 116: b"\xa6", 243: b"\x99", 900: b"", 901: b"abc",
}  # fmt: skip
ABC = [13433, 11345, 16439]


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        (ABC, "beta gamma", "alpha ", "beta gamma"),
        (ABC, "a be", "alph", "a be"),
        (ABC, ["gamma", "beta"], "alpha ", "beta"),
        (ABC, ["alpha beta gamma delta", "gamma"], "alpha beta ", "gamma"),
        (ABC, ["gamma", " beta gamma"], "alpha", " beta gamma"),
        (ABC, [], "alpha beta gamma", 2),
        (ABC, "delta", "alpha beta gamma", 2),
        (ABC, "gamma!", "alpha beta gamma", 2),
        (ABC, "gamma</s>", "alpha beta gamma", 2),
        ([504, 36588, 30], "END..", "The END.", 2),
        ([10813, 116, 243], "🦙", "", "🦙"),
        ([10813, 116, 243, 504], ["🦙T"], "", "🦙T"),
        ([900, 901, 900], "b", "a", "b"),
        ([901, 901], "ca", "ab", "ca"),
    ],
)
def test_stop_strings(tokens: list[int], stop: str | list[str], text: str, reason: str | int) -> None:
    """Text ends before the stop string completed first, streamed or not; held text comes out at the end."""
    vocabulary = Pieces(WORDS, eog=[2], n_vocab=49152)
    params = SamplingParams(temperature=0, stop=stop)

    def make() -> Forced:
        return Forced(lambda held: [*tokens, 2][len(held) - 1], n_vocab=49152)

    answer = both_ways(make, vocabulary, params)
    assert (text, "stop", reason) == (answer.text, answer.finish_reason, answer.stop_reason)


def first_ended(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Read character by character until the text ends in a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            return text[: end - len(max(found, key=len))], max(found, key=len)
    return text, None


def test_how_tokens_cut_the_text_makes_no_difference() -> None:
    """Whatever the stop strings and the cuts, the text equals a reading character by character, and nothing leaks."""
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choices("abé🦙", k=rng.randrange(1, 16)))
        stops = ["".join(rng.choices("abé🦙", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        expected, reason = first_ended(text, stops)
        data, pieces = text.encode(), []
        while data:
            n = rng.randrange(1, 7)
            pieces.append(data[:n])
            data = data[n:]
        vocabulary = Pieces(dict(enumerate(pieces)))
        assembler = TextAssembler(vocabulary.decode_stream(), stops)
        shown = ""
        for token in range(len(pieces)):
            shown += assembler.push(token)
            assert expected.startswith(shown)
            if assembler.matched:
                break
        else:
            shown += assembler.flush()
        assert (expected, reason) == (shown, assembler.matched), (text, stops, pieces)


def test_no_more_than_needed_is_held_back() -> None:
    """Only an ending that could begin a stop string waits; the rest is shown at once."""
    assembler = TextAssembler(Pieces().decode_stream(), ["stop!", "top secret"])
    assert ["a", "", "", "", "", "s", "top b"] == [assembler.push(byte) for byte in b"astop b"]


def test_include_stop_keeps_the_stop_string() -> None:
    """The text then ends with it, and with nothing that the same token brings after it."""
    vocabulary = Pieces(WORDS, eog=[2], n_vocab=49152)
    for stop, text in (
        ("beta gam", "alpha beta gam"),
        (["gamma", "a g"], "alpha beta g"),
        ("delta", "alpha beta gamma"),
    ):
        params = SamplingParams(temperature=0, stop=stop, include_stop=True)
        answer = both_ways(lambda: Forced(lambda held: [*ABC, 2][len(held) - 1], n_vocab=49152), vocabulary, params)
        assert text == answer.text
    answer = both_ways(
        lambda: forced(b"a\xf0\x9f"), Pieces(), SamplingParams(temperature=0, stop="\ufffd", include_stop=True)
    )
    assert ("a\ufffd", "\ufffd") == (answer.text, answer.stop_reason)


def test_min_tokens_come_before_any_end() -> None:
    """Neither an ending token nor a stop string ends an answer of fewer tokens; after them both do."""
    session = Forced(lambda held: ord("a") if len(held) == 5 else EOS)
    params = SamplingParams(temperature=0, min_tokens=3)
    answer = complete(session, Pieces(), [65], params)
    assert ([0, 0, 0], "stop", EOS) == (answer.token_ids, answer.finish_reason, answer.stop_reason)
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[ord("x")], stop=["x", "b"])
    answer = both_ways(lambda: text_session("abcab"), Pieces(), params)
    assert ("abca", "b") == (answer.text, answer.stop_reason)
    answer = both_ways(lambda: text_session("aab"), Pieces(), params)
    assert ("aa", "b") == (answer.text, answer.stop_reason)


def test_a_stop_string_in_the_prompt_has_no_effect() -> None:
    """Neither a stop string inside the prompt nor one that the prompt begins ends the answer."""
    prompt = list(b"one two")
    session = forced(list(b"o three"), n_prompt=len(prompt))
    answer = complete(session, Pieces(), prompt, SamplingParams(temperature=0, stop=["two", "twoo"]))
    assert ("o three", EOS) == (answer.text, answer.stop_reason)


def test_a_stop_string_that_the_last_flush_completes() -> None:
    """A character cut short by the end of the tokens is shown as U+FFFD, unless that completes a stop string."""
    answer = both_ways(lambda: forced(b"a\xf0\x9f"), Pieces(), GREEDY)
    assert ("a�", EOS) == (answer.text, answer.stop_reason)
    answer = both_ways(lambda: forced(b"a\xf0\x9f"), Pieces(), SamplingParams(temperature=0, stop="�"))
    assert ("a", "�") == (answer.text, answer.stop_reason)


def test_half_a_character_never_shows_and_never_stalls() -> None:
    """Each chunk holds whole characters, as soon as they are whole; a broken byte does not hold up what follows."""
    chunks = list(stream(text_session("aé🦙b"), Pieces(), [65], GREEDY))
    assert ["a", "", "é", "", "", "", "🦙", "b", ""] == [c.text for c in chunks]
    chunks = list(stream(forced(b"\xf0bc"), Pieces(), [65], GREEDY))
    assert ["", "�b", "c", ""] == [c.text for c in chunks]


# ---------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize("end", [0, 2])
def test_every_end_of_generation_token_ends_the_answer(end: int) -> None:
    """The token's text is not shown, its id is the stop reason and not among the tokens."""
    vocabulary = Pieces(eog=[0, 2, 4])
    answer = both_ways(lambda: Forced(lambda held: [*b"hi", end][len(held) - 1]), vocabulary, GREEDY)
    assert ("hi", list(b"hi"), "stop", end) == (
        answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason,
    )  # fmt: skip
    assert 2 == answer.usage.completion_tokens


def test_stop_token_ids_end_the_answer_too() -> None:
    """A token id asked for stops like an end token; the model's own end tokens still do."""
    params = SamplingParams(temperature=0, stop_token_ids=[ord("c"), ord("x")])
    answer = both_ways(lambda: text_session("abcd"), Pieces(), params)
    assert ("ab", "stop", ord("c")) == (answer.text, answer.finish_reason, answer.stop_reason)
    assert EOS == complete(text_session("ab"), Pieces(), [65], params).stop_reason


def test_ignore_eos_never_chooses_an_end_token() -> None:
    """With ignore_eos the next best token is taken and the answer goes on to its length."""
    answer = both_ways(
        lambda: text_session("ab"), Pieces(), SamplingParams(temperature=0, ignore_eos=True, max_tokens=5)
    )
    assert ("length", None, 5) == (answer.finish_reason, answer.stop_reason, len(answer.token_ids))
    assert EOS not in answer.token_ids


@pytest.mark.parametrize(("max_tokens", "text"), [(0, ""), (1, "a"), (3, "abc")])
def test_max_tokens(max_tokens: int, text: str) -> None:
    """No more tokens than asked for are chosen; text held back comes out; the last token costs no computation."""
    session = text_session("abcd")
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="cde")
    answer = complete(session, Pieces(), [65], params)
    assert (text, "length", None, max_tokens) == (
        answer.text, answer.finish_reason, answer.stop_reason, answer.usage.completion_tokens,
    )  # fmt: skip
    assert max(1, max_tokens) == len(session.calls)
    assert text == "".join(c.text for c in stream(text_session("abcd"), Pieces(), [65], params))


def test_the_end_of_the_context_is_a_length() -> None:
    """Prompt and answer together fill the context and no more; a prompt that fills it leaves no answer."""
    for n_prompt, expected in ((5, 3), (8, 0)):
        session = Forced(lambda held: 97, n_ctx=8)
        answer = complete(session, Pieces(), [65] * n_prompt, GREEDY)
        assert ("length", expected, 8) == (answer.finish_reason, len(answer.token_ids), answer.usage.total_tokens)
        assert session.n_past() <= 8


def test_a_cache_that_others_filled_is_a_length_too() -> None:
    """Where sequences share their room and none is left, the answer ends with the tokens it has."""
    session = text_session("abcd")
    decode = session.decode

    def crowded(token_ids: Sequence[int], *, seq_id: int = 0) -> np.ndarray:
        if len(session.calls) == 3:
            raise ContextLengthError("no room for 1 more token")
        return decode(token_ids, seq_id=seq_id)

    session.decode = crowded  # type: ignore[method-assign]
    answer = complete(session, Pieces(), [65], GREEDY)
    assert ("abc", "length", None) == (answer.text, answer.finish_reason, answer.stop_reason)


def test_bad_requests_are_refused_at_once() -> None:
    """A prompt too long, an empty one and an impossible stop token fail when asked for, before anything is computed."""
    session = Forced(lambda held: 97, n_ctx=8)
    for prompt, params, error, message in [
        ([65] * 9, GREEDY, ContextLengthError, "9 tokens.* 8"),
        ([], GREEDY, SamplingError, "no tokens"),
        ([65], SamplingParams(stop_token_ids=[1, 257]), SamplingError, r"stop_token_ids\[1\]: 257"),
        ([65], SamplingParams(banned_token_ids=[257]), SamplingError, "banned_token_ids: 257"),
        ([65], SamplingParams(logit_bias={300: 1}), SamplingError, "logit_bias: 300"),
        (["a"], GREEDY, TypeError, "str"),
        ([1.0], GREEDY, TypeError, "float"),
    ]:
        with pytest.raises(error, match=message):
            stream(session, Pieces(), prompt, params)
    with pytest.raises(ContextLengthError):
        complete_all(session, Pieces(), [[65], [65] * 9], GREEDY)
    assert [] == session.calls


# --------------------------------------------------------------------------------------- results beside the text


def test_usage_timings_and_seed() -> None:
    """Counts are exact, times are positive and leave out the reader's, the seed is the one used."""
    prompt = [65, 66, 67]
    chunks = []
    for chunk in stream(forced(b"abcd", n_prompt=3), Pieces(), prompt, SamplingParams(seed=0, top_k=1)):
        chunks.append(chunk)
        time.sleep(0.02)
    answer = chunks[-1].completion
    assert answer is not None
    assert Usage(3, 4, cached_tokens=0, cache_miss_reason="the sequence was empty") == answer.usage
    assert answer.usage.total_tokens == 7
    assert 0 == answer.seed
    t = answer.timings
    assert t.ttft_s is not None
    assert 0 < t.prompt_s <= t.ttft_s
    assert 0 < t.decode_s < 0.02
    assert t.decode_tokens_per_s == pytest.approx(3 / t.decode_s)
    assert t.prompt_tokens_per_s == pytest.approx(3 / t.prompt_s)


def test_an_answer_is_taken_apart() -> None:
    """What the model wrote for itself and for tools is there beside the text, which keeps all of it."""
    text = '<think>Rain?</think>Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Brest"}}</tool_call>'
    completion = complete(text_session(text), Pieces(), [1], GREEDY)
    assert completion.text == completion.answer.raw == text
    assert (completion.answer.reasoning, completion.answer.content) == ("Rain?", "Let me see.")
    assert [(call.name, call.arguments) for call in completion.answer.tool_calls] == [("weather", {"city": "Brest"})]


def test_log_probabilities_come_with_each_token() -> None:
    """logprobs=n gives each token its own and the n likeliest; without it there are none."""
    params = SamplingParams(temperature=0, logprobs=2, stop="cd")
    chunks = list(stream(text_session("abcd"), Pieces(), [65], params))
    answer = chunks[-1].completion
    assert answer is not None
    assert answer.logprobs is not None
    row = np.zeros(257, np.float32)
    row[97] = 1
    assert token_logprob(row, 97, 2) == answer.logprobs[0]
    assert answer.token_ids == [p.token_id for p in answer.logprobs]
    assert answer.logprobs == [p for c in chunks for p in c.logprobs or []]
    assert complete(text_session("ab"), Pieces(), [65], GREEDY).logprobs is None


def test_the_repeat_penalty_sees_the_prompt() -> None:
    """A token of the prompt counts as seen."""

    class Tie(Forced):
        def decode(self, token_ids: Sequence[int], *, seq_id: int = 0) -> np.ndarray:
            row = super().decode(token_ids, seq_id=seq_id)
            row[0, [66, 67]] = 1, 0.9
            return row

    params = SamplingParams(temperature=0, repeat_penalty=2.0, max_tokens=1)
    assert "C" == complete(Tie(lambda held: 67), Pieces(), [66], params).text
    assert "B" == complete(Tie(lambda held: 67), Pieces(), [65], params).text


def flat() -> Forced:
    """A session whose logits favour nothing much: what comes out is the seed's doing."""
    session = Forced(lambda held: len(held) % 256)
    decode = session.decode
    session.decode = lambda ids, *, seq_id=0: decode(ids, seq_id=seq_id) * 0.01  # type: ignore[method-assign]
    return session


class Undecided(Forced):
    """Prefers z, and a after it."""

    def __init__(self) -> None:
        super().__init__(lambda held: ord("z"))

    def decode(self, token_ids: Sequence[int], *, seq_id: int = 0) -> np.ndarray:
        row = super().decode(token_ids, seq_id=seq_id)
        row[0, ord("a")] = 0.5
        return row


def test_dry_sees_the_prompt_and_the_vocabularys_breakers() -> None:
    """What would go on with a repetition in the prompt is not chosen, unless a breaker cuts the repetition short."""
    params = SamplingParams(temperature=0, dry_multiplier=2, max_tokens=1)
    none = SamplingParams(temperature=0, dry_multiplier=2, max_tokens=1, dry_sequence_breakers=())
    for prompt, p, text in (
        (b"xyz xy", params, "a"), (b"x:yz x:y", params, "z"), (b"x:yz x:y", none, "a"), (b"xyz y", none, "z"),
    ):  # fmt: skip
        assert text == complete(Undecided(), Pieces(), list(prompt), p).text, prompt


def test_one_seed_gives_one_answer_in_every_situation() -> None:
    """The same on a used session, on a fresh one, after an unrelated call, streamed or not; another seed differs."""
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, max_tokens=30)
    session = flat()
    first = complete(session, Pieces(), [65, 66], params)
    again = complete(session, Pieces(), [65, 66], params)
    complete(session, Pieces(), [67], GREEDY)
    later = complete(session, Pieces(), [65, 66], params)
    fresh = complete(flat(), Pieces(), [65, 66], params)
    *_, streamed = stream(flat(), Pieces(), [65, 66], params)
    assert streamed.completion is not None
    for answer in (again, later, fresh, streamed.completion):
        assert first.token_ids == answer.token_ids
    free = [complete(flat(), Pieces(), [65, 66], SamplingParams(max_tokens=30, top_k=0, top_p=1.0)) for _ in range(2)]
    assert free[0].seed != free[1].seed
    assert free[0].token_ids != free[1].token_ids


# -------------------------------------------------------------------------------------------------- the session


def test_prompts_one_after_another_equal_a_fresh_session() -> None:
    """The same prompt, a shorter, a changed, a continued and an unrelated one give what a new session gives."""
    p = list(b"The quick brown fox")
    params = SamplingParams(temperature=0, max_tokens=16)
    session = counter()
    first = complete(session, Pieces(), p, params)
    changed = [*p[:9], 120, *p[10:]]
    continued = p + first.token_ids + list(b" why?")
    for prompt, cached in [(p, len(p) - 1), (p[:-1], len(p) - 2), (changed, 9), (continued, None), (list(b"Other"), 0)]:
        answer = complete(session, Pieces(), prompt, params)
        assert complete(counter(), Pieces(), prompt, params).token_ids == answer.token_ids
        assert cached is None or cached == answer.usage.cached_tokens


def test_a_conversation_computes_only_what_is_new() -> None:
    """An answer's tokens stay in the session: the next turn computes its last token and what follows."""
    session = counter()
    params = SamplingParams(temperature=0, max_tokens=4)
    p = list(b"Hello")
    first = complete(session, Pieces(), p, params)
    session.calls.clear()
    turn = p + first.token_ids + list(b"more")
    answer = complete(session, Pieces(), turn, params)
    assert turn[len(p) + 3 :] == session.calls[0]
    assert len(p) + 3 == answer.usage.cached_tokens


def test_a_prefix_that_cannot_be_kept_is_computed_again() -> None:
    """Where the session cannot be cut to the common beginning, the whole prompt is computed and the result says so."""
    session = counter()
    trim = session.trim

    def windowed(seq_id: int, n: int) -> None:
        if n:
            raise ContextLengthError("its windowed layers have lost that")
        trim(seq_id, n)

    params = SamplingParams(temperature=0, max_tokens=4)
    first = complete(session, Pieces(), [65, 66], params)
    session.trim = windowed  # type: ignore[method-assign]
    again = complete(session, Pieces(), [65, 66], params)
    assert (first.token_ids, 0) == (again.token_ids, again.usage.cached_tokens)
    assert "its windowed layers have lost that" == again.usage.cache_miss_reason


def test_sequences_are_kept_apart() -> None:
    """Two streams on two sequences of one session take turns without touching each other."""
    params = SamplingParams(temperature=0, max_tokens=8)
    prompts = (list(b"one"), list(b"two"))
    alone = [complete(counter(), Pieces(), p, params).token_ids for p in prompts]
    session = counter()
    streams = [stream(session, Pieces(), p, params, seq_id=i) for i, p in enumerate(prompts)]
    together: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for tokens, chunk in zip(together, pair, strict=True):
            tokens += chunk.token_ids
    assert alone == together


def test_a_stream_left_midway_leaves_a_usable_session() -> None:
    """Closed, dropped or never begun: the next answer is what a fresh session gives."""
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = complete(counter(), Pieces(), [65, 66], params).token_ids
    session = counter()
    stream(session, Pieces(), [65, 66], params)
    closed = stream(session, Pieces(), [65, 66], params)
    next(closed)
    closed.close()
    assert [] == list(closed)
    dropped = stream(session, Pieces(), [65, 66], params)
    next(dropped), next(dropped)
    del dropped
    gc.collect()
    assert expected == complete(session, Pieces(), [65, 66], params).token_ids


def test_a_broken_row_is_an_error_and_the_session_goes_on() -> None:
    """NaN in the logits ends the stream with an error; the session still answers afterwards."""
    session = counter()
    decode = session.decode
    session.decode = lambda ids, *, seq_id=0: decode(ids, seq_id=seq_id) * np.float32(np.nan)  # type: ignore[method-assign]
    with pytest.raises(SamplingError, match="NaN"):
        complete(session, Pieces(), [65, 66], GREEDY)
    session.decode = decode  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = complete(counter(), Pieces(), [65, 66], params).token_ids
    assert expected == complete(session, Pieces(), [65, 66], params).token_ids


def test_a_sequence_changed_by_somebody_else_is_an_error() -> None:
    """A stream whose sequence grew or shrank under it says so and shows no token computed from it."""
    for meddle in (lambda s: s.decode([70]), lambda s: s.trim(0, 1)):
        session = counter()
        chunks = stream(session, Pieces(), [65, 66], GREEDY)
        next(chunks)
        meddle(session)
        with pytest.raises(GgufpyError, match=r"sequence 0 was changed .* expected 2 tokens"):
            next(chunks)


def test_prompts_of_a_list_are_answered_in_order() -> None:
    """complete_all gives what each prompt gives alone."""
    params = SamplingParams(temperature=0, max_tokens=6)
    prompts = [list(b"a"), list(b"bb"), list(b"a")]
    alone = [complete(counter(), Pieces(), p, params).text for p in prompts]
    assert alone == [c.text for c in complete_all(counter(), Pieces(), prompts, params)]
    assert [] == complete_all(counter(), Pieces(), [], params)


# ------------------------------------------------------------------------------------------------------ threads


def test_cancel_from_another_thread() -> None:
    """Setting the event ends the answer before its next token, with the text so far and everything held back."""
    cancel = threading.Event()
    session = Forced(lambda held: 97)
    chunks = stream(session, Pieces(), [65], SamplingParams(temperature=0, stop="aaaaaaaaab"), cancel=cancel)
    seen = [next(chunks) for _ in range(3)]
    thread = threading.Thread(target=cancel.set)
    thread.start()
    thread.join()
    seen += list(chunks)
    answer = seen[-1].completion
    assert answer is not None
    assert ("aaa", "cancelled", None, 3) == (
        answer.text, answer.finish_reason, answer.stop_reason, len(answer.token_ids),
    )  # fmt: skip
    assert 3 == len(session.calls)


def test_cancelled_before_it_began() -> None:
    """An event that is set already gives an empty answer and computes nothing."""
    cancel = threading.Event()
    cancel.set()
    session = counter()
    answer = complete(session, Pieces(), [65], GREEDY, cancel=cancel)
    assert ("", [], "cancelled", None) == (
        answer.text, answer.token_ids, answer.finish_reason, answer.timings.ttft_s,
    )  # fmt: skip
    assert [] == session.calls


def test_a_stream_advanced_from_two_threads_is_a_clean_error() -> None:
    """The second thread gets a ValueError; the first gets its tokens undisturbed."""
    inside, go_on = threading.Event(), threading.Event()

    def choose(held: list[int]) -> int:
        inside.set()
        go_on.wait(5)
        return 97

    chunks = stream(Forced(choose), Pieces(), [65], SamplingParams(temperature=0, max_tokens=3))
    got: list[CompletionChunk] = []
    thread = threading.Thread(target=lambda: got.extend(chunks))
    thread.start()
    assert inside.wait(5)
    with pytest.raises(ValueError, match="already executing"):
        next(chunks)
    go_on.set()
    thread.join()
    assert "aaa" == "".join(c.text for c in got)


# -------------------------------------------------------------------------------------------------------- speed


def test_each_token_is_detokenized_once() -> None:
    """Work grows with the number of tokens, not with its square: every token is pushed once, the prompt's never."""
    vocabulary = Pieces()
    complete(Forced(lambda held: 97), vocabulary, [65] * 500, SamplingParams(temperature=0, max_tokens=1000, stop="ab"))
    assert 1000 == vocabulary.pushed


def test_a_step_costs_little_beside_the_computation() -> None:
    """Greedy on a 49,152-token row: what a step costs outside decode stays far below a millisecond."""

    class Constant(Forced):
        row = np.zeros((1, 49152), np.float32)

        def decode(self, token_ids: Sequence[int], *, seq_id: int = 0) -> np.ndarray:
            self.held.setdefault(seq_id, []).extend(token_ids)
            return self.row

    Constant.row[0, 97] = 1
    best = min(
        complete(Constant(lambda held: 97, n_ctx=10**6), Pieces(n_vocab=49152), [65], params).timings.decode_s / 1000
        for params in [SamplingParams(temperature=0, max_tokens=1000)] * 5
    )
    assert best < 200e-6


# --------------------------------------------------------------------------------------------------- real model


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[object]:
    from ggufpy.model import Model

    with Model.load(smollm2_path) as model:
        yield model


ONE_THREAD = {"n_ctx": 512, "n_threads": 1}  # several would wait for each other on a busy machine


def alone(model, ids: Sequence[int], n: int = 16) -> list[int]:
    """Answer greedily in a session of its own."""
    with model.session(**ONE_THREAD) as session:
        return complete(session, model.tokenizer, ids, SamplingParams(temperature=0, max_tokens=n)).token_ids


def test_smollm2_reused_sessions_equal_fresh_ones(model) -> None:
    """The same prompt, a shorter, an edited, a continued and an unrelated one: the tokens of a fresh session."""
    encode = model.tokenizer.encode
    p = encode("The capital of France is the city of")
    edited = [*p[:4], *encode(" Spain"), *p[5:]]
    params = SamplingParams(temperature=0, max_tokens=16)
    with model.session(**ONE_THREAD) as session:
        first = complete(session, model.tokenizer, p, params)
        continued = p + first.token_ids + encode(" And what of Italy?")
        for prompt in (p, p[:-1], edited, continued, encode("Once upon a time"), p):
            assert alone(model, prompt) == complete(session, model.tokenizer, prompt, params).token_ids


def test_smollm2_one_seed_one_answer(model) -> None:
    """A seed gives the same tokens twice, in a fresh session and streamed; none gives others."""
    ids = model.tokenizer.encode("Once upon a time")
    params = SamplingParams(seed=7, max_tokens=24)
    with model.session(**ONE_THREAD) as one, model.session(**ONE_THREAD) as two:
        first = complete(one, model.tokenizer, ids, params)
        *_, last = stream(two, model.tokenizer, ids, params)
        assert first.token_ids == last.completion.token_ids
        assert first.text == model.tokenizer.decode(first.token_ids)
        assert first.token_ids != complete(two, model.tokenizer, ids, SamplingParams(max_tokens=24)).token_ids


def test_smollm2_threads_with_sessions_of_their_own(model) -> None:
    """Four threads on one model each get what they get alone."""
    prompts = [model.tokenizer.encode(t) for t in ("The sun", "A dog", "In 1969", "Water is")]
    expected = [alone(model, ids, 8) for ids in prompts]
    got: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: alone(model, prompts[i], 8)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected == [got[i] for i in range(4)]


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        (ABC, "beta gamma", "alpha "), (ABC, "a be", "alph"), (ABC, ["gamma", "beta"], "alpha "),
        ([504, 36588, 30], "END..", "The END."), ([10813, 116, 243], "🦙", ""),
    ],
)  # fmt: skip
def test_smollm2_stop_strings_on_forced_tokens(model, tokens: list[int], stop: str | list[str], text: str) -> None:
    """The real vocabulary's tokens, forced: stop strings across tokens and inside a character; id 2 ends."""
    session = Forced(lambda held: [*tokens, 2][len(held) - 1], n_vocab=model.tokenizer.n_vocab)
    params = SamplingParams(temperature=0, stop=stop)
    chunks = list(stream(session, model.tokenizer, [504], params))
    assert text == "".join(c.text for c in chunks)
    assert "stop" == chunks[-1].finish_reason


@pytest.mark.parametrize("end", [0, 2])
def test_smollm2_end_tokens(model, end: int) -> None:
    """<|endoftext|> and <|im_end|> end an answer and do not show."""
    session = Forced(lambda held: [504, end][len(held) - 1], n_vocab=model.tokenizer.n_vocab)
    answer = complete(session, model.tokenizer, [504], GREEDY)
    assert ("The", end) == (answer.text, answer.stop_reason)
