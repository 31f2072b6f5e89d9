"""Llama and the models converted to its name: Llama 1-3, Mistral, Mixtral, SmolLM, TinyLlama, Yi and others."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import ROPE_NORM, Decoder, Moe, f32, inv_sqrt

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
    keys={"attention_scale": 0.0, "expert_weights_scale": 0.0},
    check=_check,
    rope_factors=True,
    attention_scale=lambda c: f32(c.attention_scale) or inv_sqrt(c.n_embd_head_v),
    output_bias=True,
    ffn_bias=True,
    moe=Moe(normalize=True),
)
