"""DeepSeek and what is built like it: dense layers first, then experts, some of which all tokens share."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import NEOX, REQUIRED, Decoder, Moe, TensorSpec

__all__ = ["BailingMoe", "BailingMoe2", "DeepSeek", "Dots1", "Ernie45Moe"]


class DeepSeek(Decoder, name="deepseek"):
    """DeepSeek MoE (the first one): Llama with experts after some dense layers."""

    keys = {"n_layer_dense_lead": 0, "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "expert_weights_scale": 0.0}
    moe = Moe(normalize=False, shared="many")


class Dots1(DeepSeek, name="dots1"):
    """dots.llm1: normalized queries and keys, a router that the file describes, and a bias for its choice."""

    keys = {**DeepSeek.keys, "expert_weights_norm": False, "expert_gating_func": 0}
    tie = False
    rope = NEOX
    qk_norm = "head"
    moe = Moe(gating=None, normalize=None, bias=None, shared="many")
    tiny = {"n_head_kv": 4, "expert_gating_func": 2}
    tiny_variants = {"one-kv-head": None}


class BailingMoe(Decoder, name="bailingmoe"):
    """Ling 1: Llama with routed and shared experts in every layer, whatever `leading_dense_block_count` says."""

    keys = {
        "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "expert_weights_scale": 0.0, "expert_weights_norm": False,
    }  # fmt: skip
    tie = False
    moe = Moe(normalize=None, shared="many")
    tiny_variants = {"ignored-keys": {"n_layer_dense_lead": 1}}


class BailingMoe2(Decoder, name="bailingmoe2"):
    """Ling 2: normalized queries and keys, leading dense layers, and a router that the file describes."""

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


class Ernie45Moe(Decoder, name="ernie4_5-moe"):
    """ERNIE 4.5 with experts after some dense layers; a bias for the choice and shared ones where files have them."""

    keys = {
        "n_ff_exp": REQUIRED, "n_ff_shexp": 0, "interleave_moe_layer_step": REQUIRED, "n_layer_dense_lead": 0,
    }  # fmt: skip
    moe = Moe(gate=None, bias=None, shared="many")
    tiny = {"interleave_moe_layer_step": 1}

    def check(self) -> Iterator[str]:
        if self.c.interleave_moe_layer_step != 1:
            yield f"interleave_moe_layer_step: expected 1, found {self.c.interleave_moe_layer_step}"
