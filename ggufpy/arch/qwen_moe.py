"""Qwen's mixtures of experts, and those built like Qwen 3's: Grove, Mellum, Maple."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import CLAMP_MIN, IMROPE, NEOX, Decoder, Has, Moe, f32
from ggufpy.arch.tensors import TensorSpec
from ggufpy.gguf import GGMLType
from ggufpy.graph import Tensor

__all__ = ["GroveMoe", "Maple", "Mellum", "Qwen2Moe", "Qwen3Moe", "Qwen3VlMoe"]


class Qwen2Moe(Decoder):
    """Qwen 1.5 and 2 MoE: Qwen 2 with experts, and shared ones that a gate of their own weighs for each token."""

    name = "qwen2moe"
    keys = {"n_ff_exp": 0, "n_ff_shexp": 0}
    tie = False
    rope = NEOX
    moe = Moe(normalize=False, split_ff=True, shared="dense")

    def moe_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().moe_tensors(il, has)
        yield TensorSpec("ffn_gate_inp_shexp.weight", (self.c.n_embd,))

    def shared_expert(self, x: Tensor, il: int) -> Tensor:
        """Weigh the shared experts by the sigmoid of a scalar, which llama.cpp computes as silu(x) / x."""
        g = self.g
        score = g.mul_mat(self.w[f"blk.{il}.ffn_gate_inp_shexp.weight"], x)
        gate = self.named(g.div(g.silu(score), score), "ffn_shexp_gate", il)
        return self.named(g.mul(super().shared_expert(x, il), gate), "ffn_shexp_out", il)


class Qwen3Moe(Decoder):
    """Qwen 3 MoE: Qwen 3 with experts in every layer."""

    name = "qwen3moe"
    keys = {"n_ff_exp": 0}
    rope = NEOX
    qk_norm = "head"
    moe = Moe(split_ff=True, scale=True)


class Qwen3VlMoe(Qwen3Moe):
    """Qwen 3 VL MoE: rotation by sections that are interleaved. Only text is supported."""

    name = "qwen3vlmoe"
    keys = {"n_ff_exp": 0, "rope_sections": REQUIRED}
    rope = IMROPE
    moe = Moe(split_ff=True)
    tiny_variants = {"deepstack": {"extra": {"qwen3vlmoe.n_deepstack_layers": 2}}}


class GroveMoe(Qwen3Moe):
    """GroveMoE: groups of experts share a small adjoint expert; experts are chosen by the sigmoid of their scores."""

    name = "grovemoe"
    keys = {"n_ff_exp": REQUIRED, "n_ff_chexp": 0, "expert_group_scale": REQUIRED, "n_group_experts": REQUIRED}
    moe = Moe(split_ff=True)
    tiny_variants = {"expert-groups": None, "ungrouped": {"n_group_experts": 1}}

    def check(self) -> Iterator[str]:
        c = self.c
        yield from super().check()
        if c.n_expert and c.n_expert // c.n_group_experts < c.n_expert_used:
            yield f"experts_per_group {c.n_group_experts}: there are fewer groups than expert_used_count"
        if c.n_expert_groups > 1:
            yield f"expert_group_count {c.n_expert_groups}: the adjoint experts do not allow a choice by groups"

    def moe_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        yield from super().moe_tensors(il, has)
        n_ff, n_chunk = c.n_ff_chexp or c.n_embd_head_k, c.n_expert // c.n_group_experts
        for role, n_in, n_out in (("gate", c.n_embd, n_ff), ("up", c.n_embd, n_ff), ("down", n_ff, c.n_embd)):
            yield TensorSpec(f"ffn_{role}_chexps.weight", (n_in, n_out, n_chunk))

    def experts(self, x: Tensor, il: int, logits: Tensor | None = None) -> Tensor:
        """Send the experts' output through the adjoint experts of their groups and add what these make of it."""
        g, c = self.g, self.c
        logits = self.router_logits(x, il)
        probs, ids = g.soft_max(logits), self.choose(g.sigmoid(logits), il)
        out = self.mix(x, ids, self.weigh(probs, ids), il)
        if c.n_group_experts > 1:
            number = g.scale(g.cast(ids, GGMLType.F32), float(np.float32(1.0) / np.float32(c.n_group_experts)))
            ids = g.cast(number, GGMLType.I32)
        adjoint = self.mix(out, ids, self.weigh(probs, ids), il, "_chexps")
        return g.add(out, g.scale(adjoint, f32(c.expert_group_scale)))


class Mellum(Qwen3Moe):
    """Mellum 2: Qwen 3 MoE with windows in three layers of four, where rotation is not scaled."""

    name = "mellum"
    keys = {"n_ff_exp": REQUIRED, "n_swa": 0}
    swa_period = 4
    swa_rope = "plain"
    tie = False


class Maple(Qwen3Moe):
    """Maple: windows where the file says, rotation in those layers only, and gates and values that are clamped."""

    name = "maple"
    keys = {
        "n_ff_exp": REQUIRED, "n_swa": REQUIRED, "rope_freq_base_swa": 0.0, "n_rot_swa": 0,
        "swiglu_clamp_exp": REQUIRED,
    }  # fmt: skip
    swa_period = None
    full_rope = False
    swa_rope = "scaled"
    tie = False
    moe = Moe()

    def activate_experts(self, gate: Tensor | None, up: Tensor, il: int) -> Tensor:
        limit = f32(self.c.swiglu_clamp_exp[il])
        if gate is None or limit <= CLAMP_MIN:
            return super().activate_experts(gate, up, il)
        return self.g.swiglu_clamp(gate, up, limit)
