"""OpenELM."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["OpenELM"]


class OpenELM(Decoder):
    """OpenELM: each layer has its own numbers of heads and its own width of the FFN."""

    name = "openelm"
    partial_rope = True
    tie = True
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    qkv_scale = False
    qk_norm = "head"
    tiny_variants = {"widths": {"n_head": [4, 2, 6], "n_head_kv": [2, 1, 3], "n_ff": [96, 128, 192]}}
