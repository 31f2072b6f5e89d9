"""The GGUF file format: reading, writing, and its facts.

Pure Python: inspecting a file never needs the compiled library. What a model makes of the metadata is decided
elsewhere.
"""

from __future__ import annotations

from ggufpy.gguf.arrays import GGUFArray
from ggufpy.gguf.format import GGMLType
from ggufpy.gguf.reader import GGUFFile, Shard, TensorInfo
from ggufpy.gguf.writer import GGUFWriter, write_gguf

__all__ = ["GGMLType", "GGUFArray", "GGUFFile", "GGUFWriter", "Shard", "TensorInfo", "write_gguf"]
