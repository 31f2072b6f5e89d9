"""The architectures ggufpy can build, found by the `general.architecture` a file names.

Every subclass of `Decoder` with a name, in a family's file of this folder, is registered by being there; nothing else
has to be edited.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import Decoder
from ggufpy.arch.tensors import TensorSpec, check_tensors
from ggufpy.errors import UnsupportedArchitectureError

__all__ = ["Config", "Decoder", "TensorSpec", "check_tensors", "find", "names"]


@functools.cache
def _family(module: str) -> dict[str, type[Decoder]]:
    """Return the architectures that a file of this folder declares or builds on."""
    values = vars(importlib.import_module(f"{__name__}.{module}")).values()
    return {v.name: v for v in values if isinstance(v, type) and issubclass(v, Decoder) and v.name}


@functools.cache
def _families() -> list[str]:
    return [info.name for info in pkgutil.iter_modules(__path__)]


def _alike(a: str, b: str) -> int:
    """Count the letters that two names begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def names() -> list[str]:
    """List the supported values of `general.architecture`, sorted."""
    return sorted({name for module in _families() for name in _family(module)})


def find(name: object) -> type[Decoder]:
    """Return the declaration of an architecture; UnsupportedArchitectureError names the nearest known ones.

    The families named most like it are imported first, so that most models need one file only.
    """
    text = str(name)
    for module in sorted(_families(), key=lambda module: -_alike(module, text)):
        if isinstance(name, str) and name in _family(module):
            return _family(module)[name]
    import difflib

    near = difflib.get_close_matches(text, names(), n=3)
    known = f"the nearest that are: {', '.join(near)}" if near else f"{len(names())} are, llama among them"
    raise UnsupportedArchitectureError(f"general.architecture {name!r:.80} is not supported; {known}")
