"""Llama and the models converted to its name: Llama 1-3, Mistral, Mixtral, SmolLM, TinyLlama, Yi and others.

`llama.attention.scale` and `llama.expert_weights_scale` are not read: llama.cpp ignores them for this architecture.
"""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import Decoder, Moe

__all__ = ["Llama"]


class Llama(Decoder):
    """The common decoder with every option it has."""

    name = "llama"
    rope_factors = True
    output_bias = None
    ffn_bias = None
    moe = Moe()

    @classmethod
    def check(cls, c: Config) -> Iterator[str]:
        if not c.n_rot == c.n_embd_head_k == c.n_embd_head_v:
            yield (
                f"rope.dimension_count {c.n_rot}, attention.key_length {c.n_embd_head_k} and "
                f"attention.value_length {c.n_embd_head_v} must be equal"
            )

    @classmethod
    def expert_optional(cls, role: str) -> bool:
        return role == "gate"
