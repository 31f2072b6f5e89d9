"""MiniMax."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder, Moe

__all__ = ["MiniMaxM2"]


class MiniMaxM2(Decoder):
    """MiniMax M2: norms of whole rows of queries and keys, partial rotation, a bias for the choice of experts."""

    name = "minimax-m2"
    keys = {"expert_gating_func": 0}
    partial_rope = True
    tie = False
    rope = NEOX
    qk_norm = "full"
    moe = Moe(gating=None, bias=True)
    tiny = {"expert_gating_func": 2, "n_ff_exp": 64}  # llama.cpp wants the width but takes feed_forward_length
