"""Llama, the models converted to its name (Llama 1-3, Mistral, Mixtral, SmolLM, Yi and others), and near relatives.

`llama.attention.scale` and `llama.expert_weights_scale` are not read: llama.cpp ignores them for this architecture.
"""

from __future__ import annotations

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import Decoder, Moe

__all__ = ["Llama", "Mistral3", "SmolLM3"]


class Llama(Decoder):
    """The common decoder with every option it has."""

    name = "llama"
    rope_factors = "scaling"
    output_bias = None
    ffn_bias = None
    moe = Moe(required=False, scale=True)

    @classmethod
    def expert_optional(cls, role: str) -> bool:
        return role == "gate"


class Mistral3(Llama):
    """Ministral 3 and Mistral Small 3: YaRN to the file's measures; queries grow with the logarithm of the position."""

    name = "mistral3"
    keys = {"attn_temperature_scale": 0.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "rope_yarn_log_mul": 0.0}

    @classmethod
    def temperature(cls, c: Config, il: int) -> tuple[float, float, float] | tuple[()]:
        return (c.attn_temperature_scale, c.n_ctx_orig_yarn, 0.0) if c.attn_temperature_scale else ()


class SmolLM3(Decoder):
    """SmolLM 3: every fourth layer knows no positions."""

    name = "smollm3"
    no_rope_step = 4
    ffn_scale = False
