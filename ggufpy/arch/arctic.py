"""Snowflake's Arctic."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import Decoder, Has, Moe
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Arctic"]


class Arctic(Decoder):
    """Arctic: experts beside the whole of a dense layer, made of what goes into that layer."""

    name = "arctic"
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
