"""Gemma: scaled embeddings, norms around both sublayers, GELU, and windows with a rope base of their own."""

from __future__ import annotations

import math

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import NEOX, Decoder, f32, inv_sqrt

__all__ = ["Gemma3"]

N_LAYER_27B = 62


class Gemma3(Decoder):
    """Gemma 3: norms of queries and keys too, and a window in five layers of six."""

    name = "gemma3"
    keys = {"n_swa": 0, "rope_freq_base_swa": 10000.0, "final_logit_softcapping": 0.0}
    swa_period = 6
    rope = NEOX
    scale_query = True
    qk_norm = "head"
    post_norms = ("post_attention_norm", "post_ffw_norm")
    activation = "gelu"
    ffn_scale = False

    @classmethod
    def embedding_scale(cls, c: Config) -> float:
        return f32(math.sqrt(c.n_embd))

    @classmethod
    def attention_scale(cls, c: Config) -> float:
        """Scale by the head's width; in the 27B model by the width that its heads would have without key_length."""
        return inv_sqrt(c.n_embd // c.n_head[0] if c.n_layer == N_LAYER_27B else c.n_embd_head_k)
