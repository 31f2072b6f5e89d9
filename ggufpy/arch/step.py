"""StepFun's Step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.decoder import CLAMP_MIN, NEOX, Decoder, Moe, f32
from ggufpy.graph import Tensor

__all__ = ["Step35"]


class Step35(Decoder):
    """Step 3.5: full layers rotate half as much of a head as windowed ones; heads have gates; SwiGLU may be clamped."""

    name = "step35"
    keys = {
        "n_ff_exp": REQUIRED, "n_ff_shexp": REQUIRED, "expert_gating_func": 0, "expert_weights_scale": 0.0,
        "expert_weights_norm": False, "n_swa": REQUIRED, "rope_freq_base_swa": 10000.0, "n_rot_swa": 0,
        "swiglu_clamp_exp": (), "swiglu_clamp_shexp": (),
    }  # fmt: skip
    swa_period = None
    partial_rope = True
    split_heads = True
    nextn = True
    tie = False
    rope = NEOX
    rope_factors = "scaling"
    qk_norm = "head"
    qk_norm_weight = None
    lacking = ("attn_gate.weight",)
    attn_gate = "sigmoid"
    gate_per = "head"
    moe = Moe(by_tensors=True, gating="sigmoid", normalize=None, bias=None, shared="many")
    crop = "late"
    tiny_variants = {"heads-per-layer": {"n_head": [4, 8, 4], "n_head_kv": [2, 4, 1], "n_embd_head_k": 32}}

    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.c.n_rot % 4:
            yield f"rope.dimension_count: expected a multiple of 4, found {self.c.n_rot}"

    def adjust(self) -> Config:
        c = self.c
        return replace(c, n_rot=c.n_rot // 2, n_rot_swa=c.n_rot_swa or c.n_rot)

    def factors(self, il: int) -> Tensor | None:
        return None if self.c.is_swa[il] else super().factors(il)

    def activate(self, gate: Tensor, up: Tensor | None, il: int) -> Tensor:
        return self.swiglu(gate, up, self.c.swiglu_clamp_shexp, il)

    def activate_experts(self, gate: Tensor | None, up: Tensor, il: int) -> Tensor:
        return self.swiglu(gate, up, self.c.swiglu_clamp_exp, il)

    def swiglu(self, gate: Tensor | None, up: Tensor | None, limits: tuple[float, ...], il: int) -> Tensor:
        """Multiply silu(gate) by up, both clamped where the layer has a limit."""
        assert gate is not None
        assert up is not None
        g, limit = self.g, f32(limits[il]) if limits else 0.0
        if limit <= CLAMP_MIN:
            return g.swiglu_split(gate, up)
        up = g.clamp(up, -limit, limit)
        return g.mul(g.clamp(g.silu(gate), -math.inf, limit), up)
