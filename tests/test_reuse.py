"""What of a prompt is reused: how much, and why not more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggufpy import Model
from ggufpy.reuse import keep_prefix, reusable_prefix

Tiny = Callable[..., Path]


def test_reusable_prefix() -> None:
    """The common beginning counts, never the whole prompt."""
    for held, prompt, expected in [
        ([], [1], 0),
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 3], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 9, 3], [1, 2, 3], 1),
        ([9], [1, 2], 0),
    ]:
        assert expected == reusable_prefix(held, prompt)


@pytest.mark.parametrize(
    ("held", "prompt", "expected"),
    [
        ([], [5, 6], (0, "the sequence was empty")),
        ([5, 6], [5, 6, 7], (2, None)),
        ([5, 6, 7], [5, 6, 7], (2, None)),
        ([5, 6, 7, 8], [5, 6], (1, None)),
        ([5, 6, 7], [5, 6, 8], (2, "differs at token 2 (held 7, prompt 8)")),
        ([5, 6, 7, 8], [5, 9, 7, 8], (1, "differs at token 1 (held 6, prompt 9)")),
        ([5, 6], [7, 6], (0, "differs at token 0 (held 5, prompt 7)")),
    ],
)
def test_what_is_kept_and_why_not_more(held: list[int], prompt: list[int], expected: Any, tiny: Tiny) -> None:
    """The sequence is cut to the common beginning, and the first difference is named with both tokens."""
    with Model.load(tiny("llama")) as model, model.session(n_ctx=256, n_threads=1) as session:
        if held:
            session.decode(held)
        assert expected == keep_prefix(session, prompt)
        assert prompt[: expected[0]] == session.tokens()


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("gemma3", {"swa_full": False, "n_ubatch": 16}, r"its windowed layers need the positions from 0 on but keep"),
        ("lfm2", {}, r"cannot trim sequence 0 from 400 to 2 tokens: its recurrent layers keep no earlier state"),
    ],
)
def test_a_memory_that_cannot_go_back_says_why(name: str, options: dict[str, Any], named: str, tiny: Tiny) -> None:
    """What a window or a state has left behind is the reason, and the sequence is left empty."""
    variant: dict[str, Any] = {"n_swa": 16, "n_layer": 3, "swa_pattern": 3} if name == "gemma3" else {}
    with Model.load(tiny(name, **variant)) as model, model.session(n_ctx=512, n_threads=1, **options) as session:
        session.decode([5, 6] + [7] * 398)
        kept, reason = keep_prefix(session, [5, 6, 9])
        assert (0, 0) == (kept, session.n_past())
        assert named in str(reason)
