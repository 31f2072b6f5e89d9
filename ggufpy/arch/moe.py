"""Mixtures of experts in every layer: Arctic, DBRX, Grok, gpt-oss, MiniMax, SmallThinker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ggufpy.arch.decoder import NEOX, REQUIRED, Config, Decoder, Has, Moe, Tensor, TensorSpec, f32

__all__ = ["Arctic", "Dbrx", "GptOss", "Grok", "MiniMaxM2", "SmallThinker"]

ALPHA, LIMIT = 1.702, 7.0
WINDOW = 4096
STEP = 4


class Arctic(Decoder, name="arctic"):
    """Arctic: experts beside the whole of a dense layer, made of what goes into that layer."""

    moe = Moe()

    def ffn_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from self.dense_tensors(self.c.n_embd)
        yield from self.norm_tensors("ffn_norm_exps", self.c.n_embd)
        yield from self.moe_tensors(il, has)

    def layer(self, x: Tensor, il: int) -> Tensor:
        blk = f"blk.{il}"
        cur = self.attention(self.attention_input(x, il), il)
        cur, x = self.wanted(il, cur, x)
        h = self.add_residual(cur, x, 0, il)
        dense = self.ffn(self.normalize(h, f"{blk}.ffn_norm", "ffn_norm", il), blk, il)
        dense = self.named(self.g.add(dense, h), "ffn_out", il)
        moe = self.experts(self.normalize(x, f"{blk}.ffn_norm_exps", "ffn_norm_exps", il), il)
        return self.named(self.g.add(moe, dense), "l_out", il)


class Dbrx(Decoder, name="dbrx"):
    """DBRX: LayerNorm without biases, one clamped matrix for queries, keys and values."""

    keys = {"clamp_kqv": REQUIRED}
    norm = "layer"
    ffn_norm = "attn_output_norm"
    tie = False
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    moe = Moe()


class Grok(Decoder, name="grok"):
    """Grok: bounded scores, norms of the sublayers' outputs too, GELU experts, in Grok 2 beside a dense FFN."""

    keys = {
        "n_ff_exp": 0, "logit_scale": 0.5773502691896257, "embedding_scale": 78.38367176906169,
        "attn_output_scale": 0.08838834764831845, "attn_logit_softcapping": 30.0, "final_logit_softcapping": 0.0,
        "yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 8.0, "yarn_beta_slow": 1.0,
    }  # fmt: skip
    post_norms = ("attn_output_norm", "layer_output_norm")
    rope = NEOX
    activation = "gelu"
    moe = Moe(gate=None)
    flash_attn = False
    tiny_variants = {"grok-1": {"without": "ffn_gate ffn_up ffn_down"}, "newer-norm": {"has": "post_ffw_norm.weight"}}

    def check(self) -> Iterator[str]:
        if not self.c.attn_logit_softcapping:
            yield "attn_logit_softcapping: expected more than 0"

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        """Take the last norm's newer name too."""
        for spec in super().layer_tensors(il, has):
            newer = spec.name == "layer_output_norm.weight" and "post_ffw_norm.weight" in has
            yield replace(spec, name="post_ffw_norm.weight") if newer else spec

    def ffn_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        if not has or any(f"ffn_{role}.weight" in has for role in ("gate", "up", "down")):
            yield from self.dense_tensors(self.c.n_ff[il])
        yield from self.moe_tensors(il, has)

    def attention_scale(self) -> float:
        return 1.0

    def bounded(self, kq: Tensor) -> Tensor:
        cap = np.float32(self.c.attn_logit_softcapping)
        scale = np.float32(self.c.attn_output_scale) / cap
        return self.g.scale(self.g.tanh(self.g.scale(kq, float(scale))), float(cap))

    def normalize(self, x: Tensor, role: str, name: str, il: int = -1, **kind: Any) -> Tensor:
        newer = role.replace("layer_output_norm", "post_ffw_norm")
        return super().normalize(x, newer if f"{newer}.weight" in self.w else role, name, il, **kind)

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        moe = self.experts(x, il)
        if f"blk.{il}.ffn_up.weight" not in self.w:
            return moe
        dense = self.named(self.ffn(x, f"blk.{il}", il), "ffn_out", il)
        return self.g.scale(self.g.add(dense, moe), f32(math.sqrt(2) / 2))


class GptOss(Decoder, name="gpt-oss"):
    """gpt-oss: biases everywhere, attention sinks, a window in every other layer, experts with a clamped SwiGLU."""

    keys = {"n_ff_exp": REQUIRED, "n_swa": REQUIRED, "rope_freq_base_swa": 0.0}
    swa_period = 2
    swa_rope = "scaled"
    ffn_norm = "post_attention_norm"
    tie = False
    rope = NEOX
    output_bias = True
    sinks = True
    moe = Moe(gating="softmax_weight", normalize=False, expert_bias=True)
    crop = "late"

    def activate(self, gate: Tensor, up: Tensor | None, il: int) -> Tensor:
        assert up is not None
        return self.g.swiglu_oai(gate, up, ALPHA, LIMIT)


class MiniMaxM2(Decoder, name="minimax-m2"):
    """MiniMax M2: norms of whole rows of queries and keys, partial rotation, a bias for the choice of experts."""

    keys = {"expert_gating_func": 0}
    partial_rope = True
    tie = False
    rope = NEOX
    qk_norm = "full"
    moe = Moe(gating=None, bias=True)
    tiny = {"expert_gating_func": 2, "n_ff_exp": 64}  # llama.cpp wants the width but takes feed_forward_length


class SmallThinker(Decoder, name="smallthinker"):
    """SmallThinker: a layer's router looks at what goes into the layer, and its experts use ReLU.

    With windows, every fourth layer sees everything and knows no positions.
    """

    keys = {"n_swa": 0, "rope_freq_base_swa": 0.0, "n_ff_exp": REQUIRED, "expert_gating_func": 0}
    swa_period = STEP
    swa_dense_first = True
    swa_rope = "scaled"
    rope = NEOX
    activation = "relu"
    moe = Moe(gating=None)
    tiny = {"expert_gating_func": 2}
    tiny_variants = {"four-layers": {"n_layer": STEP, "n_swa": 16}}

    def adjust(self) -> Config:
        c = self.c
        return replace(c, n_swa=WINDOW) if c.n_swa else c  # llama.cpp takes no other size

    def rotates(self, il: int) -> bool:
        return not self.c.n_swa or self.c.n_layer == STEP or il % STEP != 0

    def layer(self, x: Tensor, il: int) -> Tensor:
        (self.scores,) = self.wanted(il, self.router_logits(x, il))
        return super().layer(x, il)

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        return self.experts(x, il, self.scores)
