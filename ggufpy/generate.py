"""From prompt ids to an answer, in three layers: logits → token ids → text → completion.

`Sampler` (sampling/) chooses a token from a row of logits, `TextAssembler` turns tokens into text that may be shown,
`Generation` puts both together into the chunks of one completion. It is fed with rows, by engine.py.
Knows no sessions, no files, no models and no templates: prompts come as token ids, chat's too.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, Protocol

from ggufpy.answers import Answer, parse_answer
from ggufpy.errors import ContextLengthError, SamplingError
from ggufpy.sampling import Floats, Sampler, SamplingParams, TokenLogprob, sequence_breakers, token_logprob

__all__ = [
    "Completion",
    "CompletionChunk",
    "DecodeStream",
    "FinishReason",
    "Generation",
    "TextAssembler",
    "TextDecoder",
    "Timings",
    "Usage",
]

FinishReason = Literal["stop", "length", "cancelled"]


# --------------------------------------------------------------------------------------- what is asked of others


class DecodeStream(Protocol):
    """Turn the tokens of one sequence into text, one by one."""

    def push(self, token_id: int, /) -> str:
        """Take a token and return the characters it completes."""

    def flush(self) -> str:
        """Return what is left of a character cut short."""


class TextDecoder(Protocol):
    """The part of a tokenizer that generation needs."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eog_token_ids(self) -> frozenset[int]: ...
    def decode_stream(self, *, continues: bool = False) -> DecodeStream: ...
    def token_to_piece(self, id: int, /) -> bytes: ...  # this and the next are needed for DRY's breakers alone
    def encode(self, text: bytes, /, *, add_special: bool) -> Sequence[int]: ...


# --------------------------------------------------------------------------------------------------- the results


@dataclass(frozen=True, slots=True)
class Usage:
    """Count tokens.

    cached_tokens      of the prompt's: were still in the session and were not computed again
    cache_miss_reason  why they are not all that the sequence held, or that it held none; None if they are
    draft_tokens       guessed ahead (speculation)
    accepted_tokens    guesses that were right: so many tokens needed no step of their own
    discarded_tokens   left out of the sequence to make room for new ones (a context shift)
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_miss_reason: str | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    discarded_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The tokens of prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Measure one completion, in seconds and tokens a second. The time that a stream's reader takes is left out.

    prompt_s    computing the prompt (less what was cached)     prompt_tokens_per_s    its speed
    ttft_s      from the start to the first token chosen; None without one
    decode_s    from the first token to the end                 decode_tokens_per_s    of the tokens after the first
    """

    prompt_s: float
    ttft_s: float | None
    decode_s: float
    prompt_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """Hold a finished answer.

    text            up to the stop string or the token that ended it, without it (with `include_stop` with the string)
    token_ids       the tokens chosen, without an ending token, with those that hold a stop string
    finish_reason   "stop" (a stop string or an ending token), "length" (max_tokens or the context's end), "cancelled"
    stop_reason     the stop string, or the id of the ending token; None unless finish_reason is "stop"
    seed            the seed used: the same prompt and parameters with it give the same tokens
    logprobs        one entry for each of token_ids, when asked for
    prompt_logprobs the same for the prompt's tokens; None is that of the first, as nothing stands before it
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    logprobs: list[TokenLogprob] | None
    usage: Usage
    timings: Timings
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def answer(self) -> Answer:
        """Take the text apart: reasoning, calls of tools, and what is left for people (`answers.parse_answer`)."""
        return parse_answer(self.text)


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """Hold the next piece of an answer. Over all chunks, text, token_ids and logprobs add up to the completion's.

    A token whose text cannot be shown yet (half a character, the start of a stop string) comes with an empty text.
    The last chunk, and no other, has a finish_reason and the whole `completion`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    completion: Completion | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended, in the last chunk."""
        return self.completion.finish_reason if self.completion else None

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the answer, in the last chunk."""
        return self.completion.stop_reason if self.completion else None


# ------------------------------------------------------------------------------------------------ tokens → text


class TextAssembler:
    """Turn token ids into text that may be shown: whole characters, and nothing that a stop string may still take.

    A stop string ends the text as soon as its last character is there, as if text came character by character: how
    tokens cut the text makes no difference. Of two that end together the longer wins. It is left out unless kept.
    """

    __slots__ = ("_decoder", "_held", "_keeps", "_longest", "_stops", "matched")

    def __init__(self, decoder: DecodeStream, stops: Iterable[str] = (), *, keeps: bool = False) -> None:
        """Start an empty text."""
        self._decoder = decoder
        self._keeps = keeps
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take a token and return the text that is safe to show. `matched` is then the stop string found, if any.

        What comes in while it may not stop is not looked at.
        """
        piece = self._decoder.push(token_id)
        return self._release(piece) if may_stop else piece

    def flush(self) -> str:
        """End the text and return what was held back."""
        return self._release(self._decoder.flush()) + self._held

    def _release(self, piece: str) -> str:
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        if found := [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]:
            end, start, self.matched = min(found)
            keep = end if self._keeps else start
            self._held = ""
        else:
            keep = self._safe_length(text)
            self._held = text[keep:]
        return text[:keep]

    def _safe_length(self, text: str) -> int:
        """Return where the longest ending of the text begins that could be the start of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)


# ------------------------------------------------------------------------------------------ rows → one completion


class Generation:
    """Carry one sequence from its prompt to its completion, a row of logits at a time."""

    def __init__(
        self,
        tokenizer: TextDecoder,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        n_ctx: int,
        shifts: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Check the request; nothing is computed yet.

        `n_ctx`: the tokens that the sequence has room for, the prompt's included. `shifts`: who feeds the rows makes
        room for more. `clock`: the time in seconds, which may leave out what others spend. Raises ContextLengthError
        for a longer prompt, SamplingError for an empty one or a token id outside the vocabulary.
        """
        params = params or SamplingParams()
        self.history: list[int] = list(map(operator.index, prompt_ids))  # the prompt, then the tokens chosen
        self.n_prompt = len(self.history)
        self.n_cached = 0
        self.cache_miss_reason: str | None = None
        self.n_drafted = self.n_accepted = self.n_discarded = 0
        self._limit = _limit(self.n_prompt, params.max_tokens, n_ctx, shifts)
        self._ends = _ending_tokens(tokenizer, params)
        self._sampler = _sampler(tokenizer, params, self._ends, self.n_prompt)
        self._assembler = TextAssembler(tokenizer.decode_stream(continues=True), params.stop, keeps=params.include_stop)
        self._least = self.n_prompt + params.min_tokens
        self._n_vocab = tokenizer.n_vocab
        self.has_processors = bool(params.logits_processors)
        self._n_top, self._n_prompt_top = params.logprobs, params.prompt_logprobs
        self._prompt_logprobs: list[TokenLogprob | None] = [None]  # nothing stands before the first token
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._clock = _Clock(clock)

    @property
    def full(self) -> bool:
        """Say whether no further token may be chosen."""
        return len(self.history) >= self._limit

    @property
    def room(self) -> int:
        """The tokens that may still be chosen."""
        return self._limit - len(self.history)

    @property
    def reads_prompt(self) -> bool:
        """Say whether `read_prompt` wants the rows of all the prompt's tokens."""
        return self._n_prompt_top is not None

    def read_prompt(self, rows: Floats) -> None:
        """Take the rows after the prompt's next tokens, [n, n_vocab or more]; of that after its last one nothing."""
        if self._n_prompt_top is not None:
            first = len(self._prompt_logprobs)
            for row, token in zip(rows, self.history[first : self.n_prompt], strict=False):
                self._prompt_logprobs.append(token_logprob(row[: self._n_vocab], token, self._n_prompt_top))

    def start(self) -> None:
        """Start the clock; a prompt may be started again."""
        self._prompt_logprobs = [None]
        self._clock.started = self._clock.now()

    def prompt_done(self, n_cached: int, cache_miss_reason: str | None = None) -> None:
        """Note that the prompt is computed, all but the `n_cached` tokens that were there, and why they are no more."""
        self.n_cached, self.cache_miss_reason = n_cached, cache_miss_reason
        self._clock.prompt_done = self._clock.now()

    def advance(self, row: Floats, best: int | None = None) -> CompletionChunk:
        """Choose the next token from the logits after the last one, float32 [n_vocab or more].

        `best`: where the largest of the first n_vocab is, if known.
        """
        token = self._sampler.sample(row, self.history, best=best)
        if self._clock.first_token is None:
            self._clock.first_token = self._clock.now()
        if token in self._ends:
            return self.finish("stop", token)
        self.history.append(token)
        logprobs = None
        if self._n_top is not None:
            logprobs = [token_logprob(row[: self._n_vocab], token, self._n_top)]
            self._logprobs += logprobs
        text = self._assembler.push(token, may_stop=len(self.history) >= self._least)
        if self._assembler.matched is not None:
            return self.finish("stop", self._assembler.matched, text, [token], logprobs)
        if self.full:
            return self.finish("length", None, text, [token], logprobs)
        self._text.append(text)
        return CompletionChunk(text, [token], logprobs)

    def finish(
        self,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        text: str = "",
        token_ids: Sequence[int] = (),
        logprobs: list[TokenLogprob] | None = None,
    ) -> CompletionChunk:
        """Return the last chunk: the piece given, what was held back, and the whole completion."""
        if self._assembler.matched is None:
            text += self._assembler.flush()
            if self._assembler.matched is not None:
                reason, stop_reason = "stop", self._assembler.matched
        self._text.append(text)
        completion = Completion(
            text="".join(self._text),
            token_ids=self.history[self.n_prompt :],
            finish_reason=reason,
            stop_reason=stop_reason,
            seed=self._sampler.seed,
            logprobs=None if self._n_top is None else self._logprobs,
            usage=Usage(
                self.n_prompt,
                len(self.history) - self.n_prompt,
                self.n_cached,
                self.cache_miss_reason,
                self.n_drafted,
                self.n_accepted,
                self.n_discarded,
            ),
            timings=self._clock.timings(self.n_prompt - self.n_cached, len(self.history) - self.n_prompt),
            prompt_logprobs=self._prompt_logprobs if self.reads_prompt else None,
        )
        return CompletionChunk(text, list(token_ids), logprobs, completion)


def _limit(n_prompt: int, max_tokens: int | None, n_ctx: int, shifts: bool) -> int:
    """Return how many tokens the sequence may have in the end."""
    if not n_prompt:
        raise SamplingError("the prompt has no tokens, so there are no logits to choose from")
    if n_prompt > n_ctx:
        raise ContextLengthError(f"the prompt has {n_prompt} tokens, but the context holds {n_ctx}")
    most = sys.maxsize if shifts else n_ctx
    return most if max_tokens is None else min(most, n_prompt + max_tokens)


def _ending_tokens(tokenizer: TextDecoder, params: SamplingParams) -> frozenset[int]:
    for i, token in enumerate(params.stop_token_ids):
        if token >= tokenizer.n_vocab:
            raise SamplingError(f"stop_token_ids[{i}]: {token} is not below the vocabulary's size, {tokenizer.n_vocab}")
    return tokenizer.eog_token_ids | frozenset(params.stop_token_ids)


def _sampler(tokenizer: TextDecoder, params: SamplingParams, ends: frozenset[int], n_prompt: int) -> Sampler:
    """Tell a sampler what of the vocabulary it has to know."""
    return Sampler(
        params,
        tokenizer.n_vocab,
        banned=tokenizer.eog_token_ids if params.ignore_eos else (),
        ends=ends,
        n_prompt=n_prompt,
        breakers=sequence_breakers(tokenizer, params.dry_sequence_breakers) if params.dry_multiplier else None,
    )


class _Clock:
    """Times of one generation, as `now` gives them."""

    __slots__ = ("first_token", "now", "prompt_done", "started")

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.started = self.prompt_done = now()
        self.first_token: float | None = None

    def timings(self, n_computed: int, n_chosen: int) -> Timings:
        """Return the times up to now."""
        prompt_s = max(0.0, self.prompt_done - self.started)
        first = self.first_token
        decode_s = 0.0 if first is None else self.now() - first
        return Timings(
            prompt_s=prompt_s,
            ttft_s=None if first is None else first - self.started,
            decode_s=decode_s,
            prompt_tokens_per_s=n_computed / prompt_s if prompt_s else 0.0,
            decode_tokens_per_s=(n_chosen - 1) / decode_s if n_chosen > 1 and decode_s else 0.0,
        )
