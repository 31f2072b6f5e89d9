"""Windows in most layers, and mostly a gate on attention: Trinity, Laguna, MiMo, Step, Spark, Muse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ggufpy.arch.decoder import CLAMP_MIN, NEOX, REQUIRED, ROUTER, Config, Decoder, Moe, Tensor, f32

__all__ = ["AfMoe", "Laguna", "MiMo2", "MuseGlimmer", "Spark25", "Step35"]


class AfMoe(Decoder, name="afmoe"):
    """Trinity (AFMoE): scaled embeddings, norms around both sublayers, no positions in every fourth layer."""

    keys = {
        **ROUTER, "n_layer_dense_lead": 0, "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "n_swa": REQUIRED,
        "rope_freq_base_swa": 0.0,
    }  # fmt: skip
    swa_period = 4
    swa_rope = "scaled"
    no_rope_step = 4
    partial_rope = True
    post_norms = ("post_attention_norm", "post_ffw_norm")
    rope = NEOX
    qk_norm = "head"
    attn_gate = "sigmoid"
    moe = Moe(gating="sigmoid", normalize=None, bias=True, shared="many")
    root_scale = True
    tiny = {"n_layer": 4}


class Laguna(Decoder, name="laguna"):
    """Laguna: windowed layers rotate in their own way; layers may differ in the number of heads."""

    keys = {
        **ROUTER, "n_layer_dense_lead": REQUIRED, "n_ff_exp": REQUIRED, "n_ff_shexp": 0, "n_expert_shared": 1,
        "n_swa": 0, "rope_freq_base_swa": 0.0, "n_rot_swa": 0,
    }  # fmt: skip
    swa_period = 4
    swa_dense_first = True
    swa_rope = "plain"
    partial_rope = True
    rope = NEOX
    qk_norm = "head"
    attn_gate = "softplus"
    gate_per = "either"
    moe = Moe(gating="sigmoid", normalize=None, bias=True, shared="many")
    tiny_variants = {
        "gate-per-head": {"or_shape": True},
        "heads-per-layer": {"n_head": [4, 2, 8], "n_embd_head_k": 32, "n_embd_head_v": 32, "n_swa": 16},
        "n-rot-swa": {"n_swa": 16, "n_rot": 16, "n_rot_swa": 32},
    }


class MiMo2(Decoder, name="mimo2"):
    """MiMo 2: values narrower than keys, sinks, windowed layers with heads of their own, scaled attention."""

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


class Step35(Decoder, name="step35"):
    """Step 3.5: full layers rotate half as much of a head as windowed ones; heads have gates; SwiGLU may be clamped."""

    keys = {
        **ROUTER, "n_ff_exp": REQUIRED, "n_ff_shexp": REQUIRED, "n_swa": REQUIRED, "rope_freq_base_swa": 10000.0,
        "n_rot_swa": 0, "swiglu_clamp_exp": (), "swiglu_clamp_shexp": (),
    }  # fmt: skip
    swa_period = None
    partial_rope = True
    split_heads = True
    nextn = True
    tie = False
    rope = NEOX
    rope_factors = "scaling"
    swa_factors = False
    qk_norm = "head"
    qk_norm_weight = None
    lacking = ("attn_gate.weight",)
    attn_gate = "sigmoid"
    gate_per = "head"
    moe = Moe(by_tensors=True, gating="sigmoid", normalize=None, bias=None, shared="many")
    crop = "late"
    tiny_variants = {"heads-per-layer": {"n_head": [4, 8, 4], "n_head_kv": [2, 4, 1], "n_embd_head_k": 32}}

    def check(self) -> Iterator[str]:
        if self.c.n_rot % 4:
            yield f"rope.dimension_count: expected a multiple of 4, found {self.c.n_rot}"

    def adjust(self) -> Config:
        c = self.c
        return replace(c, n_rot=c.n_rot // 2, n_rot_swa=c.n_rot_swa or c.n_rot)

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


class Spark25(Decoder, name="spark2_5"):
    """Spark 2.5: each head of attention has a gate; the file says which layers have windows, and each layer's heads."""

    keys = {"n_swa": REQUIRED, "rope_freq_base_swa": 0.0, "n_rot_swa": 0}
    swa_period = None
    swa_rope = "scaled"
    partial_rope = True
    rope = NEOX
    attn_gate = "sigmoid"
    gate_per = "head"
    activation = "gelu"
    tiny_variants = {"heads": {"n_head": [4, 2, 8], "n_head_kv": [2, 1, 2], "n_embd_head_k": 32, "n_embd_head_v": 32}}


class MuseGlimmer(Decoder, name="muse-glimmer"):
    """Muse Glimmer: normalized embeddings, gated attention, norms around sublayers; only windowed layers rotate."""

    keys = {"n_swa": REQUIRED, "rope_freq_base_swa": 0.0, "logit_scale": REQUIRED, "final_logit_softcapping": 30.0}
    swa_period = 4
    full_rope = False
    partial_rope = True
    post_norms = ("post_attention_norm", "post_ffw_norm")
    post_norm_eps = 1e-8
    tie = False
    qk_norm = "head"
    attn_gate = "sigmoid"

    def embed(self) -> Tensor:
        return self.normalize(super().embed(), "", "inp_norm")
