"""Sampler: the chain that chooses the tokens of one sequence, put together once from its parameters.

Owns the order, which is llama.cpp's: logits processors, biases and bans, the grammar's mask, penalties, DRY,
top_n_sigma, top_k, typical_p, top_p, min_p, xtc, temperature, and a draw or adaptive-p. With mirostat: biases, mask,
temperature, mirostat. A stage that is off is not in the chain. Does not own what the stages do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from ggufpy.errors import SamplingError
from ggufpy.sampling import filters
from ggufpy.sampling.draws import Random, draw
from ggufpy.sampling.dry import Breakers, dry
from ggufpy.sampling.filters import NEG_INF, Candidates, Floats, Ids, candidates
from ggufpy.sampling.native import draw_likeliest, few
from ggufpy.sampling.params import SamplingParams, typical_is_on, xtc_is_on
from ggufpy.sampling.rows import add_bias, allow, ban, best_token, penalties, process
from ggufpy.sampling.targets import AdaptiveP, Mirostat, MirostatV2

__all__ = ["Sampler"]

Edit = Callable[[Floats, Sequence[int]], Floats]
Filter = Callable[[Candidates], Candidates]
Choice = Callable[[Candidates], int]
RowChoice = Callable[[Floats], int]

_IN_ONE_CALL = (filters.top_k, filters.top_p, filters.min_p, filters.temperature)


class Sampler:
    """Choose the tokens of one sequence, one row of logits after another. Not for two sequences or threads."""

    __slots__ = ("_biases", "_choose", "_filters", "_n_vocab", "_never", "_penalties", "seed")

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        *,
        banned: Iterable[int] = (),
        ends: Iterable[int] = (),
        n_prompt: int = 0,
        breakers: Breakers | None = None,
    ) -> None:
        """Put the chain together and start its random numbers.

        n_vocab    the tokenizer's; what a row has more is padding
        banned     tokens never chosen, besides the parameters' own
        ends       tokens not chosen before `min_tokens` tokens follow the
        n_prompt   first tokens of the history
        breakers   what `sequence_breakers` finds; needed by DRY alone

        Raises SamplingError for a token id outside the vocabulary.
        """
        self.seed: int = int.from_bytes(os.urandom(4), "little") if params.seed is None else params.seed
        self._n_vocab = n_vocab
        self._biases: tuple[Edit, ...] = tuple(_biases(params, n_vocab, banned, ends, n_prompt))
        self._penalties: tuple[Edit, ...] = () if params.mirostat else tuple(_penalties(params, breakers or {}))
        self._filters: tuple[Filter, ...] = tuple(_filters(params, self.seed))
        self._never = None if self._penalties else _banned_alone(params, banned)
        self._choose: RowChoice | None = (
            None if params.greedy else _row_choice(params, self.seed, n_vocab, self._filters)
        )

    def sample(self, row: Floats, history: Sequence[int] = (), *, mask: object = None, best: int | None = None) -> int:
        """Return the next token's id.

        `row`: logits, float32 [n_vocab or more]; ids past the vocabulary (padding) are never chosen. `history`: the
        tokens so far. `mask`: bool [n_vocab or more], False where a grammar rules a token out. `best`: where the
        largest logit, or the first NaN, is, if known. Raises SamplingError for NaN or when nothing is left.
        """
        if row.ndim != 1 or row.size < self._n_vocab:
            raise SamplingError(f"logits: expected shape [{self._n_vocab}], got {list(row.shape)}")
        row = row[: self._n_vocab]
        best = best_token(row, best)
        if self._never is not None and mask is None and best not in self._never:
            return best
        edited = self._edit(row, history, mask)
        if edited is not row:
            row, best = edited, best_token(edited)
        if self._choose is None or row.item(best) == math.inf:
            return best
        return self._choose(row)

    def _edit(self, row: Floats, history: Sequence[int], mask: object) -> Floats:
        """Return the row itself, or a changed copy."""
        for edit in self._biases:
            row = edit(row, history)
        if mask is not None:
            row = allow(row, mask)
        for edit in self._penalties:
            row = edit(row, history)
        return row


def _banned_alone(p: SamplingParams, banned: Iterable[int]) -> frozenset[int] | None:
    """Return the banned tokens of a greedy choice that nothing else changes: the best of the others needs no copy."""
    if not p.greedy or p.logits_processors or p.logit_bias or p.min_tokens:
        return None
    return frozenset((*banned, *p.banned_token_ids))


def _biases(
    p: SamplingParams, n_vocab: int, banned: Iterable[int], ends: Iterable[int], n_prompt: int
) -> Iterator[Edit]:
    """List what is done to single tokens whatever the chain."""
    added = dict(p.logit_bias)
    for name, given in (("logit_bias", added), ("banned_token_ids", p.banned_token_ids)):
        if given and max(given) >= n_vocab:
            raise SamplingError(f"{name}: {max(given)} is not below the vocabulary's size, {n_vocab}")
    never = {*banned, *p.banned_token_ids, *(id for id, bias in added.items() if bias == NEG_INF)}
    biased, out, last = _ids(added.keys() - never), _ids(never), _ids(ends)
    biases = np.array([added[id] for id in biased.tolist()], np.float32)
    enough = n_prompt + p.min_tokens
    if p.logits_processors:
        yield lambda row, history: process(row, history, p.logits_processors)
    if biased.size:
        yield lambda row, _: add_bias(row, biased, biases)
    if out.size:
        yield lambda row, _: ban(row, out)
    if p.min_tokens and last.size:
        yield lambda row, history: ban(row, last) if len(history) < enough else row


def _ids(tokens: Iterable[int]) -> Ids:
    return np.array(sorted(tokens), np.intp)


def _penalties(p: SamplingParams, breakers: Breakers) -> Iterator[Edit]:
    """List what depends on the tokens so far."""
    repeat, frequency, presence = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
    if p.repeat_last_n and (repeat, frequency, presence) != (1, 0, 0):
        yield lambda row, history: penalties(row, _last(history, p.repeat_last_n), repeat, frequency, presence)
    if p.dry_penalty_last_n and p.dry_multiplier:
        multiplier, base, allowed_length = p.dry_multiplier, p.dry_base, p.dry_allowed_length
        yield lambda row, history: dry(
            row, _last(history, p.dry_penalty_last_n), multiplier, base, allowed_length, breakers
        )


def _last(history: Sequence[int], n: int) -> Sequence[int]:
    return history if n < 0 else history[-n:]


def _filters(p: SamplingParams, seed: int) -> Iterator[Filter]:
    """List what leaves tokens out, and the temperature."""
    if p.mirostat:
        yield partial(filters.temperature, t=p.temperature)
        return
    if np.float32(p.top_n_sigma) > 0:
        yield partial(filters.top_n_sigma, n=p.top_n_sigma)
    if p.top_k > 0:
        yield partial(filters.top_k, k=p.top_k)
    if typical_is_on(p):
        yield partial(filters.typical_p, p=p.typical_p)
    if np.float32(p.top_p) < 1:
        yield partial(filters.top_p, p=p.top_p)
    if np.float32(p.min_p) > 0:
        yield partial(filters.min_p, p=p.min_p)
    if xtc_is_on(p):
        yield _xtc_now_and_then(p, Random(seed))
    if np.float32(p.dynatemp_range) > 0:
        yield partial(
            filters.dynamic_temperature, t=p.temperature, spread=p.dynatemp_range, exponent=p.dynatemp_exponent
        )
    elif np.float32(p.temperature) != 1:
        yield partial(filters.temperature, t=p.temperature)


def _xtc_now_and_then(p: SamplingParams, random: Random) -> Filter:
    """Return the XTC filter with its chance, for which it has random numbers of its own, as llama.cpp has."""
    probability = np.float32(p.xtc_probability)

    def stage(c: Candidates) -> Candidates:
        return c if c.ids.size < 2 or random.single() > probability else filters.xtc(c, p.xtc_threshold)

    return stage


def _row_choice(p: SamplingParams, seed: int, n_vocab: int, stages: tuple[Filter, ...]) -> RowChoice:
    """Return what takes a token of a row: the stages and a choice, in one call of C where they are the usual few."""
    usual = all(getattr(stage, "func", None) in _IN_ONE_CALL for stage in stages)
    if usual and 0 < p.top_k <= few() and not p.mirostat and p.adaptive_target < 0:
        settings, random = (min(p.top_k, n_vocab), p.top_p, p.min_p, p.temperature), Random(seed)
        return lambda row: draw_likeliest(row, *settings, random.double())
    choice = _choice(p, seed, n_vocab)

    def choose(row: Floats) -> int:
        c = candidates(row)
        for stage in stages:
            c = stage(c)
        return choice(c)

    return choose


def _choice(p: SamplingParams, seed: int, n_vocab: int) -> Choice:
    """Return what takes one of the tokens left."""
    if p.mirostat == 1:
        return Mirostat(p.mirostat_tau, p.mirostat_eta, seed, n_vocab)
    if p.mirostat == 2:
        return MirostatV2(p.mirostat_tau, p.mirostat_eta, seed)
    if p.adaptive_target >= 0:
        return AdaptiveP(p.adaptive_target, p.adaptive_decay, seed)
    random = Random(seed)
    return lambda c: draw(c, random.double())
