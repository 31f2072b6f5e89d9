"""Seed-OSS."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["SeedOss"]


class SeedOss(Decoder):
    """Seed-OSS: Llama rotated by halves; the norm before the FFN goes by another name."""

    name = "seed_oss"
    ffn_norm = "post_attention_norm"
    rope = NEOX
