"""SamplingParams: every parameter's name, default, range and meaning.

Owns the checks of what a caller gives. Does not own what is done with it: that is the chain's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ggufpy.errors import SamplingError

__all__ = ["LogitsProcessor", "SamplingParams", "typical_is_on", "xtc_is_on"]

LogitsProcessor = Callable[[tuple[int, ...], NDArray[np.float32]], NDArray[np.float32]]

_MAX_SEED = 2**32 - 1
_MAX_INT = 2**31 - 1
_MAX_FLOAT = float(np.finfo(np.float32).max)
_MIN_FLOAT = float(np.finfo(np.float32).tiny)
_MAX_PENALTY = 1e28  # times the largest count it is a float still


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Say how tokens are chosen and when to stop. The defaults are llama.cpp's.

    temperature            divides the logits; 0 or less takes the likeliest token, the lowest id among equals
    dynatemp_range         the temperature lies so far about `temperature`, by the entropy of the choice; 0 is off
    dynatemp_exponent      the power of the normalized entropy with which it rises from the least to the largest
    top_k                  keep so many of the likeliest tokens; 0 or -1 keeps all
    top_p                  keep the likeliest tokens whose probabilities first add up to this; 1 keeps all
    min_p                  keep tokens at least this times as probable as the likeliest; 0 keeps all
    typical_p              keep the tokens nearest to the expected surprise that add up to this; 1 keeps all
    top_n_sigma            keep logits at most so many standard deviations below the largest; 0 or less keeps all
    xtc_probability        how often all but the last of the tokens over `xtc_threshold` are left out; 0 is never
    xtc_threshold          a probability; above 0.5 nothing is left out
    repeat_penalty         makes tokens seen lately less likely; 1 changes nothing
    frequency_penalty      taken off a token's logit for each time it was seen lately; 0 changes nothing
    presence_penalty       taken off the logit of each token seen lately; 0 changes nothing
    repeat_last_n          how many of the last tokens, the prompt's too, count as lately; 0 none, -1 all
    dry_multiplier         DRY: taken off a token that would lengthen a repetition of `dry_allowed_length`; 0 is off
    dry_base               DRY: times this for each token that the repetition is longer
    dry_allowed_length     DRY: repetitions shorter than this are free
    dry_penalty_last_n     DRY: how many of the last tokens are searched for repetitions; 0 none, -1 all
    dry_sequence_breakers  DRY: strings that no repetition reaches across
    mirostat               1 or 2 aims at a surprise instead of cutting: only temperature and biases count beside it
    mirostat_tau           the surprise to aim at, in bits
    mirostat_eta           how fast it is approached
    adaptive_target        aim at tokens of this probability (adaptive-p); below 0 is off
    adaptive_decay         how slowly the tokens chosen so far are forgotten in that, 0 … 0.99
    logit_bias             added to the logits of these token ids; -inf bans a token
    banned_token_ids       token ids never chosen
    min_tokens             before so many new tokens nothing ends the answer
    max_tokens             at most so many new tokens; by default it goes on to the end of the context
    n                      how many answers to give to a prompt
    seed                   0 … 4294967295, for the same tokens again; by default one is drawn, and the result reports it
    stop                   the text ends before the first of these strings to be completed
    stop_token_ids         token ids that end the text, besides the model's end-of-generation tokens
    include_stop           keep the stop string in the text
    ignore_eos             never choose an end-of-generation token
    logprobs               None, or how many of the likeliest tokens to report beside each chosen one
    prompt_logprobs        the same for the prompt's tokens
    logits_processors      called in turn with (the ids so far, a row they may change) and return the row to choose from

    Raises SamplingError, which names the parameter, for a value of the wrong type or out of range.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: str | Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    banned_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        """Check every value and store it as the plain, hashable Python type it stands for."""
        for field in fields(self):
            check, *limits = _CHECKS[field.name]
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, check(field.name, value, *limits))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens: expected at most max_tokens, {self.max_tokens}, got {self.min_tokens}")

    @property
    def greedy(self) -> bool:
        """Say whether the likeliest token is always taken, once biases and penalties have had their say."""
        hottest = np.float32(self.temperature) + np.float32(0 if self.mirostat else self.dynatemp_range)
        return bool(hottest <= 0 and (self.mirostat or not (typical_is_on(self) or xtc_is_on(self))))


def typical_is_on(p: SamplingParams) -> bool:
    """Say whether typical_p leaves anything out; the likeliest token may be among it."""
    return bool(np.float32(p.typical_p) < 1)


def xtc_is_on(p: SamplingParams) -> bool:
    """Say whether XTC leaves anything out, now and then; it begins with the likeliest token."""
    return bool(np.float32(p.xtc_probability) > 0 and np.float32(p.xtc_threshold) <= 0.5)


# -------------------------------------------------------------------------------------------------------- checks


def _real(name: str, value: object, low: float, high: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise SamplingError(f"{name}: expected a number, got {value!r:.60}")
    if not low <= value <= high:  # type: ignore[operator]  # as it is: an integer may be too large for a float
        raise SamplingError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r:.60}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise SamplingError(f"{name}: expected an integer, got {value!r:.60}")
    if not low <= number <= high:
        raise SamplingError(f"{name}: expected an integer from {low} to {high}, got {number!r:.60}")
    return number


def _integers(name: str, value: object, low: int, high: int) -> tuple[int, ...]:
    items = _items(name, value, "integers")
    return tuple(_integer(f"{name}[{i}]", item, low, high) for i, item in enumerate(items))


def _biases(name: str, value: object, low: float, high: float) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for item in _items(name, value.items() if isinstance(value, Mapping) else value, "pairs (token id, bias)"):
        try:
            given, bias = cast("tuple[object, object]", item)
        except (TypeError, ValueError):
            raise SamplingError(f"{name}: expected pairs (token id, bias), got {item!r:.60}") from None
        token = _integer(f"{name}: token id", given, 0, _MAX_INT)
        if token in found:
            raise SamplingError(f"{name}: token {token} is there twice")
        found[token] = _real(f"{name}[{token}]", bias, low, high)
    return tuple(found.items())


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = []
    for item in (value,) if isinstance(value, str) else _items(name, value, "strings"):
        if not isinstance(item, str) or not item:
            raise SamplingError(f"{name}: expected strings of at least one character, got {item!r:.60}")
        strings.append(item)
    return tuple(strings)


def _callables(name: str, value: object) -> tuple[LogitsProcessor, ...]:
    found = tuple(_items(name, value, "callables"))
    for i, item in enumerate(found):
        if not callable(item):
            raise SamplingError(f"{name}[{i}]: expected a callable, got {item!r:.60}")
    return cast("tuple[LogitsProcessor, ...]", found)


def _items(name: str, value: object, of_what: str) -> Iterator[object]:
    try:
        if not isinstance(value, (str, bytes)):
            return iter(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        pass
    raise SamplingError(f"{name}: expected a sequence of {of_what}, got {value!r:.60}")


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SamplingError(f"{name}: expected True or False, got {value!r:.60}")
    return bool(value)


_CHECKS: dict[str, tuple[Any, ...]] = {
    "temperature": (_real, -_MAX_FLOAT, _MAX_FLOAT),
    "dynatemp_range": (_real, 0.0, _MAX_FLOAT),
    "dynatemp_exponent": (_real, 0.0, _MAX_FLOAT),
    "top_k": (_integer, -1, _MAX_INT),
    "top_p": (_real, 0.0, 1.0),
    "min_p": (_real, 0.0, 1.0),
    "typical_p": (_real, 0.0, 1.0),
    "top_n_sigma": (_real, -1.0, _MAX_FLOAT),
    "xtc_probability": (_real, 0.0, 1.0),
    "xtc_threshold": (_real, 0.0, 1.0),
    "repeat_penalty": (_real, _MIN_FLOAT, 1 / _MIN_FLOAT),
    "frequency_penalty": (_real, -_MAX_PENALTY, _MAX_PENALTY),
    "presence_penalty": (_real, -_MAX_PENALTY, _MAX_PENALTY),
    "repeat_last_n": (_integer, -1, _MAX_INT),
    "dry_multiplier": (_real, 0.0, _MAX_FLOAT),
    "dry_base": (_real, 1.0, _MAX_FLOAT),
    "dry_allowed_length": (_integer, 0, _MAX_INT),
    "dry_penalty_last_n": (_integer, -1, _MAX_INT),
    "dry_sequence_breakers": (_strings,),
    "mirostat": (_integer, 0, 2),
    "mirostat_tau": (_real, 0.0, _MAX_PENALTY),
    "mirostat_eta": (_real, 0.0, _MAX_PENALTY),
    "adaptive_target": (_real, -1.0, 1.0),
    "adaptive_decay": (_real, 0.0, 0.99),
    "logit_bias": (_biases, -np.inf, _MAX_PENALTY),
    "banned_token_ids": (_integers, 0, _MAX_INT),
    "min_tokens": (_integer, 0, _MAX_INT),
    "max_tokens": (_integer, 0, _MAX_INT),
    "n": (_integer, 1, _MAX_INT),
    "seed": (_integer, 0, _MAX_SEED),
    "stop": (_strings,),
    "stop_token_ids": (_integers, 0, _MAX_INT),
    "include_stop": (_boolean,),
    "ignore_eos": (_boolean,),
    "logprobs": (_integer, 0, _MAX_INT),
    "prompt_logprobs": (_integer, 0, _MAX_INT),
    "logits_processors": (_callables,),
}
