"""xAI's Grok."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ggufpy.arch.decoder import NEOX, Decoder, Has, Moe, f32
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Grok"]


class Grok(Decoder):
    """Grok: bounded scores, norms of the sublayers' outputs too, GELU experts, in Grok 2 beside a dense FFN."""

    name = "grok"
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
        yield from super().check()
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

    def post_norm(self, which: int, il: int) -> str:
        role = super().post_norm(which, il)
        return role if f"blk.{il}.{role}.weight" in self.w else "post_ffw_norm"

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        moe = self.experts(x, il)
        if f"blk.{il}.ffn_up.weight" not in self.w:
            return moe
        dense = self.named(self.ffn(x, f"blk.{il}", il), "ffn_out", il)
        return self.g.scale(self.g.add(dense, moe), f32(math.sqrt(2) / 2))
