"""Granite and MiniCPM: Llama with scales on the embeddings, the sublayers' outputs, the scores and the logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.decoder import Decoder, Moe

__all__ = ["Granite", "MiniCPM"]


class Granite(Decoder):
    """Granite: logits are divided by a scale; `rope.scaling.finetuned = false` means no rotation at all."""

    name = "granite"
    keys = {
        "logit_scale": REQUIRED, "residual_scale": 0.0, "embedding_scale": 0.0, "attention_scale": 0.0,
        "rope_finetuned": True, "n_ff_shexp": 0,
    }  # fmt: skip
    rope_factors = "scaling"
    output_bias = None
    ffn_bias = None
    ffn_scale = False
    moe = Moe(required=False, shared=True)

    @classmethod
    def rotates(cls, c: Config, il: int) -> bool:
        return c.rope_finetuned

    @classmethod
    def logit_scale(cls, c: Config) -> float:
        return float(np.float32(1.0) / np.float32(c.logit_scale))

    @classmethod
    def expert_optional(cls, role: str) -> bool:
        return role == "gate"


def _residual_scale(fields: dict[str, Any]) -> float:
    return float(np.float32(1.4) / np.sqrt(np.float32(fields["n_layer"])))


class MiniCPM(Granite):
    """MiniCPM: older files lack the scales, which are then what the first models were trained with."""

    name = "minicpm"
    keys = {
        "logit_scale": lambda fields: 256.0 / fields["n_embd"],
        "residual_scale": _residual_scale,
        "embedding_scale": 12.0,
    }

    @classmethod
    def rotates(cls, c: Config, il: int) -> bool:
        return True
