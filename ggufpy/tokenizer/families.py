"""Which class encodes plain text, and which function reads a token, for each kind of vocabulary.

Owns: the choice, by `tokenizer.ggml.model` and `tokenizer.ggml.pre`. Does not own: any family's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer.bpe import byte_pair_encoder, unspelled
from ggufpy.tokenizer.plamo2 import Plamo2
from ggufpy.tokenizer.rwkv import RWKV, unescaped
from ggufpy.tokenizer.spm import SentencePieceBPE, with_spaces
from ggufpy.tokenizer.unigram import Unigram
from ggufpy.tokenizer.vocab import TokenAttr, Vocabulary
from ggufpy.tokenizer.wordpiece import WordPiece

__all__ = ["Encoder", "encoder", "reader"]

_ENCODERS: dict[str, Callable[[Vocabulary], Encoder]] = {
    "llama": SentencePieceBPE,
    "bert": WordPiece,
    "t5": Unigram,
    "rwkv": RWKV,
    "plamo2": Plamo2,
}
_SHOWN = TokenAttr.CONTROL | TokenAttr.UNKNOWN | TokenAttr.USER_DEFINED


class Encoder(Protocol):
    """What a family does with plain text, between special tokens. Bad bytes are surrogate escapes in it."""

    def encode(self, text: str) -> list[int]:
        """Return the ids."""
        ...

    def seen(self, text: str) -> Sequence[bytes | None]:
        """Return what becomes of each character before tokens are looked for; None: it is one with that before it."""
        ...


def encoder(vocab: Vocabulary) -> Encoder:
    """Make the encoder of a vocabulary. Raises TokenizerError when the file has none."""
    if vocab.pre is not None:
        return byte_pair_encoder(vocab, vocab.pre)
    if vocab.model not in _ENCODERS:
        raise TokenizerError(f"tokenizer.ggml.model is {vocab.model!r}: the file has no tokens to make text of")
    return _ENCODERS[vocab.model](vocab)


def reader(vocab: Vocabulary) -> Callable[[bytes, int], bytes]:
    """Return the function that gives the bytes a token stands for, its kind given (llama_token_to_piece)."""
    if vocab.model == "rwkv":
        return lambda token, attr: unescaped(token)
    if vocab.model == "plamo2":
        return lambda token, attr: _byte(token) if attr & TokenAttr.BYTE else token
    spelled = unspelled if vocab.pre and not vocab.pre.escapes_spaces else with_spaces

    def read(token: bytes, attr: int) -> bytes:
        if attr & _SHOWN:
            return token
        if attr & TokenAttr.NORMAL:
            return spelled(token)
        return _byte(token) if attr & TokenAttr.BYTE else b""

    return read


def _byte(token: bytes) -> bytes:
    return bytes([int(token[3:5], 16)])
