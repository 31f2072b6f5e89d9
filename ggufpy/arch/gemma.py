"""Gemma: scaled embeddings, GELU, norms around both sublayers, and windows with a rope base of their own."""

from __future__ import annotations

from typing import ClassVar

from ggufpy.arch.decoder import NEOX, Decoder, Presence, inv_sqrt

__all__ = ["Gemma", "Gemma2", "Gemma3"]


class Gemma(Decoder, name="gemma"):
    """Gemma 1: embeddings are scaled by the root of their width, the gate goes through GELU."""

    partial_rope = True
    tie: ClassVar[Presence] = True
    root_scale = True
    rope = NEOX
    scale_query = True
    activation = "gelu"
    n_layer_27b: ClassVar[int] = 0

    def attention_scale(self) -> float:
        """Scale by the head's width; in the 27B models by the width that heads would have without key_length."""
        c = self.c
        return inv_sqrt(c.n_embd // c.n_head[0] if c.n_layer == self.n_layer_27b else c.n_embd_head_k)


class Gemma2(Gemma, name="gemma2"):
    """Gemma 2: norms after the sublayers too, a window in every other layer, bounded scores and logits."""

    keys = {
        "n_swa": 4096, "rope_freq_base_swa": 0.0, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    swa_period = 2
    swa_rope = "scaled"
    post_norms = ("post_attention_norm", "post_ffw_norm")
    n_layer_27b = 46


class Gemma3(Gemma, name="gemma3"):
    """Gemma 3: norms of queries and keys instead of bounds, and a window in five layers of six."""

    keys = {"n_swa": 0, "rope_freq_base_swa": 10000.0, "final_logit_softcapping": 0.0}
    swa_period = 6
    ignored: ClassVar[tuple[str, ...]] = ("dense_2.weight", "dense_3.weight")
    tie = None
    qk_norm = "head"
    post_norms = ("post_attention_norm", "post_ffw_norm")
    n_layer_27b = 62
