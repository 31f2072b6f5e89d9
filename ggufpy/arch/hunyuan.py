"""Hunyuan, the dense models."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["HunyuanDense", "HunyuanVL"]


class HunyuanDense(Decoder):
    """Hunyuan: norms of queries and keys after their rotation, whose base grows with `rope.scaling.alpha`."""

    name = "hunyuan-dense"
    keys = {"rope_scaling_alpha": 0.0}
    rope = NEOX
    qk_norm = "rotated"
    ffn_scale = False

    @classmethod
    def adjust(cls, c: Config) -> Config:
        if c.rope_scaling_alpha <= 0:
            return c
        d = c.n_embd_head_k
        factor = np.float32(math.pow(np.float32(c.rope_scaling_alpha), np.float32(d) / np.float32(d - 2)))
        return replace(c, rope_freq_base=float(np.float32(c.rope_freq_base) * factor))


class HunyuanVL(HunyuanDense):
    """Hunyuan VL, the text part: files with sections rotate by MROPE."""

    name = "hunyuan_vl"
    keys = {"rope_scaling_alpha": 0.0, "rope_sections": ()}
