"""Spark."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["Spark25"]


class Spark25(Decoder):
    """Spark 2.5: each head of attention has a gate; the file says which layers have windows, and each layer's heads."""

    name = "spark2_5"
    keys = {"n_swa": REQUIRED, "rope_freq_base_swa": 0.0, "n_rot_swa": 0}
    swa_period = None
    swa_rope = "scaled"
    partial_rope = True
    rope = NEOX
    attn_gate = "sigmoid"
    gate_per = "head"
    activation = "gelu"
    tiny_variants = {"heads": {"n_head": [4, 2, 8], "n_head_kv": [2, 1, 2], "n_embd_head_k": 32, "n_embd_head_v": 32}}
