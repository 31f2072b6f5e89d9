"""Text ↔ token ids, for the vocabularies in GGUF files. Knows nothing of graphs."""

from __future__ import annotations

from ggufpy.tokenizer.decoding import DecodeStream
from ggufpy.tokenizer.offsets import Token
from ggufpy.tokenizer.tokenizer import Tokenizer

__all__ = ["DecodeStream", "Token", "Tokenizer"]
