"""Granite and MiniCPM: Llama with scales on the embeddings, the sublayers' outputs, the scores and the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ggufpy.arch.decoder import REQUIRED, Config, Decoder, Moe, Tensor, TensorSpec, linear

__all__ = ["Granite", "GraniteMoe", "GraniteSwa", "MiniCPM"]


class Granite(Decoder, name="granite"):
    """Granite: logits are divided by a scale; `rope.scaling.finetuned = false` means no rotation at all."""

    keys = {
        "logit_scale": REQUIRED, "residual_scale": 0.0, "embedding_scale": 0.0, "attention_scale": 0.0,
        "rope_finetuned": True, "n_ff_shexp": 0,
    }  # fmt: skip
    rope_factors = "scaling"
    output_bias = None
    ffn_bias = None
    moe = Moe(required=False, gate=None, shared="many")

    def adjust(self) -> Config:
        return replace(self.c, logit_scale=float(np.float32(1.0) / np.float32(self.c.logit_scale)))


class GraniteMoe(Granite, name="granitemoe"):
    """Granite MoE: the same model by another name, always rotated."""

    keys = {key: default for key, default in Granite.keys.items() if key != "rope_finetuned"}


class GraniteSwa(GraniteMoe, name="granite_swa"):
    """Granite with windows: attention sinks, layers with and without rotation, gate and up as one matrix."""

    keys = {**GraniteMoe.keys, "n_swa": REQUIRED, "rope_pattern": ()}
    swa_period = None
    swa_rope = "same"
    sinks = True
    moe = Moe(required=False, shared="many", fused=True)
    tiny_variants = {
        "rope-pattern": {"rope_pattern": [False, True, False]},
        "deepstack": {"extra": {"granite_swa.deepstack_mapping": [0, 1, 2]}},
    }

    def dense_tensors(self, n_ff: int, suffix: str = "") -> Iterator[TensorSpec]:
        if not suffix:
            yield from super().dense_tensors(n_ff)
            return
        yield from linear(f"ffn_up{suffix}", self.c.n_embd, n_ff * 2, False, scale=False)
        yield from linear(f"ffn_down{suffix}", n_ff, self.c.n_embd, False, scale=False)

    def shared_expert(self, x: Tensor, il: int) -> Tensor:
        cur = self.activate_fused(self.linear(x, f"blk.{il}.ffn_up_shexp"))
        return self.named(self.linear(cur, f"blk.{il}.ffn_down_shexp"), "ffn_shexp", il)


def _residual_scale(fields: dict[str, Any]) -> float:
    return float(np.float32(1.4) / np.sqrt(np.float32(fields["n_layer"])))


class MiniCPM(Granite, name="minicpm"):
    """MiniCPM: older files lack the scales, which are then what the first models were trained with."""

    keys = {
        "logit_scale": lambda fields: 256.0 / fields["n_embd"],
        "residual_scale": _residual_scale,
        "embedding_scale": 12.0,
    }
