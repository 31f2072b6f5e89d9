"""Which class encodes plain text, and which function reads a token, for each kind of vocabulary.

Owns: the choice, by `tokenizer.ggml.model` and `tokenizer.ggml.pre`. Does not own: any family's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer.bpe import ByteLevelBPE, unspelled
from ggufpy.tokenizer.spm import SentencePieceBPE, with_spaces
from ggufpy.tokenizer.vocab import Vocabulary

__all__ = ["Encoder", "encoder", "reader"]


class Encoder(Protocol):
    """What a family does: plain text, between special tokens, to ids. Bad bytes are surrogate escapes in it."""

    def encode(self, text: str) -> list[int]:
        """Return the ids."""
        ...


def encoder(vocab: Vocabulary) -> Encoder:
    """Make the encoder of a vocabulary. Raises TokenizerError when there is none for it."""
    if vocab.model == "llama":
        return SentencePieceBPE(vocab)
    if vocab.model != "gpt2" or vocab.pre is None:
        raise TokenizerError(f"tokenizer.ggml.model: text for the model {vocab.model!r} is not supported yet")
    if not vocab.pre.stages:
        raise TokenizerError(f"tokenizer.ggml.pre: the pre-tokenizer {vocab.pre_name!r} is not supported yet")
    return ByteLevelBPE(vocab, vocab.pre)


def reader(vocab: Vocabulary) -> Callable[[bytes], bytes]:
    """Return the function that gives the bytes a normal token stands for. Raises TokenizerError as `encoder` does."""
    return with_spaces if vocab.model == "llama" else unspelled
