"""Guessing what comes next, so that several tokens are computed at once: from the text so far, or with a small model.

A guess costs time when it is wrong and changes nothing: every token is chosen from the model's own logits, and what
was guessed wrong is cut off again. This file owns the guessing and when it is worth it. Computing and checking the
guesses is engine.py's.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from ggufpy.engine import Drafter
from ggufpy.errors import UnsupportedArchitectureError
from ggufpy.reuse import common_prefix

if TYPE_CHECKING:
    from ggufpy.model import Model
    from ggufpy.session import Session

__all__ = ["DraftModel", "Drafting", "PromptLookup", "check_trimmable"]

MAX_PLACES = 16
"""So many earlier places are compared; the longest match among them is nearly always among the nearest."""
MIN_ROWS = 8
PENALTY = 4
MAX_NEEDED = 24
MAX_SIZES_APART = 128
"""Vocabularies of one family are padded to different sizes; llama.cpp allows for as much."""


@runtime_checkable
class Drafting(Protocol):
    """A way of guessing: makes a drafter for each sequence."""

    def start(self, target: Model, n_ctx: int) -> Drafter:
        """Return a drafter for a sequence of at most n_ctx tokens of a model."""


# ------------------------------------------------------------------------------------------------ from the text


class PromptLookup:
    """Guess that text goes on as it did before: where the last tokens stand earlier in prompt or answer.

    num_speculative_tokens  the most tokens guessed at once
    prompt_lookup_min       so many last tokens have to stand there, more after guesses that failed
    prompt_lookup_max       of several places the one with the longest match wins; longer ones are not told apart

    Names are vLLM's; the method is A. Saxena's (Prompt Lookup Decoding, 2023). Guesses are 7 tokens long and get longer
    (15, 31, …) with the match: kernels take their rows by fours and eights, and on a CPU computing 8 tokens takes as
    long as 5 or 6 one by one, so a guess has to be long and likely to gain. Raises ValueError for numbers out of range.
    """

    __slots__ = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")

    def __init__(
        self, num_speculative_tokens: int = 15, *, prompt_lookup_min: int = 3, prompt_lookup_max: int = 16
    ) -> None:
        self.num_speculative_tokens = _at_least("num_speculative_tokens", num_speculative_tokens, 1)
        self.prompt_lookup_min = _at_least("prompt_lookup_min", prompt_lookup_min, 1)
        self.prompt_lookup_max = _at_least("prompt_lookup_max", prompt_lookup_max, self.prompt_lookup_min)

    def start(self, target: Model | None = None, n_ctx: int = 0) -> Drafter:
        """Return a drafter for a sequence of any model."""
        return _Lookup(self)

    def __repr__(self) -> str:
        return (
            f"PromptLookup({self.num_speculative_tokens}, prompt_lookup_min={self.prompt_lookup_min}, "
            f"prompt_lookup_max={self.prompt_lookup_max})"
        )


class _Lookup:
    """Look up one sequence's last tokens in what came before them.

    `_latest` has the last position of each n-gram (n: prompt_lookup_min) by its end, `_earlier` that of the same n-gram
    before: a token costs one entry in each, a search a few comparisons. While text goes on as it did at the place
    found, nothing is searched and the match grows.
    """

    __slots__ = ("_at", "_earlier", "_guess", "_guessed_at", "_latest", "_length", "_needed", "_options")

    def __init__(self, options: PromptLookup) -> None:
        self._options = options
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        self._at: int | None = None  # the place that the next token is expected to repeat
        self._length = 0  # of the match before it
        self._needed = options.prompt_lookup_min
        self._guess: list[int] = []
        self._guessed_at = 0

    def propose(self, history: Sequence[int], n_max: int, /) -> list[int]:
        self._learn_from_guess(history)
        self._read(history)
        self._guess, self._guessed_at = [], len(history)
        if self._at is not None and self._length >= self._needed:
            period = len(history) - self._at
            for i in range(min(self._worthwhile(), n_max)):  # past its end the match repeats itself
                self._guess.append(history[self._at + i % period])
        return self._guess

    def close(self) -> None: ...

    def _worthwhile(self) -> int:
        rows = MIN_ROWS
        while rows <= self._length:
            rows *= 2
        return min(rows - 1, self._options.num_speculative_tokens)

    def _learn_from_guess(self, history: Sequence[int]) -> None:
        """Ask for longer matches after a guess that cost more than it gave, for shorter ones after a right one."""
        right, n = common_prefix(self._guess, history[self._guessed_at :]), len(self._guess)
        if 2 * right < n:
            self._needed = min(self._needed + PENALTY, MAX_NEEDED)
        elif right == n > 0:
            self._needed = max(self._needed - PENALTY, self._options.prompt_lookup_min)

    def _read(self, history: Sequence[int]) -> None:
        """Take the new tokens in; follow the match or, at the last one, find another."""
        n, last = self._options.prompt_lookup_min, len(history) - 1
        for i in range(len(self._earlier), len(history)):
            if self._at is not None and history[self._at] == history[i]:
                self._at, self._length = self._at + 1, self._length + 1
            else:
                self._at, self._length = None, 0
            key = tuple(history[max(0, i + 1 - n) : i + 1])
            self._earlier.append(self._latest.get(key, -1))
            self._latest[key] = i
            if i == last and self._at is None:
                self._search(history, self._earlier[i])

    def _search(self, history: Sequence[int], place: int) -> None:
        last, low, high = len(history) - 1, self._options.prompt_lookup_min, self._options.prompt_lookup_max
        for _ in range(MAX_PLACES):
            if place < low - 1 or self._length == high:
                break
            n = low
            while n < high and n <= place and history[place - n] == history[last - n]:
                n += 1
            if n > self._length:
                self._at, self._length = place + 1, n
            place = self._earlier[place]


# ------------------------------------------------------------------------------------------------ with a model


class DraftModel:
    """Guess what a small model with the same vocabulary would say.

    num_speculative_tokens  the most tokens guessed at once
    p_min                   a guess ends where the small model gives its likeliest token less than this (llama.cpp's)

    Other keywords are those of `SessionOptions`: each sequence gets a session of the small model, of n_ctx tokens or as
    many as it was trained on. Raises ValueError for numbers out of range and UnsupportedArchitectureError for a model
    that cannot take tokens back.
    """

    def __init__(self, model: Model, *, num_speculative_tokens: int = 7, p_min: float = 0.75, **options: Any) -> None:
        self.model = model
        self.num_speculative_tokens = _at_least("num_speculative_tokens", num_speculative_tokens, 1)
        if isinstance(p_min, bool) or not isinstance(p_min, (int, float)) or not 0 <= p_min <= 1:
            raise ValueError(f"p_min: expected a number from 0 to 1, got {p_min!r:.60}")
        self.p_min = float(p_min)
        model._check_can_continue(None)
        check_trimmable(model, "the draft model")
        self._options: Mapping[str, Any] = options
        self._checked: weakref.ref[Model] | None = None

    def start(self, target: Model, n_ctx: int) -> Drafter:
        """Return a drafter with a session of its own. ValueError where the target's vocabulary is another."""
        if self._checked is None or self._checked() is not target:
            _check_vocabulary(target, self.model)
            self._checked = weakref.ref(target)
        options = {"n_ctx": min(n_ctx, self.model.config.n_ctx_train), **self._options}
        n_vocab = min(target.config.n_vocab, self.model.config.n_vocab)
        return _Model(self, functools.partial(self.model.session, **options), n_vocab)

    def __repr__(self) -> str:
        return f"DraftModel({self.model!r}, num_speculative_tokens={self.num_speculative_tokens}, p_min={self.p_min})"


class _Model:
    """Guess one sequence with a session, opened with the first guess; it holds the history and then its own guess."""

    __slots__ = ("_ends", "_guess", "_n_history", "_n_vocab", "_open", "_options", "_session")

    def __init__(self, options: DraftModel, open_session: Callable[[], Session], n_vocab: int) -> None:
        self._options, self._open, self._n_vocab = options, open_session, n_vocab
        self._ends = options.model.tokenizer.eog_token_ids
        self._session: Session | None = None
        self._n_history = 0
        self._guess: list[int] = []  # as far as the session holds it

    def propose(self, history: Sequence[int], n_max: int, /) -> list[int]:
        session = self._session = self._session or self._open()
        n_max = min(n_max, self._options.num_speculative_tokens, session.n_ctx_seq - len(history))
        if n_max < 1:
            return []
        right = common_prefix(self._guess, history[self._n_history :])
        right = min(right, len(history) - 1 - self._n_history)  # the last token is computed: its row comes first
        session.trim(0, self._n_history + right)
        missing = list(history[self._n_history + right :])
        self._n_history, self._guess = len(history), []
        guess: list[int] = []
        while True:
            row = session.decode(missing, copy=False)[0, : self._n_vocab]
            self._guess = guess[:]
            token = int(row.argmax())
            if 1 / float(np.exp(row - row[token]).sum()) < self._options.p_min:
                return guess
            guess.append(token)
            if len(guess) == n_max or token in self._ends:
                return guess
            missing = [token]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


# ------------------------------------------------------------------------------------------------------- checks


def check_trimmable(model: Model, role: str) -> None:
    """Raise UnsupportedArchitectureError for a model with recurrent layers, which cannot take guesses back."""
    if model.is_recurrent:
        raise UnsupportedArchitectureError(
            f"draft: {role} ({model.config.architecture}) has recurrent layers, which cannot take tokens back that "
            "were guessed wrong"
        )


def _check_vocabulary(target: Model, draft: Model) -> None:
    """Raise ValueError where two models' tokens are not the same, but for padding at the end."""
    if target is draft:
        return
    ours, theirs = (model.metadata["tokenizer.ggml.tokens"] for model in (target, draft))
    if abs(len(ours) - len(theirs)) > MAX_SIZES_APART:
        raise ValueError(f"draft: its vocabulary has {len(theirs)} tokens, the model's {len(ours)}")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise ValueError(f"draft: its vocabulary is another: token {i} is {b!r:.60}, the model's {a!r:.60}")


def _at_least(name: str, value: object, low: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if number < low or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer of at least {low}, got {value!r:.60}")
    return number
