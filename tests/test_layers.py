"""The package's rooms: each file imports only from those below it, and C is reached from few places."""

from __future__ import annotations

import ast
from pathlib import Path

import ggufpy

ROOT = Path(ggufpy.__file__).parent
ORDER = [
    "errors", "_ffi", "gguf", "types", "backend", "graph", "arch", "weights", "batch", "cells", "states", "memory",
    "snapshots", "session", "chat", "answers", "tokenizer", "reuse", "sampling", "scoring", "generate", "engine",
    "threads", "speculation", "hub", "model", "reference", "testing", "cli", "__main__",
]  # fmt: skip
MAY_USE_C = {"_ffi", "types", "backend", "graph"}
PURE = {
    "errors", "gguf", "batch", "cells", "chat", "tokenizer", "reuse", "sampling", "generate", "engine", "threads",
    "hub",
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def runs_later(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def imports(path: Path) -> set[str]:
    """The rooms that a file imports from when it is imported itself."""
    found = set()
    package = ["ggufpy", *path.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(path.read_text())
    later = {id(inner) for node in ast.walk(tree) if runs_later(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in later:
            continue
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "ggufpy" and len(name) > 1}
    return found


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_every_room_is_known() -> None:
    """A new file has to be given its place in the order."""
    assert {room(path) for path in FILES} == set(ORDER)


def test_imports_point_downwards() -> None:
    """No file imports a room above its own."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in FILES
        for other in imports(path) & set(ORDER)
        if ORDER.index(other) > ORDER.index(room(path))
    ]
    assert wrong == []


def test_c_is_reached_from_few_rooms() -> None:
    """Only the rooms next to ggml see it; the pure ones do not even import the rooms that do."""
    assert {room(path) for path in FILES if "_ffi" in imports(path)} - {"cli"} <= MAY_USE_C
    for path in FILES:
        if room(path) in PURE:
            assert not imports(path) & (MAY_USE_C | {"arch", "session"}), path
