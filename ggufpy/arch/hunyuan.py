"""Hunyuan: dense models, and mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ggufpy.arch.decoder import NEOX, REQUIRED, ROUTER, Config, Decoder, Moe

__all__ = ["HunyuanDense", "HunyuanMoe", "HunyuanVL", "HyV3"]


class HunyuanDense(Decoder, name="hunyuan-dense"):
    """Hunyuan: norms of queries and keys after their rotation, whose base grows with `rope.scaling.alpha`."""

    keys = {"rope_scaling_alpha": 0.0}
    rope = NEOX
    qk_norm = "rotated"

    def adjust(self) -> Config:
        c = self.c
        if c.rope_scaling_alpha <= 0:
            return c
        d = c.n_embd_head_k
        factor = np.float32(math.pow(np.float32(c.rope_scaling_alpha), np.float32(d) / np.float32(d - 2)))
        return replace(c, rope_freq_base=float(np.float32(c.rope_freq_base) * factor))


class HunyuanVL(HunyuanDense, name="hunyuan_vl", keys={"rope_scaling_alpha": 0.0, "rope_sections": ()}):
    """Hunyuan VL, the text part: files with sections rotate by MROPE."""


class HunyuanMoe(Decoder, name="hunyuan-moe"):
    """Hunyuan A13B: norms of queries and keys after their rotation; routed and shared experts in every layer."""

    keys = {"n_ff_shexp": 0}
    rope = NEOX
    qk_norm = "rotated"
    moe = Moe(shared="dense")
    tiny = {"n_ff_exp": 64}  # llama.cpp wants the width but takes feed_forward_length


class HyV3(Decoder, name="hy_v3"):
    """Hunyuan 3: norms before the rotation, leading dense layers, a router that the file describes."""

    keys = {**ROUTER, "n_ff_exp": REQUIRED, "n_ff_shexp": 0}
    nextn = True
    rope = NEOX
    qk_norm = "head"
    ffn_scale = True
    moe = Moe(
        by_tensors=True, gating="sigmoid", normalize=None, bias=None, bias_name="exp_probs_b", shared="one", fused=True,
        scale=True, split_ff=True,
    )  # fmt: skip
    crop = "last"
