"""The architectures ggufpy can build, found by the `general.architecture` a file names.

Every subclass of `Decoder` with a name, in a family's file of this folder, is registered by being there; nothing else
has to be edited.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import Decoder
from ggufpy.arch.tensors import TensorSpec, check_tensors
from ggufpy.errors import UnsupportedArchitectureError

__all__ = ["Config", "Decoder", "TensorSpec", "check_tensors", "find", "names"]


@functools.cache
def _registry() -> dict[str, type[Decoder]]:
    found: dict[str, type[Decoder]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Decoder) and value.name:
                found[value.name] = value
    return dict(sorted(found.items()))


def names() -> list[str]:
    """List the supported values of `general.architecture`, sorted."""
    return list(_registry())


def find(name: object) -> type[Decoder]:
    """Return the declaration of an architecture; UnsupportedArchitectureError names the nearest known ones."""
    if isinstance(name, str) and name in _registry():
        return _registry()[name]
    near = difflib.get_close_matches(str(name), names(), n=3)
    known = f"the nearest that are: {', '.join(near)}" if near else f"{len(names())} are, llama among them"
    raise UnsupportedArchitectureError(f"general.architecture {name!r:.80} is not supported; {known}")
