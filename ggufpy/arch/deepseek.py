"""DeepSeek, and dots.llm1, which is built like it: leading dense layers, and experts that all tokens share."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Moe

__all__ = ["DeepSeek", "Dots1"]


class DeepSeek(Decoder):
    """DeepSeek MoE (the first one): Llama with experts after some dense layers."""

    name = "deepseek"
    keys = {"n_layer_dense_lead": 0, "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "expert_weights_scale": 0.0}
    moe = Moe(normalize=False, shared="many")


class Dots1(DeepSeek):
    """dots.llm1: normalized queries and keys, a router that the file describes, and a bias for its choice."""

    name = "dots1"
    keys = {**DeepSeek.keys, "expert_weights_norm": False, "expert_gating_func": 0}
    tie = False
    rope = NEOX
    qk_norm = "head"
    moe = Moe(gating=None, normalize=None, bias=None, shared="many")
    tiny = {"n_head_kv": 4, "expert_gating_func": 2}
    tiny_variants = {"one-kv-head": None}
