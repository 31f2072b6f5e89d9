"""Llama and the models converted to its name: Llama 1-3, Mistral, Mixtral, SmolLM, TinyLlama, Yi and others.

`llama.attention.scale` and `llama.expert_weights_scale` are not read: llama.cpp ignores them for this architecture.
"""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import ROPE_NORM, Decoder, Moe

__all__ = ["LLAMA"]


def _check(c: Config) -> Iterator[str]:
    if not c.n_rot == c.n_embd_head_k == c.n_embd_head_v:
        yield (
            f"rope.dimension_count {c.n_rot}, attention.key_length {c.n_embd_head_k} and "
            f"attention.value_length {c.n_embd_head_v} must be equal"
        )


LLAMA = Decoder(
    name="llama",
    rope=ROPE_NORM,
    check=_check,
    rope_factors=True,
    output_bias=True,
    ffn_bias=True,
    moe=Moe(normalize=True),
)
