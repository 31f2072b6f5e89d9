"""SmallThinker."""

from __future__ import annotations

from dataclasses import replace

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.decoder import NEOX, Decoder, Moe
from ggufpy.graph import Tensor

__all__ = ["SmallThinker"]

WINDOW = 4096
STEP = 4


class SmallThinker(Decoder):
    """SmallThinker: a layer's router looks at what goes into the layer, and its experts use ReLU.

    With windows, every fourth layer sees everything and knows no positions.
    """

    name = "smallthinker"
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
        logits = self.router_logits(x, il)
        cur = self.attention(self.attention_input(x, il), il)
        cur, x, logits = self.wanted(il, cur, x, logits)
        h = self.add_residual(cur, x, 0, il)
        cur = self.experts(self.normalize(h, f"blk.{il}.ffn_norm", "ffn_norm", il), il, logits)
        return self.named(self.add_residual(cur, h, 1, il), "l_out", il)
