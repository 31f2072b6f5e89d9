"""Apertus."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, f32
from ggufpy.graph import Tensor

__all__ = ["Apertus"]


class Apertus(Decoder):
    """Apertus: norms of queries and keys; no gate, and xIELU with four numbers for each layer."""

    name = "apertus"
    keys = dict.fromkeys(("xielu_alpha_n", "xielu_alpha_p", "xielu_beta", "xielu_eps"), REQUIRED)
    ignored = ("attn_q_norm.bias", "attn_k_norm.bias")
    tie = False
    rope = NEOX
    rope_factors = "scaling"
    output_bias = None
    qk_norm = "head"
    ffn_gate = False

    def activate(self, gate: Tensor, up: Tensor | None, il: int) -> Tensor:
        c = self.c
        numbers = c.xielu_alpha_n[il], c.xielu_alpha_p[il], c.xielu_beta[il], c.xielu_eps[il]
        return self.g.xielu(gate, *(f32(x) for x in numbers))
