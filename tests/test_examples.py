"""The examples run as a reader would run them, and print what they are about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "n_lines", "shown"),
    [("async_chat", 5, "That would have taken too long."), ("fork_tree", 8, "Once upon a time")],
)
def test_an_example_runs(name: str, n_lines: int, shown: str, smollm2_path: Path) -> None:
    """It ends well, says nothing on standard error, and prints as many lines as it has answers."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (0, "") == (done.returncode, done.stderr)
    assert shown in done.stdout
    assert n_lines <= len(done.stdout.splitlines())
