"""DeciLM and Llama-Nemotron, whose layers were thinned out one by one."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import Decoder, Has
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Deci"]


class Deci(Decoder):
    """Llama-Nemotron: layers may have no attention (no heads), a single matrix for it (no kv heads), or no FFN.

    A layer without an FFN does nothing at all, as in llama.cpp.
    """

    name = "deci"
    headless = True
    rope_factors = "scaling"
    output_bias = None
    ffn_bias = None
    tiny_variants = {
        "thinned": {
            "n_layer": 5,
            "n_head": [4, 0, 4, 4, 2],
            "n_head_kv": [2, 0, 0, 4, 1],
            "n_ff": [192, 96, 64, 0, 192],
        },
        "thinned-end": {"n_head": [4, 4, 0], "n_head_kv": [2, 2, 0]},
        "linear-end": {"n_head": [4, 4, 4], "n_head_kv": [2, 2, 0], "bias": True},
    }

    def check(self) -> Iterator[str]:
        yield from super().check()
        if not self.c.n_ff[-1]:
            yield "feed_forward_length: the last layer must have an FFN"

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        attends, single = c.n_head[il] and c.n_head_kv[il], ("attn_norm.weight", "attn_output.weight")
        for spec in super().layer_tensors(il, has):
            part = spec.name[:4]
            if (part == "ffn_" and c.n_ff[il]) or (part == "attn" and attends):
                yield spec
            elif c.n_head[il] and spec.name in single:
                yield TensorSpec(spec.name, spec.shape[:1] if spec.name == single[0] else (c.n_embd, c.n_embd))

    def layer(self, x: Tensor, il: int) -> Tensor:
        if self.c.n_head[il] and self.c.n_ff[il]:
            return super().layer(x, il)
        (x,) = self.wanted(il, x)
        if not self.c.n_ff[il]:
            return x
        return self.named(self.add_residual(self.feed_forward(self.ffn_input(x, x, il), il), x, 1, il), "l_out", il)

    def attention(self, x: Tensor, il: int) -> Tensor:
        if self.c.n_head_kv[il]:
            return super().attention(x, il)
        return self.g.mul_mat(self.w[f"blk.{il}.attn_output.weight"], x)

    def store_only(self, x: Tensor, il: int) -> None:
        if self.c.n_head_kv[il]:
            super().store_only(x, il)
