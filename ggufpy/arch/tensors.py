"""The tensor table: which tensors a model has, with which shapes, and whether a file agrees.

Shapes are in ggml order here: the first dimension is the row, the one that is contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ggufpy.errors import GGUFError
from ggufpy.gguf import GGUFFile

__all__ = ["TensorSpec", "check_tensors"]

MAX_FAULTS_SHOWN = 40


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model: its name in the file, its shape (ggml order), and whether a file may lack it.

    `indexed` marks a table whose rows are looked up by number (GET_ROWS) and so is never repacked.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    indexed: bool = False


def check_tensors(file: GGUFFile, table: Iterable[TensorSpec]) -> None:
    """Refuse a file whose tensors are not those of the table: one GGUFError that lists every difference."""
    specs = {spec.name: spec for spec in table}
    faults = []
    for spec in specs.values():
        info = file.tensors.get(spec.name)
        if info is None:
            if not spec.optional:
                faults.append(f"{spec.name}: missing, expected {_shape(spec.shape)}")
        elif _shape(spec.shape) != _shape(found := info.shape[::-1]):
            faults.append(f"{spec.name}: expected {_shape(spec.shape)}, file has {_shape(found)}")
    faults += [f"{name}: not a tensor of this architecture" for name in file.tensors if name not in specs]
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS_SHOWN} more" if len(faults) > MAX_FAULTS_SHOWN else ""
        raise GGUFError(f"{file.path}: " + "; ".join(faults[:MAX_FAULTS_SHOWN]) + more)


def _shape(shape: tuple[int, ...]) -> list[int]:
    """Return the shape without trailing ones, which GGUF files may write or leave out."""
    dims = list(shape)
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return dims
