"""Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggufpy.arch.decoder import REQUIRED, Config, Has, Moe, Tensor, TensorSpec, f32, inv_sqrt
from ggufpy.arch.gemma3n import LayerEmbeddings

__all__ = ["Gemma4"]

SHARED = {"n_layer": 7, "n_layer_kv_shared": 3}


class ScaledLayers(LayerEmbeddings):
    """Layers may have experts beside the dense FFN, chosen by the stream as it is, and scale what they give on."""

    moe = Moe(required=False, fused=True, scale=True)

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        yield TensorSpec("layer_output_scale.weight", (1,), optional=True)

    def is_moe(self, il: int, has: Has = ()) -> bool:
        return self.c.n_expert > 0 and (not has or "ffn_gate_inp.weight" in has)

    def ffn_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from self.dense_tensors(self.c.n_ff[il])
        if self.is_moe(il, has):
            yield from self.moe_tensors(il, has)
            names = "pre_ffw_norm_2.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight", "ffn_gate_inp.scale"
            yield from (TensorSpec(name, (self.c.n_embd,)) for name in names)

    def layer(self, x: Tensor, il: int) -> Tensor:
        """Let in the layer's own embeddings after all else, and scale the stream."""
        x = super().layer(x, il)
        if self.of_layers is not None:
            x = self.g.add(x, self.of_layer(x, il))
        return self.named(self.times(x, f"blk.{il}.layer_output_scale.weight"), "l_out", il)

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        return h

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        """Compute the dense FFN, and add the experts' output where there are any."""
        blk = f"blk.{il}"
        dense = self.ffn(self.normalize(x, f"{blk}.ffn_norm", "ffn_norm", il), blk, il)
        if f"{blk}.ffn_gate_inp.weight" not in self.w:
            return self.named(dense, "ffn_out", il)
        dense = self.normalize(dense, f"{blk}.post_ffw_norm_1", "ffn_mlp", il)
        logits = self.router_logits(x, il)
        moe = self.experts(self.normalize(x, f"{blk}.pre_ffw_norm_2", "ffn_norm_2", il), il, logits)
        moe = self.normalize(moe, f"{blk}.post_ffw_norm_2", "ffn_moe", il)
        return self.named(self.g.add(dense, moe), "ffn_moe_combined", il)

    def router_logits(self, x: Tensor, il: int) -> Tensor:
        g, router = self.g, f"blk.{il}.ffn_gate_inp"
        x = g.scale(g.rms_norm(x, f32(self.c.norm_rms_eps)), inv_sqrt(self.c.n_embd))
        logits = g.mul_mat(self.w[f"{router}.weight"], g.mul(x, self.w[f"{router}.scale"]))
        return self.named(logits, "ffn_moe_logits", il)


class Gemma4(ScaledLayers, name="gemma4"):
    """Gemma 4: heads of full layers are wider and rotate by factors; what has no values of its own takes the keys."""

    keys = {
        **LayerEmbeddings.keys, "n_embd_head_k_swa": REQUIRED, "n_embd_head_v_swa": REQUIRED, "n_rot_swa": 0,
        "n_embd_per_layer": REQUIRED, "n_layer_kv_shared": 0, "n_ff_exp": (), "final_logit_softcapping": 30.0,
    }  # fmt: skip
    swa_period = None
    swa_factors = False
    qkv_bias = False
    lacking = ("attn_v.weight",)
    query_tensors = (*LayerEmbeddings.query_tensors, "attn_q.scale", "attn_qkv.scale")
    ffn_scale = True
    crop = "last"
    tiny = {
        "n_layer": 4, "n_embd_head_k": 64, "n_embd_head_v": 64, "n_embd_head_k_swa": 32, "n_embd_head_v_swa": 32,
        "n_rot_swa": 32, "n_embd_per_layer": 48, "n_ff_exp": 64,
    }  # fmt: skip
    tiny_variants = {
        "n-ff-exp": None,
        "no-layer-embeddings": {"n_embd_per_layer": 0},
        "shared-cache": {**SHARED, "n_ff": [192] * 4 + [384] * 3},
        "shared-cache-fused": {**SHARED, "fused_qkv": True},
        "shared-cache-without-attn_v": {**SHARED, "without": "attn_v"},
        "heads-per-layer": {"n_head_kv": [4, 1, 4, 1]},
        "no-softcap": {"final_logit_softcapping": 0.0},
    }

    def check(self) -> Iterator[str]:
        yield from super().check()
        if not self.c.causal_attn:
            yield "attention.causal: expected true"

    def adjust(self) -> Config:
        return replace(self.c, n_layer_kv=self.c.n_layer - self.c.n_layer_kv_shared)

    def factor_tensors(self) -> Iterator[TensorSpec]:
        if not all(self.c.is_swa):
            yield TensorSpec("rope_freqs.weight", (self.c.n_embd_head_k // 2,))

    def separate_qkv(self, x: Tensor, blk: str) -> list[Tensor]:
        """Multiply by the matrices; where there are no values', the keys as projected are the values too."""
        if f"{blk}.attn_v.weight" in self.w:
            return super().separate_qkv(x, blk)
        q, k = (self.linear(x, f"{blk}.attn_{role}") for role in "qk")
        return [q, k, k]
