"""Gemma 3n, and what Gemma 4 has of it too: layers that look into others' caches, embeddings for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ggufpy.arch.decoder import REQUIRED, Config, Has, Tensor, TensorSpec, f32, inv_sqrt
from ggufpy.arch.gemma import Gemma

__all__ = ["Gemma3n", "LayerEmbeddings"]

N_STREAMS = 4
LAUREL_RANK = 64
N_SPARSE_LAYERS = 10
SPARSITY = f32(1.6448533535003662)  # standard deviations, behind which lie 5 % of a normal distribution


class SharedCache(Gemma):
    """Gemma 3 with unscaled scores and normalized values, whose last layers look into the caches of earlier ones."""

    keys = {"n_swa": REQUIRED, "rope_freq_base_swa": 10000.0}
    tie = None
    post_norms = ("post_attention_norm", "post_ffw_norm")
    qk_norm = "head"
    scale_query = False
    query_tensors: ClassVar[tuple[str, ...]] = ("attn_q.weight", "attn_qkv.weight", "attn_q_norm.weight")
    """What queries are made of in layers without keys and values; files may have more."""

    def check(self) -> Iterator[str]:
        if not any(self.c.is_swa):
            yield "attention.sliding_window: expected a window, and layers with it"
        c = self.adjust()
        if c.n_layer_kv < min(2, c.n_layer):
            yield f"attention.shared_kv_layers: expected at most {max(0, c.n_layer - 2)}, found {c.n_layer_kv_shared}"
            return
        for il, other in ((il, c.kv_layer(il)) for il in range(c.n_layer)):
            if (c.is_swa[il], c.n_head_kv[il]) != (c.is_swa[other], c.n_head_kv[other]):
                yield f"layers {il} and {other} share a cache: expected the same window and head_count_kv"

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        own = self.c.kv_layer(il) == il
        for spec in super().attention_tensors(il, has):
            needed = own or spec.name.startswith("attn_output") or spec.name in self.query_tensors
            yield spec if needed else replace(spec, unused=True)

    def attention_scale(self) -> float:
        return 1.0

    def qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x, il)
        return q, k, self.named(self.g.rms_norm(v, f32(self.c.norm_rms_eps)), "Vcur_normed", il)

    def attention(self, x: Tensor, il: int) -> Tensor:
        """Attend as all do, or with queries alone."""
        if self.c.kv_layer(il) == il:
            return super().attention(x, il)
        d, blk = self.c.head_widths(il)[0], f"blk.{il}"
        q = self.linear(x, f"{blk}.attn_qkv" if f"{blk}.attn_qkv.weight" in self.w else f"{blk}.attn_q")
        q = self.g.view_3d(q, d, self.c.n_head[il], q.ne[1], d * 4, q.nb[1], 0)
        q = self.rotate(self.normalize(q, f"{blk}.attn_q_norm", "Qcur_normed", il), il)
        return self.linear(self.attend(q, None, None, il), f"{blk}.attn_output")


class LayerEmbeddings(SharedCache):
    """Tokens have an embedding for each layer, which a gate made of the stream lets in."""

    of_layers: Tensor | None = None  # [n_embd_per_layer, n_tokens, n_layer]

    def outer_tensors(self) -> Iterator[TensorSpec]:
        yield from super().outer_tensors()
        c = self.c
        if n := c.n_embd_per_layer:
            yield TensorSpec("per_layer_token_embd.weight", (n * c.n_layer, c.n_vocab), indexed=True)
            yield TensorSpec("per_layer_model_proj.weight", (c.n_embd, n * c.n_layer))
            yield TensorSpec("per_layer_proj_norm.weight", (n,))

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        if n := self.c.n_embd_per_layer:
            yield TensorSpec("inp_gate.weight", (self.c.n_embd, n))
            yield TensorSpec("proj.weight", (n, self.c.n_embd))
            yield from self.norm_tensors("post_norm", self.c.n_embd)

    def embed(self) -> Tensor:
        """Look up the tokens' embeddings, and those for each layer, to which projections of the former are added."""
        x, g, n, n_layer = super().embed(), self.g, self.c.n_embd_per_layer, self.c.n_layer
        if n:
            y = g.get_rows(self.w["per_layer_token_embd.weight"], self.inputs.tokens)
            y = g.scale(g.reshape_3d(y, n, n_layer, x.ne[1]), f32(math.sqrt(n)))
            p = g.scale(self.linear(x, "per_layer_model_proj"), inv_sqrt(self.c.n_embd))
            p = self.normalize(g.reshape_3d(p, n, n_layer, x.ne[1]), "per_layer_proj_norm", "per_layer_proj")
            y = self.named(g.scale(g.add(p, y), inv_sqrt(2)), "inp_per_layer")
            self.of_layers = g.cont(g.permute(y, 0, 2, 1, 3))
        return x

    def of_layer(self, x: Tensor, il: int) -> Tensor:
        """Let in the layer's own embeddings, [n_embd, n_tokens]."""
        assert self.of_layers is not None
        gate = self.g.gelu(self.linear(x, f"blk.{il}.inp_gate"))
        y = self.linear(self.g.mul(gate, self.slice(self.of_layers, il)), f"blk.{il}.proj")
        return self.normalize(y, f"blk.{il}.post_norm", "per_layer_embd_out", il)

    def slice(self, x: Tensor, i: int) -> Tensor:
        """View one matrix of several."""
        return self.g.view_2d(x, *x.ne[:2], x.nb[1], i * x.nb[2])


class Streams(LayerEmbeddings):
    """Four residual streams side by side (AltUp, arXiv:2301.13310), [n_embd, n_tokens, 4]; layers see the first."""

    def outer_tensors(self) -> Iterator[TensorSpec]:
        yield from super().outer_tensors()
        for name in ("altup_proj.weight", "altup_unembd_proj.weight"):
            yield TensorSpec(name, (self.c.n_embd, self.c.n_embd, N_STREAMS - 1))

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        d, n = self.c.n_embd, N_STREAMS
        coefs = {"predict_coef": (n, n * n), "correct_coef": (n, n), "correct_scale": (d,)}
        for name, shape in {"router": (d, n), "router_norm": (d,), **coefs}.items():
            yield TensorSpec(f"altup_{name}.weight", shape)

    def embed(self) -> Tensor:
        """Look up the embeddings, and project them to the other streams."""
        x = super().embed()
        others = self.linear(self.g.repeat_4d(x, *x.ne[:2], N_STREAMS - 1, 1), "altup_proj")
        return self.named(self.g.concat(x, self.as_long(others, x), 2), "inp_stacked")

    def merge(self, x: Tensor) -> Tensor:
        """Make one stream of four: their mean."""
        y = first = self.slice(x, 0)
        others = self.as_long(self.linear(self.others(x), "altup_unembd_proj"), first)
        for i in range(N_STREAMS - 1):
            y = self.g.add(y, self.slice(others, i))
        return self.named(self.g.scale(y, 1 / N_STREAMS), "unembd_merged")

    def others(self, x: Tensor) -> Tensor:
        """View all streams but the first."""
        return self.g.view_3d(x, *x.ne[:2], N_STREAMS - 1, x.nb[1], x.nb[2], x.nb[2])

    def as_long(self, x: Tensor, as_: Tensor) -> Tensor:
        """Give vectors the length of others."""
        length, own = (self.g.sqrt(self.g.sum_rows(self.g.sqr(t))) for t in (as_, x))
        return self.g.div(self.g.mul(x, length), own)

    def modalities(self, x: Tensor, il: int) -> Tensor:
        """Say how a layer's streams mix, [4, n_tokens]."""
        y = self.normalize(x, f"blk.{il}.altup_router_norm", "router_inputs", il)
        y = self.linear(self.g.scale(y, f32(1 / self.c.n_embd)), f"blk.{il}.altup_router")
        return self.named(self.g.tanh(y), "modalities", il)

    def predict(self, x: Tensor, il: int) -> Tensor:
        """Mix the streams before a layer."""
        g, n = self.g, N_STREAMS
        mix = self.linear(self.modalities(self.slice(x, 0), il), f"blk.{il}.altup_predict_coef")
        y = g.mul_mat(g.cont(g.permute(x, 1, 2, 0, 3)), g.reshape_3d(mix, n, n, x.ne[1]))  # [n_embd, 4, n_tokens]
        return self.named(g.add(g.cont(g.permute(y, 0, 2, 1, 3)), x), "predictions", il)

    def correct(self, predicted: Tensor, first: Tensor, il: int) -> Tensor:
        """Move all streams by what a layer has changed the first one."""
        g = self.g
        change = self.named(g.sub(first, self.slice(predicted, 0)), "innovation", il)
        share = g.scale_bias(self.linear(self.modalities(first, il), f"blk.{il}.altup_correct_coef"), 1.0, 1.0)
        share = g.cont_3d(g.transpose(share), 1, first.ne[1], N_STREAMS)
        return self.named(g.add(g.mul(g.repeat_4d(change, *predicted.ne), share), predicted), "corrected", il)


class Gemma3n(Streams, name="gemma3n"):
    """Gemma 3n: four streams, a low-rank path beside attention, and a sparse FFN in the first ten layers.

    What is fixed here, llama.cpp takes from no file either.
    """

    swa_period = 5
    crop = "late"
    tiny = {"n_embd": 64, "n_ff": 256, "n_layer": 25}
    tiny_variants = {"partial-rope": {"n_rot": 8}}

    def adjust(self) -> Config:
        n_layer_kv = min(20, self.c.n_layer)
        return replace(self.c, n_layer_kv=n_layer_kv, n_embd_per_layer=256, final_logit_softcapping=30.0)

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        yield TensorSpec("laurel_l.weight", (self.c.n_embd, LAUREL_RANK))
        yield TensorSpec("laurel_r.weight", (LAUREL_RANK, self.c.n_embd))
        yield from self.norm_tensors("laurel_post_norm", self.c.n_embd)

    def store_only(self, x: Tensor, il: int) -> None:
        super().store_only(self.slice(self.predict(x, il), 0), il)

    def layer(self, x: Tensor, il: int) -> Tensor:
        """Compute the first stream's layer, correct the others by it; after the last layer merge them."""
        g, predicted = self.g, self.predict(x, il)
        first = self.slice(predicted, 0)
        normed = self.attention_input(first, il)
        h = self.add_residual(self.attention(normed, il), first, 0, il)
        h = self.named(g.scale(g.add(h, self.laurel(normed, il)), inv_sqrt(2)), "attn_laurel", il)
        cur = self.feed_forward(self.ffn_input(h, normed, il), il)
        x = self.correct(predicted, self.add_residual(cur, h, 1, il), il)
        own = self.of_layer(g.mul(self.slice(x, 0), self.w[f"blk.{il}.altup_correct_scale.weight"]), il)
        x = self.named(g.concat(self.slice(x, 0), g.add(self.others(x), own), 2), "l_out", il)
        return self.merge(x) if il == self.c.n_layer - 1 else x

    def laurel(self, x: Tensor, il: int) -> Tensor:
        """Add a low-rank projection to its input."""
        y = self.linear(self.linear(x, f"blk.{il}.laurel_l"), f"blk.{il}.laurel_r")
        y = self.normalize(y, f"blk.{il}.laurel_post_norm", "laurel_normed", il)
        return self.named(self.g.add(y, x), "laurel_out", il)

    def activate(self, gate: Tensor, up: Tensor | None, il: int) -> Tensor:
        """Apply GELU, in sparse layers to what lies far above the mean."""
        assert up is not None
        g = self.g
        if il < N_SPARSE_LAYERS:
            mean = g.mean(gate)
            squares = g.sum_rows(g.sqr(g.sub(gate, mean)))
            deviation = g.sqrt(g.scale(squares, f32(1 / (gate.ne[0] - 1))))
            gate = g.relu(g.sub(gate, g.add(mean, g.scale(deviation, SPARSITY))))
        return g.mul(up, g.gelu(gate))
