"""The tensor table: which tensors a model has, with which shapes, and whether a file agrees.

Shapes are in ggml order here: the first dimension is the row, the one that is contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ggufpy.errors import GGUFError
from ggufpy.gguf import GGMLType, GGUFFile

__all__ = ["Has", "Presence", "TensorSpec", "check_tensors", "linear"]

Presence = bool | None
"""Whether a file has something: True always, False never, None as it likes."""
Has = Collection[str]
"""The names that a file or a layer of it has; none where they are not known."""

MAX_FAULTS_SHOWN = 40
NO_WEIGHTS = [GGMLType[name] for name in ["I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"]]
"""Types that ggml has no product for: indices, and what its kernels use among themselves."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model: its name in the file, its shape (ggml order), and whether a file may lack it.

    `indexed` marks a table whose rows are looked up by number (GET_ROWS) and so is never repacked, `f32` one that may
    have no other type, as all vectors, `unused` a tensor that files have and no graph needs: it may have any shape and
    is not loaded. `or_shape` is another shape that a file may choose.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    indexed: bool = False
    f32: bool = False
    or_shape: tuple[int, ...] = ()
    unused: bool = False


def linear(role: str, n_in: int, n_out: int, bias: Presence, *, scale: bool = True) -> Iterator[TensorSpec]:
    """List the tensors of a matrix: weight, scale and bias."""
    yield TensorSpec(f"{role}.weight", (n_in, n_out))
    if scale:
        yield TensorSpec(f"{role}.scale", (1,), optional=True)
    if bias is not False:
        yield TensorSpec(f"{role}.bias", (n_out,), optional=bias is None)


def check_tensors(file: GGUFFile, table: Iterable[TensorSpec]) -> None:
    """Refuse a file whose tensors are not those of the table: one GGUFError that lists every difference."""
    specs = {spec.name: spec for spec in table}
    faults = []
    for spec in (spec for spec in specs.values() if not spec.unused):
        info, expected = file.tensors.get(spec.name), list(spec.shape)
        if info is None:
            if not spec.optional:
                faults.append(f"{spec.name}: missing, expected {expected}")
        elif _unpadded(found := info.shape[::-1]) not in (_unpadded(spec.shape), _unpadded(spec.or_shape)):
            other = f" or {list(spec.or_shape)}" if spec.or_shape else ""
            faults.append(f"{spec.name}: expected {expected}{other}, file has {list(found)}")
        elif 0 in spec.shape:
            faults.append(f"{spec.name}: {expected} has no elements")
        else:
            faults += _type_faults(spec, info.type)
    faults += [f"{name}: not a tensor of this architecture" for name in file.tensors if name not in specs]
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS_SHOWN} more" if len(faults) > MAX_FAULTS_SHOWN else ""
        raise GGUFError(f"{file.path}: " + "; ".join(faults[:MAX_FAULTS_SHOWN]) + more)


def _type_faults(spec: TensorSpec, type: GGMLType | int) -> Iterator[str]:
    """Yield what no kernel could compute with: matrices may have any type of weights, all else is f32."""
    if not isinstance(type, GGMLType):
        yield f"{spec.name}: type {type} is not supported by this ggml"
    elif (spec.f32 or len(spec.shape) == 1) and type is not GGMLType.F32:
        yield f"{spec.name}: expected type f32, file has {type.label}"
    elif type in NO_WEIGHTS:
        yield f"{spec.name}: expected a type that weights have, file has {type.label}"


def _unpadded(shape: tuple[int, ...]) -> list[int]:
    """Return the shape without trailing ones, which GGUF files may write or leave out."""
    dims = list(shape)
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return dims
