"""The GGUF file format: reading, writing, and its facts. Pure Python: inspecting a file never needs the compiled library."""

from __future__ import annotations

from ggufpy.gguf.format import GGMLType
from ggufpy.gguf.reader import GGUFArray, GGUFFile, Shard, TensorInfo

__all__ = ["GGMLType", "GGUFArray", "GGUFFile", "Shard", "TensorInfo"]
