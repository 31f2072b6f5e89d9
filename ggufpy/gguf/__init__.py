"""The GGUF file format: reading, writing, and its facts.

Pure Python: inspecting a file never needs the compiled library. What a model makes of the metadata is decided
elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggufpy.gguf.arrays import GGUFArray
from ggufpy.gguf.format import GGMLType
from ggufpy.gguf.reader import GGUFFile, Shard, TensorInfo

if TYPE_CHECKING:
    from ggufpy.gguf.writer import GGUFWriter, write_gguf

__all__ = ["GGMLType", "GGUFArray", "GGUFFile", "GGUFWriter", "Shard", "TensorInfo", "write_gguf"]


def __getattr__(name: str) -> Any:
    """Import the writer when somebody writes: those who run models never do."""
    if name not in ("GGUFWriter", "write_gguf"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ggufpy.gguf import writer

    return getattr(writer, name)
