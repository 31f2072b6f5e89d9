"""What a model thinks of texts that are there already: log-probabilities, perplexity, embeddings, ranks.

Works on token ids and a session. Of the logits nothing is kept but what is asked for: a row is reduced to a few numbers
before the next micro-batch is computed. A beginning that several texts share is computed once and forked.
Knows no files, and of text only where a prompt ends and its continuation begins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from ggufpy.batch import FloatArray
from ggufpy.errors import ContextLengthError, TokenizerError
from ggufpy.reuse import common_prefix
from ggufpy.sampling import best_token
from ggufpy.session import Pooling, Session

__all__ = [
    "Perplexity",
    "Rank",
    "Score",
    "TextEncoder",
    "embed",
    "encode_pair",
    "encode_rank",
    "normalized",
    "perplexity",
    "score",
]

Ids = Sequence[int]
Row = FloatArray
MIN_SEQUENCES, MAX_SEQUENCES = 3, 64
"""Sequences for a common beginning, a prompt and a continuation; how many at most: more gain nothing."""
WORTH_FORKING = 32
"""Tokens that a shared beginning has to save: it costs a computation of its own."""


class TextEncoder(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def add_bos(self) -> bool: ...
    @property
    def add_eos(self) -> bool: ...
    @property
    def add_sep(self) -> bool: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def sep_token_id(self) -> int | None: ...
    @property
    def chat_templates(self) -> dict[str, str]: ...
    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...
    def fill(self, template: str, values: Mapping[str, str]) -> list[int]: ...


# ------------------------------------------------------------------------------------------------------- the results


@dataclass(frozen=True, slots=True)
class Score:
    """Hold how probable a continuation is behind its prompt.

    token_ids   the continuation's tokens
    logprobs    the natural log-probability of each, given all before it
    is_greedy   whether each is the likeliest there, so that greedy decoding would give this continuation
    """

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: bool

    @property
    def sum(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Hold the perplexity of a text, the figures that llama-perplexity prints.

    value      exp of the mean negative log-likelihood
    error      its standard error ("+/-"); None where the tool gives none
    running    the value after each window
    n_tokens   how many tokens were scored: those of each window's second half, but the first of these
    """

    value: float
    error: float | None
    running: list[float]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Rank:
    """Hold a document's place among those given, counted from 0, and its score: the higher, the more relevant."""

    index: int
    score: float


# ----------------------------------------------------------------------------------------------- text → token ids


def encode_pair(tokenizer: TextEncoder, prompt: str | Ids, continuation: str | Ids) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and of its continuation.

    Two texts are tokenized as the one text they make, as a model saw it in training: the continuation's tokens are
    those from the first on that the prompt alone does not have. So the space between two words counts to the second,
    and a token that spans the border to the continuation, whichever side the caller has put it on. Token ids stay as
    they are; text behind them is tokenized alone. The end token that some files ask for is left out.

    Raises ValueError for a continuation without tokens.
    """
    before = _encode(tokenizer, prompt, begin=True)
    if isinstance(prompt, str) and isinstance(continuation, str):
        whole = _encode(tokenizer, prompt + continuation, begin=True)
        n = common_prefix(before, whole)
        before, after = whole[:n], whole[n:]
    else:
        after = _encode(tokenizer, continuation, begin=False)
    if not after:
        raise ValueError(f"continuation: expected at least one token, got {continuation!r:.60}")
    return before, after


def _encode(tokenizer: TextEncoder, text: str | Ids, *, begin: bool) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    ids = tokenizer.encode(text, add_special=begin, parse_special=True)
    return ids[:-1] if begin and tokenizer.add_eos and ids[-1:] == [tokenizer.eos_token_id] else ids


def encode_rank(tokenizer: TextEncoder, query: str, document: str) -> list[int]:
    """Return the token ids of a query and a document, put together as llama.cpp's server puts them.

    With a chat template named "rerank" in the file, that text with both filled in; otherwise bos, query, eos, sep,
    document, eos, as far as the vocabulary adds these tokens. What the two say is text: it forges no control token.
    Raises TokenizerError where the file lacks a token that it asks for.
    """
    template = tokenizer.chat_templates.get("rerank")
    if template is not None:
        return tokenizer.fill(template, {"{query}": query, "{document}": document})
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    eos = [end] if tokenizer.add_eos else []
    bos = [tokenizer.bos_token_id] if tokenizer.add_bos else []
    sep = [tokenizer.sep_token_id] if tokenizer.add_sep else []
    query_ids, document_ids = (tokenizer.encode(text, add_special=False) for text in (query, document))
    ids = [id for id in (*bos, *query_ids, *eos, *sep, *document_ids, *eos) if id is not None]
    if len(ids) < len(bos) + 2 * len(eos) + len(sep) + len(query_ids) + len(document_ids):
        raise TokenizerError("a query and a document stand between bos, eos or sep tokens that the file does not have")
    return ids


# ------------------------------------------------------------------------------------------------- rows, reduced


def _logprobs(row: Row, ids: Ids) -> tuple[list[float], int]:
    """Return the log-probabilities of some tokens under the softmax of a row, and the likeliest token.

    Raises SamplingError where the row has NaN.
    """
    best = best_token(row)
    peak = float(row[best])
    total = peak + math.log(np.exp(row - row[best]).sum(dtype=np.float64))
    return [float(row[id]) - total for id in ids], best


@dataclass(slots=True)
class _Run:
    """Tokens to append to a sequence, from which of them on rows are wanted, and who takes each of these."""

    seq_id: int
    ids: Ids
    first: int
    take: Callable[[Row], None]  # called with the row behind each, in turn


def _compute(session: Session, runs: Sequence[_Run]) -> None:
    """Compute runs side by side, a micro-batch at a time."""
    waiting = deque((run, 0) for run in runs if run.ids)
    while waiting:
        chosen, room = [], session.n_ubatch
        while waiting and room:
            run, start = waiting.popleft()
            stop = min(len(run.ids), start + room)
            chosen.append((run, start, stop))
            room -= stop - start
            if stop < len(run.ids):
                waiting.appendleft((run, stop))
        batch = [(run.seq_id, run.ids[a:b], range(max(a, run.first) - a, b - a)) for run, a, b in chosen]
        for (run, _, _), rows in zip(chosen, session.decode_batch(batch, copy=False), strict=True):
            for row in rows:
                run.take(row)


# --------------------------------------------------------------------------------------------- log-probabilities


def score(session: Session, pairs: Sequence[tuple[Ids, Ids]]) -> list[Score]:
    """Compute how probable each continuation is behind its prompt; pairs are token ids.

    What the session holds is dropped, and nothing is left in it. Each different prompt is computed once, in batches of
    as many as there are sequences, what these have in common at their beginning before them and once too. The row
    behind a prompt serves all its continuations, so those of one token cost nothing more.

    Raises ValueError for an empty prompt or continuation, unknown ids and less than three sequences,
    ContextLengthError, before anything is computed, for a pair that does not fit a sequence, and SamplingError where
    logits are NaN.
    """
    if session.options.n_seq_max < MIN_SEQUENCES:
        raise ValueError(f"session: expected {MIN_SEQUENCES} sequences at least, got {session.options.n_seq_max}")
    found = [_Found(list(after)) for _, after in pairs]
    by_prompt: dict[tuple[int, ...], list[_Found]] = {}
    for i, (before, after) in enumerate(pairs):
        if not len(before) or not len(after):
            what = "prompt" if not len(before) else "continuation"
            raise ValueError(f"pairs[{i}]: the {what} has no tokens")
        if unknown := [id for id in after if not 0 <= id < session.n_vocab]:
            raise ValueError(f"pairs[{i}]: expected ids from 0 to {session.n_vocab - 1}, got {unknown[0]}")
        if (n := len(before) + len(after) - 1) > session.n_ctx_seq:
            raise ContextLengthError(f"pairs[{i}]: {n} tokens do not fit a context of {session.n_ctx_seq}")
        by_prompt.setdefault(tuple(before), []).append(found[i])
    session.clear()
    for prompts in _waves(sorted(by_prompt), by_prompt, session):
        _score_wave(session, [(prompt, by_prompt[prompt]) for prompt in prompts])
    session.clear()
    return [Score(f.ids, f.logprobs, f.is_greedy) for f in found]


@dataclass(slots=True)
class _Found:
    """A continuation and what is known of it so far."""

    ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    is_greedy: bool = True

    def add(self, logprob: float, best: int) -> None:
        """Take the next token's log-probability, and the token that was likeliest in its place."""
        self.is_greedy = self.is_greedy and best == self.ids[len(self.logprobs)]
        self.logprobs.append(logprob)

    def take(self, row: Row) -> None:
        """Take the row before the next token."""
        (logprob,), best = _logprobs(row, [self.ids[len(self.logprobs)]])
        self.add(logprob, best)


def _waves(
    prompts: Sequence[tuple[int, ...]], by_prompt: Mapping[tuple[int, ...], list[_Found]], session: Session
) -> Iterator[list[tuple[int, ...]]]:
    """Cut sorted prompts into groups to be computed side by side: a share of sequences, and as the cells allow."""
    most = (session.options.n_seq_max - 1) // 2  # the others are for the beginning, and for continuations
    wave: list[tuple[int, ...]] = []
    n_cells = 0
    for prompt in prompts:
        longest = max(len(f.ids) for f in by_prompt[prompt])
        n = len(prompt) + longest - 1
        if wave and (len(wave) == most or n_cells + n > session.n_ctx):
            yield wave
            wave, n_cells = [], 0
        wave.append(prompt)
        n_cells += n
    if wave:
        yield wave


def _score_wave(session: Session, wave: Sequence[tuple[tuple[int, ...], list[_Found]]]) -> None:
    """Score the continuations of some sorted prompts: sequence 0 is their common beginning, then come the prompts."""
    prompts = [prompt for prompt, _ in wave]
    n = _hold_beginning(session, prompts)
    runs, branches = [], []
    for seq_id, (prompt, founds) in enumerate(wave, 1):
        if n:
            session.fork(0, seq_id)
        if len(founds) == 1:
            ids = [*prompt[n:], *founds[0].ids[:-1]]
            runs.append(_Run(seq_id, ids, len(prompt) - n - 1, founds[0].take))
        else:
            runs.append(_Run(seq_id, prompt[n:], len(prompt) - n - 1, partial(_take_first, founds)))
            branches += [(seq_id, f) for f in founds if len(f.ids) > 1]
    _compute(session, runs)
    _score_branches(session, branches, len(wave) + 1, session.n_ctx - sum(map(len, prompts)))
    for seq_id in range(1, session.options.n_seq_max):
        session.clear(seq_id)


def _hold_beginning(session: Session, prompts: Sequence[tuple[int, ...]]) -> int:
    """Let sequence 0 hold what prompts share with each other, or one with those before it; returns how much that is."""
    held = session.tokens(0)
    shared = common_prefix(prompts[0], prompts[-1] if len(prompts) > 1 else held)
    shared = min(shared, *(len(prompt) - 1 for prompt in prompts))
    if shared * max(1, len(prompts) - 1) < WORTH_FORKING:
        shared = 0
    n = common_prefix(held, prompts[0][:shared])
    try:
        session.trim(0, n)
    except ContextLengthError:  # recurrent layers have no way back
        session.trim(0, 0)
        n = 0
    _compute(session, [_Run(0, prompts[0][n:shared], shared, lambda _: None)])
    return shared


def _take_first(founds: Sequence[_Found], row: Row) -> None:
    """Take the row behind a prompt for all its continuations."""
    logprobs, best = _logprobs(row, [f.ids[0] for f in founds])
    for f, logprob in zip(founds, logprobs, strict=True):
        f.add(logprob, best)


def _score_branches(session: Session, branches: Sequence[tuple[int, _Found]], first: int, n_cells: int) -> None:
    """Score the rest of continuations that share prompts, in the sequences from the first on and as many cells."""
    seq_ids = range(first, session.options.n_seq_max)
    runs: list[_Run] = []
    for parent, found in branches:
        ids = found.ids[:-1]
        if len(runs) == len(seq_ids) or sum(len(run.ids) for run in runs) + len(ids) > n_cells:
            _compute(session, runs)
            for run in runs:
                session.clear(run.seq_id)
            runs = []
        runs.append(_Run(seq_ids[len(runs)], ids, 0, found.take))
        session.fork(parent, runs[-1].seq_id)
    _compute(session, runs)


# ---------------------------------------------------------------------------------------------------- perplexity


def perplexity(
    session: Session,
    token_ids: Ids,
    *,
    n_ctx: int,
    bos: int | None = None,
    n_chunks: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Perplexity:
    """Compute the perplexity of a text as llama-perplexity does, to the micro-batch.

    The tokens are cut into windows of `n_ctx`, what is left over at the end is not used. In each window the first token
    is replaced by `bos`, where there is one, and the tokens behind its middle are scored, given all before them in the
    window. As many windows are computed together as the session has sequences, of equally many tokens each.

    n_chunks   use at most so many windows
    progress   called after each window with how many are done, how many there are, and the perplexity so far

    Raises ValueError for a text of less than two windows, and ContextLengthError for windows larger than a sequence.
    """
    if len(token_ids) < 2 * n_ctx:
        raise ValueError(f"the text has {len(token_ids)} tokens: expected {2 * n_ctx} at least, two windows of {n_ctx}")
    ids = list(token_ids)
    n = len(ids) // n_ctx if n_chunks is None else min(n_chunks, len(ids) // n_ctx)
    windows = [ids[i * n_ctx : (i + 1) * n_ctx] for i in range(n)]
    n_seq, n_scored = session.options.n_seq_max, n_ctx - 1 - n_ctx // 2
    total = squares = 0.0
    running: list[float] = []
    for at in range(0, n, n_seq):
        for logprobs in _score_windows(session, windows[at : at + n_seq], bos):
            total -= sum(logprobs)
            squares += sum(x * x for x in logprobs)
            running.append(math.exp(total / (n_scored * (len(running) + 1))))
            if progress is not None:
                progress(len(running), n, running[-1])
    count = n * n_scored
    variance = squares / count - (total / count) ** 2
    error = math.sqrt(variance / (count - 1)) * running[-1] if variance > 0 and count > 1 else None
    return Perplexity(running[-1], error, running, count)


def _score_windows(session: Session, windows: Sequence[Ids], bos: int | None) -> list[list[float]]:
    """Return the log-probabilities of the tokens behind the middle of each window, computed side by side."""
    n_ctx, first = len(windows[0]), len(windows[0]) // 2
    inputs = [list(window) if bos is None else [bos, *window[1:]] for window in windows]
    logprobs: list[list[float]] = [[] for _ in windows]
    session.clear()
    for start, stop in _cuts(n_ctx, session.n_batch, max(1, session.n_ubatch // len(windows))):
        wanted = range(max(start, first) - start, stop - start)  # the last one too: it decides bits of the others
        batch = [(seq_id, ids[start:stop], wanted) for seq_id, ids in enumerate(inputs)]
        for window, found, rows in zip(windows, logprobs, session.decode_batch(batch, copy=False), strict=True):
            next_ids = window[start + wanted.start + 1 : stop + 1]
            found += (_logprobs(row, [id])[0][0] for row, id in zip(rows, next_ids, strict=False))
    return logprobs


def _cuts(n: int, *limits: int) -> Iterator[tuple[int, int]]:
    """Cut a run of n into pieces of at most the first limit, these into pieces of the second, and so on."""
    if not limits:
        yield 0, n
        return
    for start in range(0, n, limits[0]):
        for a, b in _cuts(min(limits[0], n - start), *limits[1:]):
            yield start + a, start + b


# ---------------------------------------------------------------------------------------------------- embeddings


def embed(
    session: Session, texts: Sequence[Ids], pooling: Pooling | None, *, normalize: bool = True
) -> list[FloatArray]:
    """Compute the embeddings of texts, token ids each: float32 [n_embd] each, or [n_tokens, n_embd] without pooling.

    As many texts as fit a micro-batch are computed together. With "rank" they are scores, [n_labels] each, which
    `normalize` leaves alone; everything else gets a length of one (or stays zero). Raises as `Session.embed_batch`.
    """
    found: list[FloatArray] = []
    for group in _groups(texts, session.options.n_seq_max, session.n_ubatch):
        found += session.embed_batch(enumerate(group), pooling=pooling)
    return [normalized(rows) for rows in found] if normalize and pooling != "rank" else found


def normalized(rows: FloatArray) -> FloatArray:
    """Scale the last dimension to a Euclidean length of one, as llama.cpp does; zeros stay."""
    length = np.sqrt(np.square(rows).sum(axis=-1, keepdims=True, dtype=np.float64))
    scaled: FloatArray = rows * np.divide(1, length, where=length > 0, out=np.zeros_like(length)).astype(np.float32)
    return scaled


def _groups(texts: Sequence[Ids], n_texts: int, n_tokens: int) -> Iterator[list[Ids]]:
    """Cut texts into groups of so many, and of so many tokens where there are several."""
    group: list[Ids] = []
    for ids in texts:
        if group and (len(group) == n_texts or sum(map(len, group)) + len(ids) > n_tokens):
            yield group
            group = []
        group.append(ids)
    if group:
        yield group
