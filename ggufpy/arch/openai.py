"""OpenAI's open models."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Moe
from ggufpy.graph import Tensor

__all__ = ["GptOss"]

ALPHA, LIMIT = 1.702, 7.0


class GptOss(Decoder):
    """gpt-oss: biases everywhere, attention sinks, a window in every other layer, experts with a clamped SwiGLU."""

    name = "gpt-oss"
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
