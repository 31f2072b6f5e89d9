"""Arcee's Trinity and Poolside's Laguna: gated attention, windows in three layers of four, shared experts."""

from __future__ import annotations

import math

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Moe, f32

__all__ = ["AfMoe", "Laguna"]


class AfMoe(Decoder):
    """Trinity (AFMoE): scaled embeddings, norms around both sublayers, no positions in every fourth layer."""

    name = "afmoe"
    keys = {
        "n_layer_dense_lead": 0, "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "expert_gating_func": 0,
        "expert_weights_scale": 0.0, "expert_weights_norm": False, "n_swa": REQUIRED, "rope_freq_base_swa": 0.0,
    }  # fmt: skip
    swa_period = 4
    swa_rope = "scaled"
    no_rope_step = 4
    partial_rope = True
    post_norms = ("post_attention_norm", "post_ffw_norm")
    rope = NEOX
    qk_norm = "head"
    attn_gate = "sigmoid"
    moe = Moe(gating="sigmoid", normalize=None, bias=True, shared="many")
    tiny = {"n_layer": 4}

    def embedding_scale(self) -> float:
        return f32(math.sqrt(self.c.n_embd))


class Laguna(Decoder):
    """Laguna: windowed layers rotate in their own way; layers may differ in the number of heads."""

    name = "laguna"
    keys = {
        "n_layer_dense_lead": REQUIRED, "n_ff_exp": REQUIRED, "n_ff_shexp": 0, "n_expert_shared": 1,
        "expert_gating_func": 0, "expert_weights_scale": 0.0, "expert_weights_norm": False, "n_swa": 0,
        "rope_freq_base_swa": 0.0, "n_rot_swa": 0,
    }  # fmt: skip
    swa_period = 4
    swa_dense_first = True
    swa_rope = "plain"
    partial_rope = True
    rope = NEOX
    qk_norm = "head"
    attn_gate = "softplus"
    gate_per = "either"
    moe = Moe(gating="sigmoid", normalize=None, bias=True, shared="many")
    tiny_variants = {
        "gate-per-head": {"or_shape": True},
        "heads-per-layer": {"n_head": [4, 2, 8], "n_embd_head_k": 32, "n_embd_head_v": 32, "n_swa": 16},
        "n-rot-swa": {"n_swa": 16, "n_rot": 16, "n_rot_swa": 32},
    }
