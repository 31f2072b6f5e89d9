"""Falcon and GPT-NeoX: LayerNorm, one fused matrix for q, k and v, attention and FFN side by side."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Has
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Falcon", "GPTNeoX"]


class Falcon(Decoder):
    """Falcon: no biases but in norms; in the larger models attention has a norm of its own."""

    name = "falcon"
    norm = "layer"
    norm_bias = True
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    parallel = "ffn + attn"
    ffn_norm = ""
    ffn_gate = False
    activation = "gelu"

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        yield TensorSpec("attn_norm_2.weight", (self.c.n_embd,), optional=True)
        yield TensorSpec("attn_norm_2.bias", (self.c.n_embd,), optional=True)

    def attention_input(self, x: Tensor, il: int) -> Tensor:
        if f"blk.{il}.attn_norm_2.weight" in self.w:
            return self.normalize(x, f"blk.{il}.attn_norm_2", "attn_norm_2", il)
        return super().attention_input(x, il)

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        if f"blk.{il}.attn_norm_2.weight" in self.w:
            return self.normalize(h, f"blk.{il}.attn_norm", "attn_norm", il)
        return normed


class GPTNeoX(Decoder):
    """GPT-NeoX and Pythia: biases everywhere, part of each head rotates; the FFN may come after attention."""

    name = "gptneox"
    keys = {"use_parallel_residual": REQUIRED}
    norm = "layer"
    norm_bias = True
    tie = False
    rope = NEOX
    partial_rope = True
    qkv_fused = True
    qkv_bias = True
    output_bias = True
    parallel = "ffn + x"
    tiny = {"use_parallel_residual": True}
    tiny_variants = {"serial": {"use_parallel_residual": False}}
    ffn_gate = False
    ffn_bias = True
    activation = "gelu"
