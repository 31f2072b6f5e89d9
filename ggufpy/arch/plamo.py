"""PLaMo, the models without recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ggufpy.arch.decoder import NEOX, Decoder, Tensor, TensorSpec

__all__ = ["Plamo", "Plamo3"]


class Plamo(Decoder, name="plamo", ffn_norm="", parallel="ffn + attn", tie=False, rope=NEOX):
    """PLaMo 1: attention and FFN side by side behind one norm."""


class Plamo3(Decoder, name="plamo3"):
    """PLaMo 3: norms around both sublayers, the later named without `.weight`; windows in seven layers of eight."""

    keys = {"n_swa": 0, "rope_freq_base_swa": 10000.0}
    swa_period = 8
    split_heads = True
    partial_rope = True
    post_norms = ("post_attention_norm", "post_ffw_norm")
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    qkv_scale = False
    qk_norm = "head"
    ffn_fused = True

    def norm_tensors(self, role: str, width: int) -> Iterator[TensorSpec]:
        for spec in super().norm_tensors(role, width):
            yield replace(spec, name=role) if role in self.post_norms else spec

    def normalize(self, x: Tensor, role: str, name: str, il: int = -1, **kind: Any) -> Tensor:
        y = super().normalize(x, role, name, il, **kind)
        return self.named(self.times(y, role), name, il)
