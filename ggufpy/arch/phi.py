"""Phi: scaled queries, and rope factors for short and for long contexts."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder, Moe

__all__ = ["Phi3", "PhiMoE"]


class Phi3(Decoder, name="phi3", partial_rope=True, rope=NEOX, rope_factors="long", scale_query=True, ffn_fused=True):
    """Phi 3 and 4: one matrix for gate and up. llama.cpp ignores the files' window, and so do we."""


class PhiMoE(Phi3, name="phimoe"):
    """Phi 3.5 MoE: experts, and biases beside the norms' weights, in attention and at the head."""

    norm_bias = True
    tie = False
    head_bias = True
    output_bias = True
    moe = Moe()
    tiny = {"n_expert": 4, "n_expert_used": 2}
