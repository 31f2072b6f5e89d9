"""Run GGUF language models from Python: a thin layer over ggml, with llama.cpp's own numbers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggufpy import arch as arch
    from ggufpy import hub as hub
    from ggufpy import reference as reference
    from ggufpy import testing as testing
    from ggufpy._ffi.lib import build_info as build_info
    from ggufpy.backend import Device as Device
    from ggufpy.backend import devices as devices
    from ggufpy.errors import BackendError as BackendError
    from ggufpy.errors import BuildError as BuildError
    from ggufpy.errors import ClosedError as ClosedError
    from ggufpy.errors import ContextLengthError as ContextLengthError
    from ggufpy.errors import DownloadError as DownloadError
    from ggufpy.errors import DumpError as DumpError
    from ggufpy.errors import GGUFError as GGUFError
    from ggufpy.errors import GgufpyError as GgufpyError
    from ggufpy.errors import GraphError as GraphError
    from ggufpy.errors import SamplingError as SamplingError
    from ggufpy.errors import SnapshotError as SnapshotError
    from ggufpy.errors import StoppedError as StoppedError
    from ggufpy.errors import TemplateError as TemplateError
    from ggufpy.errors import TokenizerError as TokenizerError
    from ggufpy.errors import UnsupportedArchitectureError as UnsupportedArchitectureError
    from ggufpy.generate import Completion as Completion
    from ggufpy.generate import CompletionChunk as CompletionChunk
    from ggufpy.gguf import GGUFFile as GGUFFile
    from ggufpy.gguf import GGUFWriter as GGUFWriter
    from ggufpy.model import Model as Model
    from ggufpy.sampling import SamplingParams as SamplingParams
    from ggufpy.session import Session as Session
    from ggufpy.tokenizer import Tokenizer as Tokenizer

__version__ = "0.1.0"

# Where each public name lives. Looked up on first use, so that `import ggufpy` costs nothing and a file can be
# inspected without the compiled library.
_HOME = {
    "Completion": "generate",
    "CompletionChunk": "generate",
    "Device": "backend",
    "GGUFFile": "gguf",
    "GGUFWriter": "gguf",
    "Model": "model",
    "SamplingParams": "sampling",
    "Session": "session",
    "Tokenizer": "tokenizer",
    "build_info": "_ffi.lib",
    "devices": "backend",
}
_ERRORS = (
    "BackendError", "BuildError", "ClosedError", "ContextLengthError", "DownloadError", "DumpError", "GGUFError",
    "GgufpyError", "GraphError", "SamplingError", "SnapshotError", "StoppedError", "TemplateError", "TokenizerError",
    "UnsupportedArchitectureError",
)  # fmt: skip
_HOME |= dict.fromkeys(_ERRORS, "errors")
_MODULES = ("arch", "hub", "reference", "testing")

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ggufpy.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ggufpy' has no attribute {name!r}")
    value = getattr(import_module(f"ggufpy.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
