"""Databricks' DBRX."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Moe

__all__ = ["Dbrx"]


class Dbrx(Decoder):
    """DBRX: LayerNorm without biases, one clamped matrix for queries, keys and values."""

    name = "dbrx"
    keys = {"clamp_kqv": REQUIRED}
    norm = "layer"
    ffn_norm = "attn_output_norm"
    tie = False
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    moe = Moe()
