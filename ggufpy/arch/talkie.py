"""Talkie."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, Decoder, Has
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Talkie"]


class Talkie(Decoder):
    """Talkie: norms without weights, gains of the queries' heads, and the embeddings added again in each layer."""

    name = "talkie"
    keys = {"logit_scale": REQUIRED}
    norm_weight = False
    tie = False
    rope = NEOX
    qk_norm = "rotated"
    ffn_scale = True

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        left_out = ("attn_q_norm.weight", "attn_k_norm.weight", "ffn_gate.scale", "ffn_up.scale")
        yield from (spec for spec in super().layer_tensors(il, has) if spec.name not in left_out)
        yield TensorSpec("attn_q_norm.weight", (1, self.c.n_head[il]), f32=True)
        yield TensorSpec("layer_output_scale.weight", (1,))

    def embed(self) -> Tensor:
        self.embeddings = self.normalize(super().embed(), "", "inp_norm")
        return self.embeddings

    def normalize_qk(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        q = self.normalize(q, f"blk.{il}.attn_q_norm", "Qcur_normed", il)
        return q, self.normalize(k, "", "Kcur_normed", il)

    def layer(self, x: Tensor, il: int) -> Tensor:
        cur = super().layer(x, il)
        (embeddings,) = self.wanted(il, self.embeddings)
        skip = self.g.mul(embeddings, self.w[f"blk.{il}.layer_output_scale.weight"])
        return self.named(self.g.add(cur, skip), "l_out", il)
