"""BitNet."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import NEOX, Decoder, Has
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["BitNet"]


class BitNet(Decoder):
    """BitNet b1.58: a norm before the last matrix of attention and of the FFN; matrices with scales."""

    name = "bitnet"
    partial_rope = True
    tie = True
    rope = NEOX
    qkv_fused = False
    qkv_bias = False
    ffn_scale = True

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        yield from self.norm_tensors("attn_sub_norm", self.c.n_embd)
        yield from self.norm_tensors("ffn_sub_norm", self.c.n_ff[il])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, il: int) -> Tensor:
        return self.normalize(super().attend(q, k, v, il), f"blk.{il}.attn_sub_norm", "attn_sub_norm", il)

    def before_down(self, x: Tensor, il: int) -> Tensor:
        return self.normalize(x, f"blk.{il}.ffn_sub_norm", "ffn_sub_norm", il)
