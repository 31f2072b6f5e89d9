"""Decoders whose layers are thinned out, run through again, doubled for images, or put together in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ggufpy.arch.config import MAX_LAYERS, REQUIRED, Config
from ggufpy.arch.decoder import NEOX, Decoder, GraphInputs, Has, Rope, Tensor, TensorSpec

__all__ = ["Chameleon", "CogVLM", "Deci", "Nanbeige", "Talkie"]

FIRST_IMAGE_TOKEN, END_OF_IMAGE_TOKENS = 4, 8196
LOWEST = -3.4028234663852886e38
EPS = 1e-5


class Deci(Decoder, name="deci"):
    """Llama-Nemotron: layers may have no attention (no heads), a single matrix for it (no kv heads), or no FFN.

    A layer without an FFN does nothing at all, as in llama.cpp.
    """

    headless = True
    rope_factors = "scaling"
    output_bias = None
    ffn_bias = None
    tiny_variants = {
        "thinned": {
            "n_layer": 5, "n_head": [4, 0, 4, 4, 2], "n_head_kv": [2, 0, 0, 4, 1], "n_ff": [192, 96, 64, 0, 192],
        },
        "thinned-end": {"n_head": [4, 4, 0], "n_head_kv": [2, 2, 0]},
        "linear-end": {"n_head": [4, 4, 4], "n_head_kv": [2, 2, 0], "bias": True},
    }  # fmt: skip

    def check(self) -> Iterator[str]:
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


class Nanbeige(Decoder, name="nanbeige"):
    """Nanbeige: Llama whose layers are run through several times, with keys and values of their own each time."""

    keys = {"n_loops": 1, "skip_loop_final_norm": False}
    partial_rope = True
    rope_factors = "freqs"
    ffn_scale = True
    tiny_variants = {
        "loops": {"n_layer": 2, "n_loops": 3},
        "loops-without-norm": {"n_layer": 2, "n_loops": 2, "skip_loop_final_norm": True},
    }

    def check(self) -> Iterator[str]:
        c = self.c
        if c.n_layer * c.n_loops > MAX_LAYERS:
            yield f"block_count times num_loops: expected at most {MAX_LAYERS}, found {c.n_layer * c.n_loops}"

    def adjust(self) -> Config:
        """Count each run through a layer as a layer."""
        names = ("n_head", "n_head_kv", "n_ff", "is_swa")
        runs: dict[str, Any] = {name: getattr(self.c, name) * self.c.n_loops for name in names}
        return replace(self.c, n_layer=self.c.n_layer * self.c.n_loops, **runs)

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        if il < self.n_block:
            yield from super().layer_tensors(il, has)

    def __init__(self, c: Config, inputs: GraphInputs | None = None) -> None:
        super().__init__(c, inputs)
        self.n_block = c.n_layer // c.n_loops
        if inputs:
            self.w = dict(inputs.weights)
            for name in [name for name in self.w if name.startswith("blk.")]:
                _, il, role = name.split(".", 2)
                self.w |= {f"blk.{again}.{role}": self.w[name] for again in range(int(il), c.n_layer, self.n_block)}

    def layer(self, x: Tensor, il: int) -> Tensor:
        x = super().layer(x, il)
        ends_loop = (il + 1) % self.n_block == 0 and il + 1 < self.c.n_layer
        if ends_loop and not self.c.skip_loop_final_norm:
            x = self.normalize(x, "output_norm", "loop_norm", il)
        return x


class Talkie(Decoder, name="talkie"):
    """Talkie: norms without weights, gains of the queries' heads, and the embeddings added again in each layer."""

    keys = {"logit_scale": REQUIRED}
    norm_weight = False
    embedding_norm = True
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
        self.embeddings = super().embed()
        return self.embeddings

    def normalize_qk(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        q = self.normalize(q, f"blk.{il}.attn_q_norm", "Qcur_normed", il)
        return q, self.normalize(k, "", "Kcur_normed", il)

    def layer(self, x: Tensor, il: int) -> Tensor:
        cur = super().layer(x, il)
        (embeddings,) = self.wanted(il, self.embeddings)
        skip = self.g.mul(embeddings, self.w[f"blk.{il}.layer_output_scale.weight"])
        return self.named(self.g.add(cur, skip), "l_out", il)


class Chameleon(Decoder, name="chameleon"):
    """Chameleon, text alone: LayerNorm of each head of queries and keys.

    With `swin_norm`, norms stand behind the sublayers, and the FFN takes what attention gave, as in llama.cpp.
    """

    keys = {"swin_norm": False}
    qk_norm = "heads"
    tiny = {"n_vocab": END_OF_IMAGE_TOKENS + 64}

    def check(self) -> Iterator[str]:
        if self.c.n_vocab < END_OF_IMAGE_TOKENS:
            yield f"tokenizer.ggml.tokens: expected {END_OF_IMAGE_TOKENS} or more, found {self.c.n_vocab}"

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        yield from super().attention_tensors(il, has)
        for role, n in (("q", c.n_head[il]), ("k", c.n_head_kv[il])):
            yield TensorSpec(f"attn_{role}_norm.bias", (c.n_embd_head_k, n), optional=True, f32=True)

    def normalize_qk(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        q = self.normalize(q, f"blk.{il}.attn_q_norm", "Qcur_normed", il, kind="layer", eps=EPS)
        return q, self.normalize(k, f"blk.{il}.attn_k_norm", "Kcur_normed", il, kind="layer", eps=EPS)

    def attention_input(self, x: Tensor, il: int) -> Tensor:
        return x if self.c.swin_norm else super().attention_input(x, il)

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        return self.attended if self.c.swin_norm else super().ffn_input(h, normed, il)

    def add_residual(self, cur: Tensor, x: Tensor, which: int, il: int) -> Tensor:
        if self.c.swin_norm:
            role = ("attn_norm", "ffn_norm")[which]
            cur = self.attended = self.normalize(cur, f"blk.{il}.{role}", role, il)
        return super().add_residual(cur, x, which, il)

    def head(self, x: Tensor) -> Tensor:
        """Rule out the tokens of images; like llama.cpp, in the first row of a micro-batch only."""
        g, y = self.g, super().head(x)
        n_before, n_behind = FIRST_IMAGE_TOKEN, y.n_elements - END_OF_IMAGE_TOKENS
        before = g.view_1d(y, n_before, 0)
        images = g.fill(g.view_1d(y, END_OF_IMAGE_TOKENS - n_before, n_before * 4), LOWEST)
        kept = g.concat(before, images, 0)
        if n_behind:
            kept = g.concat(kept, g.view_1d(y, n_behind, END_OF_IMAGE_TOKENS * 4), 0)
        return g.reshape_2d(kept, *y.ne[:2])


class CogVLM(Decoder, name="cogvlm"):
    """CogVLM, text alone: layers have a second set of matrices, for images. The rotation heeds no keys."""

    grouped = False
    ignored = ("rope_freqs.weight",)
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    qkv_scale = False
    crop = "last"
    tiny = {"n_head_kv": 4}

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        d, n_ff = self.c.n_embd, self.c.n_ff[il]
        shapes = {"attn_qkv": (d, 3 * d), "attn_output": (d, d), "gate": (d, n_ff), "up": (d, n_ff), "down": (n_ff, d)}
        for role, shape in shapes.items():
            yield TensorSpec(f"vis_{role}.weight", shape, unused=True)

    def rope_of(self, il: int) -> Rope:
        return Rope(0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)
