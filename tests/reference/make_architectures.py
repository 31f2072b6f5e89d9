"""Writes docs/architectures.md from the declarations: what each architecture is, where it stands, which fields it has.

Needs ggufpy alone; tests/test_docs.py holds the page against it.
"""

from __future__ import annotations

from pathlib import Path

from ggufpy import arch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
HEAD = """# Architectures

What each value of `general.architecture` stands for, as its declaration says, and the fields of `Config`
([config.py](../ggufpy/arch/config.py)) it has beside those that every architecture has. [parity.md](parity.md) says how
each was compared with llama.cpp. Written by `tests/reference/make_architectures.py`.

| architecture | declared in | how it differs | further fields |
|---|---|---|---|
"""


def row(name: str) -> str:
    """Describe one architecture by its class."""
    declaration = arch.find(name)
    file = declaration.__module__.rpartition(".")[2]
    words = " ".join((declaration.__doc__ or "").split()).replace("|", "\\|")
    keys = ", ".join(f"`{key}`" for key in declaration.keys)
    return f"| `{name}` | [{file}](../ggufpy/arch/{file}.py) `{declaration.__name__}` | {words} | {keys} |\n"


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(map(row, arch.names()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
