"""Phi: scaled queries, and rope factors for short and for long contexts."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["Phi3"]


class Phi3(Decoder):
    """Phi 3 and 4: one matrix for gate and up. llama.cpp ignores the files' window, and so do we."""

    name = "phi3"
    partial_rope = True
    rope = NEOX
    rope_factors = "long"
    scale_query = True
    ffn_fused = True
    ffn_scale = False
