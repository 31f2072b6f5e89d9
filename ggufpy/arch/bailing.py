"""inclusionAI's Ling (Bailing)."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Moe
from ggufpy.arch.tensors import TensorSpec

__all__ = ["BailingMoe", "BailingMoe2"]


class BailingMoe(Decoder):
    """Ling 1: Llama with routed and shared experts in every layer, whatever `leading_dense_block_count` says."""

    name = "bailingmoe"
    keys = {
        "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "expert_weights_scale": 0.0, "expert_weights_norm": False,
    }  # fmt: skip
    tie = False
    moe = Moe(normalize=None, shared="many")
    tiny_variants = {"ignored-keys": {"n_layer_dense_lead": 1}}


class BailingMoe2(Decoder):
    """Ling 2: normalized queries and keys, leading dense layers, and a router that the file describes."""

    name = "bailingmoe2"
    keys = {**BailingMoe.keys, "n_layer_dense_lead": 0, "n_ff_shexp": 0, "expert_gating_func": REQUIRED}
    partial_rope = True
    nextn = True
    tie = False
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    qk_norm = "head"
    moe = Moe(gating=None, normalize=None, bias=None, shared="many")

    def nextn_tensors(self) -> Iterator[TensorSpec]:
        yield from super().nextn_tensors()
        yield TensorSpec("layer_output_norm.weight", (self.c.n_embd,))

    def n_ff_shexp(self, il: int) -> int:
        return (self.c.n_ff_shexp or self.n_ff_exp(il)) * self.c.n_expert_shared
