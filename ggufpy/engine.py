"""Many answers from one session: which sequence gets which request, and what is computed next (continuous batching).

`Engine.step` computes one micro-batch, of prompts or of one more token for each running sequence, and returns the
chunks that come of it. All generation goes through it: one prompt, lists, streams and asynchronous calls.
This file owns places, order, shared prefixes, speculation's bookkeeping and cancelling. What a row of logits becomes
is generate.py's, computing is the session's. Knows no files, models or templates: prompts are token ids.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ggufpy.errors import ContextLengthError, GgufpyError
from ggufpy.generate import CompletionChunk, Generation, TextDecoder
from ggufpy.reuse import common_prefix, keep_prefix
from ggufpy.sampling import Floats, SamplingParams

__all__ = ["Drafter", "Engine", "Request", "Sequences", "Step", "Stop", "stream"]

Step = list[tuple[int, CompletionChunk]]
"""What a step of several answers brings: the answer's number and its next chunk, each as often as it has one."""

MIN_SHARED = 4
"""A prefix shorter than this, such as the first token of all prompts, is computed again."""
MIN_SAVED = 64
"""Prompts wait for one that shares their prefix where that saves more tokens in all than a computation costs."""
MAX_SEED = 2**32 - 1


T = TypeVar("T")


# --------------------------------------------------------------------------------------- what is asked of others


class Drafter(Protocol):
    """Guess how one sequence goes on. Right guesses save steps, wrong ones change nothing but time."""

    def propose(self, history: Sequence[int], n_max: int, /) -> Sequence[int]:
        """Return at most n_max token ids that may follow the history (the prompt and the tokens chosen).

        From call to call the history only grows, so it says which of the last guesses were right.
        """

    def close(self) -> None:
        """Free what the drafter holds: no further call comes."""


class Sequences(Protocol):
    """The part of a session that the engine needs."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held, several calls are one to other threads; the holder may enter it again."""

    @property
    def n_seq_max(self) -> int:
        """The number of sequences."""

    @property
    def n_ctx_seq(self) -> int:
        """The tokens that one sequence has room for."""

    @property
    def n_ubatch(self) -> int:
        """The most tokens computed together."""

    def tokens(self, seq_id: int = 0) -> Sequence[int]:
        """Return the token ids that the sequence holds, in order."""

    def n_past(self, seq_id: int = 0) -> int:
        """Return how many tokens the sequence holds."""

    def trim(self, seq_id: int, n: int) -> None:
        """Keep the first n tokens of the sequence. ContextLengthError, with nothing changed, where that cannot be."""

    def fork(self, src: int, dst: int) -> None:
        """Make sequence dst a copy of sequence src."""

    def check_shift(self) -> None:
        """Raise UnsupportedArchitectureError or ContextLengthError where no sequence can be shifted."""

    def shift(self, seq_id: int, n_keep: int, n_discard: int) -> None:
        """Drop n_discard tokens behind the first n_keep. ContextLengthError, with nothing changed, where it cannot."""

    def decode_batch(self, batch: Iterable[tuple[int, Sequence[int], Any]], *, copy: bool = True) -> Sequence[Floats]:
        """Append tokens to sequences and return the logits of the wanted ones, each float32 [n_wanted, n_vocab]."""

    def argmax(self, rows: Sequence[Floats]) -> list[int]:
        """Return the place of the largest of each row, or of its first NaN; float32 [n], all of one size."""

    def cancel(self) -> None:
        """Stop what another thread computes: its call there raises. Where nothing computes nothing happens."""


# ------------------------------------------------------------------------------------------------------- requests


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to its completion."""

    index: int  # among those of a call
    generation: Generation
    cancel: threading.Event | None = None
    drafter: Drafter | None = None
    n_keep: int | None = None  # a full sequence drops tokens behind so many
    seq_id: int = -1  # its place, once it has one
    n_past: int = 0  # the tokens of its history that its place holds
    n_cached: int = 0  # those that were not computed for it
    cache_miss_reason: str | None = None  # why they are no more
    leader: Request | None = None  # who computes the first `n_shared` tokens of its prompt
    n_shared: int = 0
    prompt: npt.NDArray[np.int64] = field(init=False)
    ticket: object = field(default_factory=object, init=False)

    def __post_init__(self) -> None:
        self.prompt = np.array(self.generation.history)

    @property
    def cancelled(self) -> bool:
        """Say whether nobody waits for the answer any more."""
        return self.cancel is not None and self.cancel.is_set()

    def draft(self, n_max: int) -> list[int]:
        """Return what may follow the last token, at most n_max."""
        if self.drafter is None:
            return []
        n_max = min(n_max, self.generation.room - 1)  # the token chosen after the last draft needs room too
        return [] if n_max < 1 else list(self.drafter.propose(self.generation.history, n_max))[:n_max]


_writers: WeakKeyDictionary[Sequences, dict[int, object]] = WeakKeyDictionary()
"""Who generates on each sequence: the ticket of the last request that began to."""


class _Clock:
    """The time that passes in steps, and not between them."""

    __slots__ = ("_idle", "_left")

    def __init__(self) -> None:
        self._idle, self._left = 0.0, perf_counter()

    def now(self) -> float:
        """Return the time in seconds."""
        return perf_counter() - self._idle

    def pause(self) -> None:
        """Leave out what comes."""
        self._left = perf_counter()

    def go_on(self) -> None:
        """Count again."""
        self._idle += perf_counter() - self._left


# --------------------------------------------------------------------------------------------------------- engine


class Engine:
    """Runs requests on the sequences of a session, as many at a time as it has places.

    Running sequences are kept neighbours by number, since only those are computed together where each has a stream of
    its own. A place that gets free goes to the next in the queue; when none waits, the last sequence moves into it.
    Prompts come before tokens only where nothing runs yet, so that all of a list start together.
    """

    def __init__(self, session: Sequences, tokenizer: TextDecoder, seq_ids: range = range(1)) -> None:
        """Use these sequences of a session. What they hold is reused where a prompt begins with it, else dropped."""
        self._session, self._tokenizer, self._seq_ids = session, tokenizer, seq_ids
        self._writers = _writers.setdefault(session, {})
        self._waiting: deque[Request] = deque()
        self._prompts: list[Request] = []  # those in computation
        self._running: list[Request] = []  # both by seq_id
        self._starting = False  # nothing ran when these prompts came
        self._last_was_prompts = False  # what the last step computed
        self._crowded = False  # there was no room for a prompt; it comes with the end of another
        self._clock = _Clock()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        index: int = 0,
        cancel: threading.Event | None = None,
        drafter: Drafter | None = None,
        n_keep: int | None = None,
    ) -> Request:
        """Check a request and put it into the queue.

        With `n_keep` a sequence that is full makes room: it drops half of what stands behind its first n_keep tokens.
        Raises as `Generation` and `Session.check_shift` do.
        """
        n_ctx, shifts, clock = self._session.n_ctx_seq, n_keep is not None, self._clock.now
        if shifts:
            self._session.check_shift()
        generation = Generation(self._tokenizer, prompt_ids, params, n_ctx=n_ctx, shifts=shifts, clock=clock)
        request = Request(index, generation, cancel, drafter, n_keep)
        self._waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Say whether a request is unfinished."""
        return bool(self._waiting or self._prompts or self._running)

    def step(self) -> list[tuple[Request, CompletionChunk]]:
        """Compute the next micro-batch and return the chunks, in the order in which they came.

        Prompts and running sequences take turns. GgufpyError when somebody else changed a sequence.
        """
        with self._session.lock:
            self._clock.go_on()
            try:
                chunks = self._end_cancelled()
                self._admit()
                self._starting &= bool(self._prompts)
                if self._prompts and (self._starting or not self._running or not self._last_was_prompts):
                    chunks += self._compute_prompts()
                    self._last_was_prompts = True
                elif self._running:
                    chunks += self._compute_tokens()
                    self._last_was_prompts = False
                return chunks
            finally:
                self._clock.pause()

    # ---------------------------------------------------------------------------------------------------- places

    def _admit(self) -> None:
        """Give free places to those who wait, the shorter prompts first: what is left of the longer are neighbours."""
        if not self._waiting or self._crowded:
            return
        taken = {request.seq_id for request in (*self._prompts, *self._running)}
        free = [seq_id for seq_id in self._seq_ids if seq_id not in taken]
        if not free:
            return
        self._starting = not taken
        new = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        new.sort(key=lambda request: len(request.prompt))
        for request, seq_id in zip(new, free, strict=False):
            self._place(request, seq_id)
        self._share(new)
        self._prompts = sorted((*self._prompts, *new), key=lambda request: request.seq_id)

    def _place(self, request: Request, seq_id: int) -> None:
        """Give a request a place, with as much of its prompt as this or another sequence has already."""
        session, prompt, last = self._session, request.prompt, len(request.prompt) - 1
        request.seq_id = seq_id
        request.generation.start()
        self._writers[seq_id] = request.ticket
        self._keep(request)
        if request.generation.reads_prompt:
            return
        others = [(min(last, common_prefix(other.prompt, prompt)), other.seq_id) for other in self._running]
        n, best = max(others, default=(0, -1))
        if n >= request.n_past + MIN_SHARED:
            session.fork(best, seq_id)
            self._keep(request)

    def _keep(self, request: Request) -> None:
        """Cut a place to what the request's prompt begins with."""
        if request.generation.reads_prompt:
            self._session.trim(request.seq_id, 0)
            request.n_past, request.cache_miss_reason = 0, "prompt_logprobs asks for what comes of every token"
        else:
            found = keep_prefix(self._session, request.generation.history, request.seq_id)
            request.n_past, request.cache_miss_reason = found
        request.n_cached = request.n_past

    def _share(self, new: list[Request]) -> None:
        """Let prompts that begin alike wait until the first of them has computed what they share."""
        saved: dict[Request, int] = {}
        for i, request in enumerate(new):
            last = 0 if request.generation.reads_prompt else len(request.prompt) - 1
            for other in new[:i]:
                n = min(last, common_prefix(other.prompt, request.prompt))
                if n > max(request.n_past, request.n_shared) and n >= MIN_SHARED:
                    request.leader, request.n_shared = other, n
            if request.leader:
                saved[request.leader] = saved.get(request.leader, 0) + request.n_shared - request.n_past
        for request in new:
            if request.leader and saved[request.leader] < MIN_SAVED:
                request.leader, request.n_shared = None, 0

    def _follow(self) -> None:
        """Give those whose shared prefix is computed a copy of it."""
        for request in self._prompts:
            leader = request.leader
            if leader is None or leader.n_past < request.n_shared:
                continue
            request.leader = None
            self._session.fork(leader.seq_id, request.seq_id)
            self._keep(request)

    def _close_gaps(self) -> None:
        """Move the last sequences into the places of those that ended."""
        running = self._running
        if self._prompts:  # they will fill the gaps, or have
            return
        while running and running[-1].seq_id - running[0].seq_id >= len(running):
            taken = {request.seq_id for request in running}
            last = running.pop()
            gap = next(seq_id for seq_id in range(running[0].seq_id, last.seq_id) if seq_id not in taken)
            self._session.fork(last.seq_id, gap)
            self._session.trim(last.seq_id, 0)
            last.seq_id, self._writers[gap] = gap, last.ticket
            running.append(last)
            running.sort(key=lambda request: request.seq_id)

    # ------------------------------------------------------------------------------------------------- computing

    def _compute_prompts(self) -> list[tuple[Request, CompletionChunk]]:
        """Compute equally many tokens of each prompt, one micro-batch; those that are complete begin to run."""
        ready = [request for request in self._prompts if request.leader is None][: self._session.n_ubatch]
        left = min(self._next_stop(request) - request.n_past for request in ready)
        n = min(left, max(1, self._session.n_ubatch // len(ready)))
        batch = []
        for request in ready:
            stop = request.n_past + n
            self._check(request)
            last = stop == request.generation.n_prompt
            wanted = "all" if request.generation.reads_prompt else "last" if last else ()
            batch.append((request.seq_id, request.generation.history[stop - n : stop], wanted))
        try:
            rows = self._session.decode_batch(batch, copy=_is_shared(ready))
        except ContextLengthError:
            self._make_room_for(ready[-1])
            return []
        for request in ready:
            request.n_past += n
        self._follow()
        chunks: list[tuple[Request, CompletionChunk]] = []
        for request, its_rows in zip(ready, rows, strict=True):
            request.generation.read_prompt(its_rows)
            if request.n_past == request.generation.n_prompt:
                self._prompts.remove(request)
                self._running.append(request)
                chunks += self._begin(request, its_rows[-1])
        self._running.sort(key=lambda request: request.seq_id)
        return chunks

    def _next_stop(self, request: Request) -> int:
        """Return how far a prompt goes until somebody wants a copy, or to its end."""
        stops = [other.n_shared for other in self._prompts if other.leader is request]
        return min((len(request.prompt), *stops))

    def _begin(self, request: Request, row: Floats) -> list[tuple[Request, CompletionChunk]]:
        """Take the first token after a prompt."""
        generation = request.generation
        generation.prompt_done(request.n_cached, request.cache_miss_reason)
        chunk = generation.finish("length") if generation.full else generation.advance(row)
        return [(request, self._seen(request, chunk))]

    def _compute_tokens(self, *, drafting: bool = True) -> list[tuple[Request, CompletionChunk]]:
        """Compute one more token of each running sequence, and what may follow it where only one runs.

        Several keep the kernels as busy as guesses would, and each of their tokens is sure to count.
        """
        self._close_gaps()
        running, batch = self._running[:], []
        n_most = self._session.n_ubatch - 1 if drafting and len(running) == 1 else 0
        for request in running:
            self._check(request)
            if request.n_keep is not None and not self._shift(request, request.n_keep):
                return [(request, self._seen(request, request.generation.finish("length")))]
            n_max = min(n_most, self._session.n_ctx_seq - request.n_past - 1)
            ids = [request.generation.history[-1], *request.draft(n_max)]
            batch.append((request.seq_id, ids, "last" if len(ids) == 1 else "all"))
        try:
            rows = self._session.decode_batch(batch, copy=_is_shared(running))
        except ContextLengthError:
            if any(len(ids) > 1 for _, ids, _ in batch):
                return self._compute_tokens(drafting=False)
            return self._end_for_room()
        best: Sequence[int | None] = [None] * len(running)
        if len(rows) > 1 and max(map(len, rows)) == 1:
            best = self._session.argmax([its_rows[0, : self._tokenizer.n_vocab] for its_rows in rows])
        chunks: list[tuple[Request, CompletionChunk]] = []
        for request, (_, ids, _), its_rows, its_best in zip(running, batch, rows, best, strict=True):
            chunks += self._advance(request, ids, its_rows, its_best)
        return chunks

    def _shift(self, request: Request, n_keep: int) -> bool:
        """Make room in a full sequence: half of what stands behind the first n_keep goes, as in llama.cpp's server.

        False where that cannot be, since others that are not done share its cells.
        """
        if request.n_past < self._session.n_ctx_seq:
            return True
        n_discard = -(-(request.n_past - n_keep) // 2)
        try:
            self._session.shift(request.seq_id, n_keep, n_discard)
        except ContextLengthError:
            return self._drop_ended() and self._shift(request, n_keep)
        request.n_past -= n_discard
        request.generation.n_discarded += n_discard
        return True

    def _advance(
        self, request: Request, ids: list[int], rows: Floats, best: int | None
    ) -> list[tuple[Request, CompletionChunk]]:
        """Choose tokens from the rows after each of these ids, as long as they are the ones that were drafted.

        `best`: where the largest logit of the only row is, if known.
        """
        chunks: list[tuple[Request, CompletionChunk]] = []
        generation = request.generation
        generation.n_drafted += len(ids) - 1
        for row, draft in zip(rows, (*ids[1:], None), strict=True):
            request.n_past += 1
            chunk = generation.advance(row, best)
            chunks.append((request, self._seen(request, chunk)))
            if chunk.completion is not None or chunk.token_ids[0] != draft:
                break
            generation.n_accepted += 1
        if len(chunks) < len(ids):
            self._session.trim(request.seq_id, request.n_past)
        return chunks

    def _seen(self, request: Request, chunk: CompletionChunk) -> CompletionChunk:
        """Take a request that ended out of the running ones."""
        if chunk.completion is not None:
            self._running.remove(request)
            self._crowded = False
        return chunk

    # ------------------------------------------------------------------------------------------ ends and trouble

    def _end_cancelled(self) -> list[tuple[Request, CompletionChunk]]:
        """End the requests that nobody waits for any more."""
        chunks: list[tuple[Request, CompletionChunk]] = []
        for requests in (self._waiting, self._prompts, self._running):
            for request in [request for request in requests if request.cancelled]:
                requests.remove(request)
                self._leave(request)
                chunks.append((request, request.generation.finish("cancelled")))
        return chunks

    def _leave(self, request: Request) -> None:
        """Let nobody wait for a prompt that is not computed further."""
        self._crowded = False
        for other in self._prompts:
            if other.leader is request:
                other.leader, other.n_shared = None, 0

    def _make_room_for(self, request: Request) -> None:
        """Drop what ended answers left in a cache that all share, or let a prompt wait for the end of another one."""
        if self._drop_ended():
            return
        if not self._running and len(self._prompts) == 1:
            raise ContextLengthError(f"no room for the {len(request.prompt)} tokens of a prompt")
        self._prompts.remove(request)
        self._leave(request)
        self._session.trim(request.seq_id, 0)
        request.seq_id, request.n_past, request.n_shared, request.leader = -1, 0, 0, None
        self._waiting.appendleft(request)
        self._crowded = True

    def _end_for_room(self) -> list[tuple[Request, CompletionChunk]]:
        """Make room for the tokens of running sequences, if need be by ending the last: a context can be full."""
        if self._drop_ended():
            return []
        if self._prompts:
            self._make_room_for(self._prompts[-1])
            return []
        request = self._running[-1]
        return [(request, self._seen(request, request.generation.finish("length")))]

    def _drop_ended(self) -> bool:
        """Empty the places that nobody has; returns whether that gave room."""
        taken = {request.seq_id for request in (*self._prompts, *self._running)}
        ended = [seq_id for seq_id in self._seq_ids if seq_id not in taken and self._session.n_past(seq_id)]
        for seq_id in ended:
            self._session.trim(seq_id, 0)
        return bool(ended)

    def _check(self, request: Request) -> None:
        """Make sure that nobody else wrote to a sequence since the last step."""
        n_past = self._session.n_past(request.seq_id)
        if n_past != request.n_past or self._writers.get(request.seq_id) is not request.ticket:
            found = f"found {n_past}" if n_past != request.n_past else "found those of another prompt"
            raise GgufpyError(
                f"sequence {request.seq_id} was changed while it was being generated: expected {request.n_past} "
                f"tokens, {found}"
            )


def _is_shared(requests: Iterable[Request]) -> bool:
    """Say whether others may compute with the session before all rows are read: their code may be a processor's."""
    return any(request.generation.has_processors for request in requests)


# ------------------------------------------------------------------------------------------------- whole calls


class Stop(threading.Event):
    """A call's `cancel` that does not wait for the step in computation but stops it, in the middle of a graph.

    Only the call's own: a session may be others' between its steps, and while a step waits for its turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._computing: Sequences | None = None

    def set(self) -> None:
        """Cancel. A step that just begins to compute may overlook it: set it again until nothing computes."""
        super().set()
        with self._guard:
            if self._computing is not None:
                self._computing.cancel()

    def step(self, session: Sequences, compute: Callable[[], T]) -> T:
        """Compute with a session what `set` may stop."""
        with session.lock:
            self._may_stop(session)
            try:
                return compute()
            finally:
                self._may_stop(None)  # before anybody else gets the lock

    def _may_stop(self, session: Sequences | None) -> None:
        with self._guard:
            self._computing = session


def stream(
    session: Sequences,
    tokenizer: TextDecoder,
    prompts: Iterable[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    seq_ids: range | None = None,
    cancel: threading.Event | None = None,
    drafter: Callable[[], Drafter] | None = None,
    n_keep: int | None = None,
) -> Generator[Step, None, None]:
    """Answer prompts, and yield what each step brings: [(index, chunk), …]; an empty list where that is nothing yet.

    With `params.n` above 1 prompt i has the indices from i·n on. All requests are checked at once; computing begins
    with the first step. `seq_ids` are the sequences to use (all), `drafter` makes one for each answer, with `n_keep`
    full sequences are shifted (`Engine.submit`). What sequences hold is reused as far as prompts begin with it. Closing
    or dropping the generator leaves the session usable. Setting `cancel`, from any thread, ends the answers before the
    next step; a `Stop` stops the step itself (StoppedError). One thread at a time may advance the generator: a second
    gets Python's ValueError. Raises as `Engine.submit` and `Engine.step` do.
    """
    engine = Engine(session, tokenizer, range(session.n_seq_max) if seq_ids is None else seq_ids)
    params = params or SamplingParams()
    n, drafters = params.n, []
    for i, prompt in enumerate(prompts):
        for j in range(n):
            each = params if n == 1 else _one_of(params, j)
            made = None if drafter is None else drafter()
            engine.submit(prompt, each, index=i * n + j, cancel=cancel, drafter=made, n_keep=n_keep)
            drafters += [made] if made else []
    step = functools.partial(cancel.step, session, engine.step) if isinstance(cancel, Stop) else engine.step
    return _steps(engine, step, drafters)


def _one_of(params: SamplingParams, j: int) -> SamplingParams:
    """Return the parameters of one of several answers: a seed that was given counts on."""
    return replace(params, n=1, seed=None if params.seed is None else (params.seed + j) % (MAX_SEED + 1))


def _steps(
    engine: Engine, step: Callable[[], list[tuple[Request, CompletionChunk]]], drafters: list[Drafter]
) -> Generator[Step, None, None]:
    try:
        while engine.busy:
            yield [(request.index, chunk) for request, chunk in step()]
    finally:
        for drafter in drafters:
            drafter.close()
