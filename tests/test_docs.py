"""What README and docs say is so: their code runs, what they quote is in the source, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from reference.make_architectures import PAGE, page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


def test_the_readmes_code_runs(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newcomer who pastes the README's code, block after block, gets what it promises."""
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "README.md"):
        if not block.startswith("class "):
            exec(block, names)
    assert "Paris" in capsys.readouterr().out
    assert (4, 49152) == names["rows"].shape
    assert (576, 576) == names["values"].shape


def test_the_readmes_architectures_are_the_source() -> None:
    """The classes shown are whole and as they stand in their file."""
    source = (ROOT / "ggufpy" / "arch" / "gemma.py").read_text(encoding="utf-8")
    (shown,) = (block for block in blocks(ROOT / "README.md") if block.startswith("class "))
    for text in shown.rstrip().split("\n\n\n"):
        assert f"\n\n\n{text}\n" in source


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file or folder of the repository."""
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [] == [link for link in links if not (page.parent / link).exists()]


def test_the_page_on_architecture_names_every_room() -> None:
    """No room is forgotten, and none is described that is not there."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    rooms = set(re.findall(r"`([\w]+(?:\.py|/))`", table))
    found = {path.name if path.is_file() else f"{path.name}/" for path in (ROOT / "ggufpy").glob("[!_]*")}
    assert {name for name in found if name.endswith((".py", "/")) and name != "lib/"} | {"_ffi/"} == rooms


def test_the_page_on_architectures_is_what_their_declarations_say() -> None:
    """It is written by tests/reference/make_architectures.py, and by nobody else."""
    assert PAGE.read_text(encoding="utf-8") == page()
