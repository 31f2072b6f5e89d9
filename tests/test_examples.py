"""The examples run as a reader would run them, and print what they are about."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ggufpy import Model

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "n_lines", "shown"),
    [
        ("async_chat", 5, "That would have taken too long."),
        ("fork_tree", 8, "Once upon a time"),
        ("classify", 3, " positive: A wonderful film"),
    ],
)
def test_an_example_runs(name: str, n_lines: int, shown: str, smollm2_path: Path) -> None:
    """It ends well, says nothing on standard error, and prints as many lines as it has answers."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (0, "") == (done.returncode, done.stderr)
    assert shown in done.stdout
    assert n_lines <= len(done.stdout.splitlines())


def test_the_adapter_answers_as_lm_evaluation_harness_asks(smollm2_path: Path) -> None:
    """The three methods of its protocol, on requests with `args`; the harness itself need not be there."""

    def requests(*args: Any) -> list[Any]:
        return [SimpleNamespace(args=one) for one in args]

    adapter = runpy.run_path(str(EXAMPLES / "lm_eval_adapter.py"))["GGUF"]
    with Model.load(smollm2_path) as model:
        lm = adapter(model, n_ctx=256)
        capital = "The capital of France is"
        likely, unlikely, alone = lm.loglikelihood(requests((capital, " Paris"), (capital, " cheese"), ("", capital)))
        assert (True, False) == (likely[1], unlikely[1])
        assert likely[0] > unlikely[0]
        whole, long = lm.loglikelihood_rolling(requests((capital,), ("A long text. " * 120,)))
        assert alone[0] == pytest.approx(whole, abs=0.1)
        assert -500 < long < whole < 0
        assert math.isfinite(long)
        (answer,) = lm.generate_until(requests((capital, {"until": ["."], "max_gen_toks": 8})))
        assert answer.startswith(" Paris")
        assert "." not in answer
