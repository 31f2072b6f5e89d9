"""The decoder that the llama family shares, as a declaration (`Decoder`) and the small functions that build its graph.

This file owns the order of operations inside a layer, which is llama.cpp's to the last addition, and the table of
tensors and keys that follows from a declaration. It does not know where weights lie, how the cache keeps its cells or
who runs the graph. Shapes in comments are in ggml order: the first number is the contiguous dimension.
Nodes are named as in llama.cpp (`Qcur-3`, `ffn_out-3`), so that any of them can be found and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Context, Graph, Tensor

__all__ = ["Attention", "Builder", "Decoder", "Moe", "Rope", "RopeType", "f32"]

RopeType = int
ROPE_NORM: RopeType = 0
ROPE_NEOX: RopeType = 2
PREC_F32 = 10
HINT_HADAMARD = 1


def f32(x: float) -> float:
    """Round to single precision, in which llama.cpp computes its constants."""
    return float(np.float32(x))


def inv_sqrt(n: float) -> float:
    """Compute 1/sqrt(n) in single precision."""
    return float(np.float32(1.0) / np.sqrt(np.float32(n)))


# --------------------------------------------------------------------------------------------------- declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Experts: how the router's logits become weights (llama.cpp's build_moe_ffn)."""

    normalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How one architecture differs from the common decoder. A default is what llama does."""

    name: str
    rope: RopeType
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Optional fields of `Config` that this architecture reads, with their defaults."""
    check: Callable[[Config], Iterator[str]] | None = None
    """What else must hold of the hyper-parameters: yields the faults."""
    rope_factors: bool = False
    """The file may bring `rope_freqs` (or long and short factors)."""
    embedding_scale: Callable[[Config], float] | None = None
    attention_scale: Callable[[Config], float] = lambda c: inv_sqrt(c.n_embd_head_v)
    scale_query: bool = False
    """The attention scale multiplies the queries, not the scores."""
    qk_norm: bool = False
    """Queries and keys are RMS-normalized per head before they are rotated."""
    output_bias: bool = False
    """The attention output may have a bias."""
    post_norm: bool = False
    """Attention and FFN outputs are normalized before they are added."""
    activation: str = "swiglu"
    ffn_bias: bool = False
    ffn_scale: bool = True
    """The matrices of the FFN may have scales."""
    moe: Moe | None = None
    swa_period: int = 0
    """With a window: of each run of that many layers the last one sees everything."""

    def config(self, metadata: Mapping[str, Any], *, path: str = "") -> Config:
        """Read and check the hyper-parameters; one GGUFError lists all faults."""
        return Config.from_gguf(
            metadata, {"norm_rms_eps": REQUIRED, **self.keys}, swa_period=self.swa_period, check=self.check, path=path
        )

    def tensors(self, c: Config, present: Container[str] = ()) -> Iterator[TensorSpec]:
        """List every tensor that a file of this architecture has or may have.

        `present` are the names a file has: they decide between a fused and three separate q, k, v matrices.
        """
        yield TensorSpec("token_embd.weight", (c.n_embd, c.n_vocab), indexed=True)
        yield TensorSpec("output_norm.weight", (c.n_embd,))
        yield TensorSpec("output.weight", (c.n_embd, c.n_vocab), optional=True)
        if self.rope_factors:
            names = (
                ("rope_factors_long", "rope_factors_short") if c.rope_scaling_type == "longrope" else ("rope_freqs",)
            )
            for name in names:
                yield TensorSpec(f"{name}.weight", (c.n_rot // 2,), optional=True)
        for il in range(c.n_layer):
            fused = f"blk.{il}.attn_qkv.weight" in present
            for spec in (*self._attention_tensors(c, il, fused), *self._ffn_tensors(c, il)):
                yield TensorSpec(f"blk.{il}.{spec.name}", spec.shape, spec.optional)

    def _attention_tensors(self, c: Config, il: int, fused: bool) -> Iterator[TensorSpec]:
        widths = {
            "q": c.n_embd_head_k * c.n_head[il],
            "k": c.n_embd_head_k * c.n_head_kv[il],
            "v": c.n_embd_head_v * c.n_head_kv[il],
        }
        yield TensorSpec("attn_norm.weight", (c.n_embd,))
        if fused:
            yield from _linear("attn_qkv", c.n_embd, sum(widths.values()), bias=True)
            for role, width in widths.items():  # converters have left separate biases beside a fused matrix
                yield TensorSpec(f"attn_{role}.bias", (width,), optional=True)
        else:
            for role, width in widths.items():
                yield from _linear(f"attn_{role}", c.n_embd, width, bias=True)
        yield from _linear("attn_output", c.n_embd_head_v * c.n_head[il], c.n_embd, bias=self.output_bias)
        if self.qk_norm:
            yield TensorSpec("attn_q_norm.weight", (c.n_embd_head_k,))
            yield TensorSpec("attn_k_norm.weight", (c.n_embd_head_k,))
        if self.post_norm:
            yield TensorSpec("post_attention_norm.weight", (c.n_embd,))

    def _ffn_tensors(self, c: Config, il: int) -> Iterator[TensorSpec]:
        n_ff = c.n_ff[il]
        yield TensorSpec("ffn_norm.weight", (c.n_embd,))
        if c.n_expert and self.moe:
            yield TensorSpec("ffn_gate_inp.weight", (c.n_embd, c.n_expert))
            for role, shape in (("gate", (c.n_embd, n_ff)), ("up", (c.n_embd, n_ff)), ("down", (n_ff, c.n_embd))):
                yield TensorSpec(f"ffn_{role}_exps.weight", (*shape, c.n_expert), optional=role == "gate")
                yield TensorSpec(f"ffn_{role}_exps.scale", (c.n_expert,), optional=True)
        else:
            for role, shape in (("gate", (c.n_embd, n_ff)), ("up", (c.n_embd, n_ff)), ("down", (n_ff, c.n_embd))):
                yield from _linear(f"ffn_{role}", *shape, bias=self.ffn_bias, scale=self.ffn_scale)
        if self.post_norm:
            yield TensorSpec("post_ffw_norm.weight", (c.n_embd,))

    def build(self, b: Builder) -> Tensor | None:
        """Build the graph of one micro-batch; returns its logits, [n_vocab, n_outputs], if any are wanted."""
        return build_decoder(self, b)


def _linear(role: str, n_in: int, n_out: int, *, bias: bool, scale: bool = True) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{role}.weight", (n_in, n_out))
    if scale:
        yield TensorSpec(f"{role}.scale", (1,), optional=True)
    if bias:
        yield TensorSpec(f"{role}.bias", (n_out,), optional=True)


# --------------------------------------------------------------------------------------- what a graph is built from


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation's parameters for a context, the same for all layers (llama.cpp's cparams)."""

    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @classmethod
    def of(cls, c: Config) -> Rope:
        """Derive the parameters as llama_context does, in single precision."""
        factor = np.float32(c.rope_scaling_factor)
        scaled = c.rope_scaling_type != "none" and factor != 0
        freq_scale = np.float32(1.0) / factor if scaled else np.float32(1.0)
        ext_factor, attn_factor = 0.0, np.float32(1.0)
        if c.rope_scaling_type == "yarn":
            ext_factor = 1.0
            tenth, one = np.float32(0.1), np.float32(1.0)
            stretch = one / freq_scale
            log = np.float32(math.log(stretch)) if stretch > 0 else np.float32(0)
            attn_factor = one if stretch <= 1 else tenth * one * log + one
            attn_factor *= one / (one + tenth * log)  # ggml multiplies by this itself
        attn_factor = np.float32(attn_factor) * np.float32(c.rope_attn_factor)
        return cls(c.n_ctx_orig_yarn, f32(c.rope_freq_base), float(freq_scale), ext_factor, float(attn_factor))


class Attention(Protocol):
    """What a layer's attention needs of the memory: inputs of this graph and the cache behind them."""

    mask: Tensor  # [n_kv, n_tokens per stream, 1, n_stream]
    k_rot: Tensor | None  # [n, n], with a quantized K cache
    v_rot: Tensor | None

    def store(self, graph: Graph, k: Tensor, v: Tensor, il: int) -> None: ...
    def keys(self, il: int) -> Tensor: ...  # [n_embd_head_k, n_head_kv, n_kv, n_stream]
    def values(self, il: int) -> Tensor: ...  # the same of V; [n_kv, n_head_kv, n_embd_head_v, n_stream] if transposed


@dataclass(slots=True)
class Builder:
    """One graph in the making: the context of its operations, its inputs, and the model it computes."""

    g: Context
    graph: Graph
    config: Config
    weights: Mapping[str, Tensor]
    rope: Rope
    flash_attn: bool
    use_long_factors: bool
    tokens: Tensor  # i32 [n_tokens]
    positions: Tensor  # i32 [n_tokens]
    out_ids: Tensor | None  # i32 [n_outputs]; None where no logits are wanted
    attention: Callable[[int], Attention]

    def linear(self, x: Tensor, role: str, *, bias_first: bool = False) -> Tensor:
        """Multiply by a weight; apply its scale and bias where the file has them."""
        y = self.g.mul_mat(self.weights[f"{role}.weight"], x)
        scale, bias = self.weights.get(f"{role}.scale"), self.weights.get(f"{role}.bias")
        if scale is not None and not bias_first:
            y = self.g.mul(y, scale)
        if bias is not None:
            y = self.g.add(y, bias)
        if scale is not None and bias_first:
            y = self.g.mul(y, scale)
        return y

    def norm(self, x: Tensor, role: str, name: str) -> Tensor:
        """Normalize by the root mean square and multiply by a weight."""
        y = self.g.mul(self.g.rms_norm(x, self.config.norm_rms_eps), self.weights[f"{role}.weight"])
        y.name = name
        return y


# ------------------------------------------------------------------------------------------------------- the decoder


def build_decoder(arch: Decoder, b: Builder) -> Tensor | None:
    """Embed the tokens, run the layers, and project the wanted rows on the vocabulary.

    Where no row is wanted the last layer stops as soon as its keys and values are stored.
    """
    g, c = b.g, b.config
    x = g.get_rows(b.weights["token_embd.weight"], b.tokens)  # [n_embd, n_tokens]
    if arch.embedding_scale:
        x = g.scale(x, arch.embedding_scale(c))
        x.name = "inp_scaled"
    for il in range(c.n_layer - 1):
        x = layer(arch, b, x, il)
    il = c.n_layer - 1
    if b.out_ids is None:
        attention_inputs(arch, b, b.norm(x, f"blk.{il}.attn_norm", f"attn_norm-{il}"), il)
        return None
    x = b.norm(layer(arch, b, x, il), "output_norm", "result_norm")
    logits = g.mul_mat(b.weights["output.weight"], x)  # [n_vocab, n_outputs]
    if c.final_logit_softcapping:
        logits = softcap(g, logits, c.final_logit_softcapping)
    logits.name = "result_output"
    b.graph.expand(logits)
    return logits


def layer(arch: Decoder, b: Builder, x: Tensor, il: int) -> Tensor:
    """Add attention, then the FFN, to the residual stream. The last layer goes on with the wanted rows only."""
    g, blk = b.g, f"blk.{il}"
    cur = b.norm(x, f"{blk}.attn_norm", f"attn_norm-{il}")
    cur = attention(arch, b, cur, il)
    if il == b.config.n_layer - 1 and b.out_ids is not None:
        cur, x = g.get_rows(cur, b.out_ids), g.get_rows(x, b.out_ids)  # [n_embd, n_outputs]
    if arch.post_norm:
        cur = b.norm(cur, f"{blk}.post_attention_norm", f"attn_post_norm-{il}")
    h = g.add(cur, x)
    h.name = f"ffn_inp-{il}"
    cur = b.norm(h, f"{blk}.ffn_norm", f"ffn_norm-{il}")
    cur = moe_ffn(arch, b, cur, il) if b.config.n_expert and arch.moe else ffn(arch, b, cur, il)
    if arch.post_norm:
        cur = b.norm(cur, f"{blk}.post_ffw_norm", f"ffn_post_norm-{il}")
    x = g.add(cur, h)
    x.name = f"l_out-{il}"
    return x


def attention(arch: Decoder, b: Builder, x: Tensor, il: int) -> Tensor:
    """Project, rotate, store in the cache, attend, project back."""
    q = attention_inputs(arch, b, x, il)
    scale = arch.attention_scale(b.config)
    cur = attend(b, q, 1.0 if arch.scale_query else scale, il)
    cur = b.linear(cur, f"blk.{il}.attn_output")
    cur.name = f"attn_out-{il}"
    return cur


def attention_inputs(arch: Decoder, b: Builder, x: Tensor, il: int) -> Tensor:
    """Compute queries, keys and values, store the latter two in the cache, and return the queries."""
    g, kv = b.g, b.attention(il)
    q, k, v = qkv(b, x, il)
    q = rotate(arch, b, q, "q", il)
    k = rotate(arch, b, k, "k", il)
    q.name, k.name, v.name = f"Qcur-{il}", f"Kcur-{il}", f"Vcur-{il}"
    if arch.scale_query:
        q = g.scale(q, arch.attention_scale(b.config))
    if kv.k_rot is not None:
        q, k = hadamard(g, q, kv.k_rot), hadamard(g, k, kv.k_rot)
    if kv.v_rot is not None:
        v = hadamard(g, v, kv.v_rot)
    for t in (v, k) if b.out_ids is None and il == b.config.n_layer - 1 else (q, v, k):
        b.graph.expand(t)
    kv.store(b.graph, k, v, il)
    return q


def qkv(b: Builder, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
    """Project to queries, keys and values, each [n_embd_head, n_head, n_tokens]."""
    g, c, blk = b.g, b.config, f"blk.{il}"
    n_tokens = x.ne[1]
    heads = ((c.n_embd_head_k, c.n_head[il]), (c.n_embd_head_k, c.n_head_kv[il]), (c.n_embd_head_v, c.n_head_kv[il]))
    if f"{blk}.attn_qkv.weight" not in b.weights:
        parts = [b.linear(x, f"{blk}.attn_{role}") for role in "qkv"]
        q, k, v = (g.reshape_3d(p, d, n, n_tokens) for p, (d, n) in zip(parts, heads, strict=True))
        return q, k, v
    y = b.linear(x, f"{blk}.attn_qkv")
    biases = [b.weights[name] for role in "qkv" if (name := f"{blk}.attn_{role}.bias") in b.weights]
    if f"{blk}.attn_qkv.bias" not in b.weights and len(biases) == 3:
        y = g.add(y, g.concat(g.concat(biases[0], biases[1], 0), biases[2], 0))
    offset, views = 0, []
    for d, n in heads:
        views.append(g.view_3d(y, d, n, n_tokens, d * 4, y.nb[1], offset))
        offset += d * n * 4
    return views[0], views[1], views[2]


def rotate(arch: Decoder, b: Builder, x: Tensor, which: str, il: int) -> Tensor:
    """Normalize the heads where the architecture does, and rotate them by their positions (ggml_rope_ext)."""
    c, rope = b.config, b.rope
    if arch.qk_norm:
        x = b.norm(x, f"blk.{il}.attn_{which}_norm", f"{which.upper()}cur_normed-{il}")
    base, scale = rope.freq_base, rope.freq_scale
    if c.is_swa[il]:
        base, scale = f32(c.rope_freq_base_swa), f32(c.rope_freq_scale_swa)
    return b.g.rope_ext(
        x, b.positions, rope_factors(arch, b), c.n_rot, arch.rope, rope.n_ctx_orig, base, scale,
        rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow,
    )  # fmt: skip


def rope_factors(arch: Decoder, b: Builder) -> Tensor | None:
    """Return the per-frequency divisors the file brings, if any."""
    if not arch.rope_factors:
        return None
    if b.config.rope_scaling_type != "longrope":
        return b.weights.get("rope_freqs.weight")
    return b.weights.get(f"rope_factors_{'long' if b.use_long_factors else 'short'}.weight")


def attend(b: Builder, q: Tensor, scale: float, il: int) -> Tensor:
    """Attend over the cache; returns [n_embd_head_v * n_head, n_tokens]."""
    g, kv = b.g, b.attention(il)
    keys, values = kv.keys(il), kv.values(il)
    n_stream = keys.ne[3]
    d, n_head, n_tokens = q.ne[0], q.ne[1], q.ne[2] // n_stream
    q = g.view_4d(q, d, n_head, n_tokens, n_stream, q.nb[1], q.nb[2], q.nb[2] * n_tokens, 0)
    q, keys, values = (g.permute(t, 0, 2, 1, 3) for t in (q, keys, values))
    if b.flash_attn:
        cur = g.flash_attn_ext(q, keys, values, kv.mask, scale, 0.0, 0.0)
        g.prec_set_acc(cur, PREC_F32)
        cur.name = f"__fattn__-{il}"
        cur = g.reshape_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
    else:
        kq = g.mul_mat(keys, q)  # [n_kv, n_tokens, n_head, n_stream]
        g.prec_set_acc(kq, PREC_F32)
        kq.name = f"kq-{il}"
        kq = g.soft_max_ext(kq, kv.mask, scale, 0.0)
        kq.name = f"kq_soft_max-{il}"
        cur = g.mul_mat(values, kq)  # [n_embd_head_v, n_tokens, n_head, n_stream]
        cur.name = f"kqv-{il}"
        cur = g.permute(cur, 0, 2, 1, 3)
        cur = g.cont_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
    b.graph.expand(cur)
    cur.name = f"kqv_out-{il}"
    return hadamard(g, cur, kv.v_rot) if kv.v_rot is not None else cur


def hadamard(g: Context, x: Tensor, rot: Tensor) -> Tensor:
    """Rotate each run of n values, which spreads outliers before quantization (llama.cpp, quantized caches)."""
    n = rot.ne[0]
    rows = x.n_elements // n
    y = g.reshape_2d(x, n, rows) if x.is_contiguous else g.cont_2d(x, n, rows)
    y = g.mul_mat(rot, y)
    g.mul_mat_set_hint(y, HINT_HADAMARD)
    return g.reshape_4d(y, *x.ne)


def softcap(g: Context, x: Tensor, cap: float) -> Tensor:
    """Bound values smoothly to ±cap."""
    x = g.scale(x, float(np.float32(1.0) / np.float32(cap)))
    return g.scale(g.tanh(x), f32(cap))


def ffn(arch: Decoder, b: Builder, x: Tensor, il: int) -> Tensor:
    """Compute the gated feed-forward network, up first as llama.cpp does."""
    up = b.linear(x, f"blk.{il}.ffn_up", bias_first=True)
    gate = b.linear(x, f"blk.{il}.ffn_gate", bias_first=True)
    up.name, gate.name = f"ffn_up-{il}", f"ffn_gate-{il}"
    cur = b.linear(gated(arch, b.g, gate, up), f"blk.{il}.ffn_down", bias_first=True)
    cur.name = f"ffn_out-{il}"
    return cur


def gated(arch: Decoder, g: Context, gate: Tensor, up: Tensor) -> Tensor:
    """Apply the activation to the gate and multiply."""
    return {"swiglu": g.swiglu_split, "geglu": g.geglu_split}[arch.activation](gate, up)


def moe_ffn(arch: Decoder, b: Builder, x: Tensor, il: int) -> Tensor:
    """Route each token to its best experts and add up their weighted outputs."""
    g, c, blk = b.g, b.config, f"blk.{il}"
    assert arch.moe is not None
    n_embd, n_tokens, n_used = x.ne[0], x.ne[1], c.n_expert_used
    logits = b.linear(x, f"{blk}.ffn_gate_inp")  # [n_expert, n_tokens]
    logits.name = f"ffn_moe_logits-{il}"
    probs = g.soft_max(logits)
    probs.name = f"ffn_moe_probs-{il}"
    ids = g.argsort_top_k(probs, n_used)  # [n_used, n_tokens]
    ids.name = f"ffn_moe_topk-{il}"
    weights = g.get_rows(g.reshape_3d(probs, 1, c.n_expert, n_tokens), ids)  # [1, n_used, n_tokens]
    if arch.moe.normalize:
        weights = g.reshape_2d(weights, n_used, n_tokens)
        total = g.clamp(g.sum_rows(weights), 6.103515625e-5, math.inf)
        weights = g.reshape_3d(g.div(weights, total), 1, n_used, n_tokens)
    b.graph.expand(weights)

    x = g.reshape_3d(x, n_embd, 1, n_tokens)
    up = experts(b, x, f"{blk}.ffn_up_exps", ids)  # [n_ff, n_used, n_tokens]
    if f"{blk}.ffn_gate_exps.weight" in b.weights:
        cur = gated(arch, g, experts(b, x, f"{blk}.ffn_gate_exps", ids), up)
    else:
        cur = g.silu(up)
    cur = g.mul(experts(b, cur, f"{blk}.ffn_down_exps", ids), weights)  # [n_embd, n_used, n_tokens]
    b.graph.expand(cur)
    parts = [g.view_2d(cur, n_embd, n_tokens, cur.nb[2], i * cur.nb[1]) for i in range(n_used)]
    for part in parts:
        b.graph.expand(part)
    out = parts[0]
    for part in parts[1:]:
        out = g.add(out, part)
        b.graph.expand(out)
    out = out if n_used > 1 else g.cont(out)
    out.name = f"ffn_moe_out-{il}"
    return out


def experts(b: Builder, x: Tensor, role: str, ids: Tensor) -> Tensor:
    """Multiply each token by the matrices of its experts, and by those experts' scales where the file has them."""
    g = b.g
    y = g.mul_mat_id(b.weights[f"{role}.weight"], x, ids)
    scale = b.weights.get(f"{role}.scale")
    if scale is None:
        return y
    n_expert, n_tokens = scale.ne[0], x.ne[2]
    s = g.repeat_4d(g.reshape_3d(scale, 1, n_expert, 1), 1, n_expert, n_tokens, 1)
    return g.mul(y, g.get_rows(s, ids))
