"""The tiny random models that are compared with llama.cpp in every situation: all variants of two architectures.

The rest are compared in a few situations each (test_parity.py).
"""

from __future__ import annotations

from pathlib import Path

from ggufpy.testing import variants, write_tiny_model

__all__ = ["VARIANTS", "write"]

ARCHITECTURES = ("llama", "gemma3")
VARIANTS = {f"{name}-{label}": (name, options) for name in ARCHITECTURES for label, options in variants(name).items()}


def write(name: str, folder: Path) -> Path:
    """Write one of the models into a folder and return its path; the same name always gives the same bytes."""
    architecture, options = VARIANTS[name]
    return write_tiny_model(architecture, folder / f"{name}.gguf", **options)
