"""Xiaomi's MiMo."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Moe, f32
from ggufpy.graph import Tensor

__all__ = ["MiMo2"]


class MiMo2(Decoder):
    """MiMo 2: values narrower than keys, sinks, windowed layers with heads of their own, scaled attention."""

    name = "mimo2"
    keys = {"n_ff_exp": REQUIRED, "n_swa": REQUIRED, "rope_freq_base_swa": 10000.0, "attn_value_scale": 0.0}
    swa_period = None
    partial_rope = True
    split_heads = True
    nextn = True
    tie = False
    rope = NEOX
    qkv_bias = False
    qkv_scale = False
    sinks = None
    moe = Moe(by_tensors=True, gating="sigmoid", bias=None)
    tiny = {"n_embd_head_k": 64, "n_embd_head_v": 32, "n_rot": 16}
    tiny_variants = {"heads-per-layer": {"n_head": [4, 8, 4], "n_head_kv": [2, 4, 1]}}

    def attention(self, x: Tensor, il: int) -> Tensor:
        cur, scale = super().attention(x, il), self.c.attn_value_scale
        return self.g.scale(cur, f32(scale)) if scale not in (0.0, 1.0) else cur
