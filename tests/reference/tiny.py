"""The tiny random models that are compared with llama.cpp: every variant of every architecture, by name."""

from __future__ import annotations

from pathlib import Path

from ggufpy import arch
from ggufpy.testing import variants, write_tiny_model

__all__ = ["VARIANTS", "write"]

VARIANTS = {f"{name}-{label}": (name, options) for name in arch.names() for label, options in variants(name).items()}


def write(name: str, folder: Path) -> Path:
    """Write one of the models into a folder and return its path; the same name always gives the same bytes."""
    architecture, options = VARIANTS[name]
    return write_tiny_model(architecture, folder / f"{name}.gguf", **options)
