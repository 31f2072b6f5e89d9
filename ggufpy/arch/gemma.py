"""Gemma: scaled embeddings, norms around both sublayers, GELU, and windows with a rope base of their own."""

from __future__ import annotations

import math

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import ROPE_NEOX, Decoder, f32, inv_sqrt

__all__ = ["GEMMA3"]

N_LAYER_27B = 62


def _query_scale(c: Config) -> float:
    """Scale by the head's width, but in the 27B model by the width that its heads would have without key_length."""
    return inv_sqrt(c.n_embd // c.n_head[0] if c.n_layer == N_LAYER_27B else c.n_embd_head_k)


GEMMA3 = Decoder(
    name="gemma3",
    rope=ROPE_NEOX,
    keys={"n_swa": 0, "rope_freq_base_swa": 10000.0, "final_logit_softcapping": 0.0},
    embedding_scale=lambda c: f32(math.sqrt(c.n_embd)),
    attention_scale=_query_scale,
    scale_query=True,
    qk_norm=True,
    post_norm=True,
    activation="geglu",
    ffn_scale=False,
    swa_period=6,
)
