"""Attention: its tensors, and the way from the residual stream to queries, keys and values and back.

How the cache keeps its cells is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ggufpy.arch.rope import Rotation
from ggufpy.arch.scaling import f32, inv_sqrt
from ggufpy.arch.steps import PREC_F32
from ggufpy.arch.tensors import Has, Presence, TensorSpec, linear
from ggufpy.gguf import GGMLType
from ggufpy.graph import Tensor

__all__ = ["SelfAttention"]

HINT_HADAMARD = 1
ASCENDING = 0


class SelfAttention(Rotation):
    """Project, normalize, rotate, store in the cache, attend, project back."""

    split_heads: ClassVar[bool] = False
    """A head's values may be of another width than its keys."""
    grouped: ClassVar[bool] = True
    """Heads of queries may share one of keys and values."""
    headless: ClassVar[bool] = False
    """Layers may have no heads of keys and values, and then nothing in the cache."""
    qkv_fused: ClassVar[Presence] = None
    qkv_bias: ClassVar[Presence] = None
    qkv_scale: ClassVar[bool] = True  # of one fused matrix
    copy_fused: ClassVar[bool] = False  # what it gives is copied to queries, keys and values, not viewed
    output_bias: ClassVar[Presence] = False
    qk_norm: ClassVar[str] = ""
    """Queries and keys are normalized before they are rotated, by "head" (all alike), "heads" (each its own way) or the
    "full" row, or after that, by head ("rotated")."""
    qk_norm_weight: ClassVar[Presence] = True
    sinks: ClassVar[Presence] = False
    attn_gate: ClassVar[str] = ""
    """The function ("sigmoid", "softplus") of a gate that weakens attention's output before the last matrix."""
    gate_per: ClassVar[str] = "element"  # or "head", or "either" as the file has it
    scale_query: ClassVar[bool] = False
    """The attention scale multiplies the queries, not the scores."""
    alibi: ClassVar[float] = 0.0  # the largest slope, if no key gives one
    flash_attn: ClassVar[bool] = True  # False: what bounds the scores has no kernel

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        """List the tensors of a layer's attention."""
        c = self.c
        n_head, n_head_kv, (d_k, d_v) = c.n_head[il], c.n_head_kv[il], c.head_widths(il)
        widths = {role: d * n for role, (d, n) in zip("qkv", self.heads(il), strict=True)}
        if self.qkv_fused or (self.qkv_fused is None and "attn_qkv.weight" in has):
            yield from linear("attn_qkv", c.n_embd, sum(widths.values()), self.qkv_bias, scale=self.qkv_scale)
            if self.qkv_fused is None and self.qkv_bias is None and "attn_qkv.bias" not in has:
                for role, width in widths.items():  # converters have left separate biases beside a fused matrix
                    yield TensorSpec(f"attn_{role}.bias", (width,), optional=True)
        else:
            for role, width in widths.items():
                yield from linear(f"attn_{role}", c.n_embd, width, self.qkv_bias, scale=self.qkv_scale)
        yield from linear("attn_output", d_v * n_head, c.n_embd, self.output_bias)
        if self.qk_norm:
            optional = self.qk_norm_weight is None
            for role, n in (("q", n_head), ("k", n_head_kv)):
                shape = {"full": (widths[role],), "heads": (d_k, n)}.get(self.qk_norm, (d_k,))
                yield TensorSpec(f"attn_{role}_norm.weight", shape, optional, f32=True)
        if self.sinks is not False:
            yield TensorSpec("attn_sinks.weight", (n_head,), optional=self.sinks is None)
        if self.attn_gate:
            per_element, per_head = (c.n_embd, d_v * n_head), (c.n_embd, n_head)
            first, other = (per_head, per_element) if self.gate_per == "head" else (per_element, per_head)
            yield TensorSpec("attn_gate.weight", first, or_shape=other if self.gate_per == "either" else ())

    def attention_scale(self) -> float:
        """Return what scores (or queries) are multiplied by."""
        return f32(self.c.attention_scale) or inv_sqrt(self.c.n_embd_head_k)

    def max_alibi_bias(self) -> float:
        """Return the largest slope of ALiBi; 0 for none."""
        return f32(self.c.max_alibi_bias) or self.alibi

    def attention(self, x: Tensor, il: int) -> Tensor:
        """Project, rotate, store in the cache, attend, project back."""
        q, k, v = self.qkv(x, il)
        q, k = self.position(q, k, il)
        cur = self.weaken(self.attend(q, k, v, il), x, il)
        return self.named(self.linear(cur, f"blk.{il}.attn_output"), "attn_out", il)

    def weaken(self, cur: Tensor, x: Tensor, il: int) -> Tensor:
        """Multiply attention's output by a gate made of its input, if there is one, one value per element or head."""
        weight = self.w.get(f"blk.{il}.attn_gate.weight")
        if weight is None:
            return cur
        g, n_head, n_tokens = self.g, self.c.n_head[il], cur.ne[1]
        gate = g.mul_mat(weight, x)
        gate = self.named(g.sigmoid(gate) if self.attn_gate == "sigmoid" else g.softplus(gate), "attn_gate", il)
        if gate.ne[0] == n_head:
            heads = g.reshape_3d(cur, cur.ne[0] // n_head, n_head, n_tokens)
            gated = g.reshape_2d(g.mul(heads, g.reshape_3d(gate, 1, n_head, n_tokens)), *cur.ne[:2])
        else:
            gated = g.mul(cur, gate)
        return self.named(gated, "attn_gated", il)

    # -------------------------------------------------------------------------------------------- queries, keys, values

    def qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values, each [n_embd_head, n_head, n_tokens]."""
        g, blk, n_tokens, heads = self.g, f"blk.{il}", x.ne[1], self.heads(il)
        full, fused = self.qk_norm == "full", f"{blk}.attn_qkv.weight" in self.w
        copied = full or self.copy_fused
        if fused:
            y, parts, offset = self.clamp_kqv(self.fused_qkv(x, blk)), [], 0
            for d, n in heads:
                if copied:
                    parts.append(g.cont(g.view_2d(y, d * n, n_tokens, y.nb[1], offset)))
                else:
                    parts.append(g.view_3d(y, d, n, n_tokens, d * 4, y.nb[1], offset))
                offset += d * n * 4
        else:
            parts = [self.clamp_kqv(part) for part in self.separate_qkv(x, blk)]
        q, k, v = parts
        if full:
            q, k = self.normalize_qk(q, k, il)
        if copied or not fused:
            q, k, v = (g.reshape_3d(p, d, n, n_tokens) for p, (d, n) in zip((q, k, v), heads, strict=True))
        return q, k, v

    def heads(self, il: int) -> tuple[tuple[int, int], ...]:
        """Return the width and number of heads that queries, keys and values are projected to."""
        c, (d_k, d_v) = self.c, self.c.head_widths(il)
        return (d_k, c.n_head[il]), (d_k, c.n_head_kv[il]), (d_v, c.n_head_kv[il])

    def separate_qkv(self, x: Tensor, blk: str) -> list[Tensor]:
        """Multiply by the three matrices."""
        return [self.linear(x, f"{blk}.attn_{role}") for role in "qkv"]

    def fused_qkv(self, x: Tensor, blk: str) -> Tensor:
        """Multiply by the fused matrix and add its bias, or the three that a converter left separate."""
        y = self.linear(x, f"{blk}.attn_qkv")
        biases = [self.w[name] for role in "qkv" if (name := f"{blk}.attn_{role}.bias") in self.w]
        if f"{blk}.attn_qkv.bias" not in self.w and len(biases) == 3:
            y = self.g.add(y, self.g.concat(self.g.concat(biases[0], biases[1], 0), biases[2], 0))
        return y

    def clamp_kqv(self, x: Tensor) -> Tensor:
        """Clamp projections where the file asks for it."""
        c = f32(self.c.clamp_kqv)
        return self.g.clamp(x, -c, c) if c > 0 else x

    def position(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """Normalize queries and keys where the architecture does, and rotate them by their positions."""
        if self.qk_norm in ("head", "heads"):
            q, k = self.normalize_qk(q, k, il)
        if self.rotates(il):
            q, k = self.rotate(q, il), self.rotate(k, il)
        if self.qk_norm == "rotated":
            q, k = self.normalize_qk(q, k, il)
        return self.tempered(q, il), k

    def normalize_qk(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """Normalize queries and keys where the file has the norms' weights."""
        q_norm, k_norm = f"blk.{il}.attn_q_norm", f"blk.{il}.attn_k_norm"
        if f"{q_norm}.weight" in self.w:
            q = self.normalize(q, q_norm, "Qcur_normed", il)
        if f"{k_norm}.weight" in self.w:
            k = self.normalize(k, k_norm, "Kcur_normed", il)
        return q, k

    # ----------------------------------------------------------------------------------------- the cache and the scores

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, il: int) -> Tensor:
        """Store K and V, if given, and attend over the cache; returns [n_embd_head_v * n_head, n_tokens]."""
        scale = self.attention_scale()
        if self.scale_query:
            q, scale = self.g.scale(q, scale), 1.0
        g, kv = self.g, self.inputs.attention(il)
        q = self.graph.expand(self.named(self.hadamard(q, kv.k_rot), "Qcur", il))
        if k is not None and v is not None:
            self.store(k, v, il)
        keys, values = kv.keys(il), kv.values(il)
        n_stream = keys.ne[3]
        d, n_head, n_tokens = q.ne[0], q.ne[1], q.ne[2] // n_stream
        q = g.view_4d(q, d, n_head, n_tokens, n_stream, q.nb[1], q.nb[2], q.nb[2] * n_tokens, 0)
        q, keys, values = (g.permute(t, 0, 2, 1, 3) for t in (q, keys, values))
        max_bias = self.max_alibi_bias()
        sinks = self.w.get(f"blk.{il}.attn_sinks.weight")
        expand = self.w.get(f"blk.{il}.attn_v_b.weight")  # from compressed values to each head's
        if self.inputs.flash_attn:
            keys, values = (g.cast(t, GGMLType.F16) if t.type == GGMLType.F32 else t for t in (keys, values))
            cap = f32(self.c.attn_logit_softcapping)
            cur = g.flash_attn_ext(q, keys, values, kv.mask, scale, max_bias, cap)
            g.flash_attn_ext_add_sinks(cur, sinks)
            g.prec_set_acc(cur, PREC_F32)
            if expand is not None:
                cur = g.cont(g.permute(g.mul_mat(expand, g.permute(cur, 0, 2, 1, 3)), 0, 2, 1, 3))
            cur = g.reshape_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
        else:
            kq = g.mul_mat(keys, q)  # [n_kv, n_tokens, n_head, n_stream]
            g.prec_set_acc(self.named(kq, "kq", il), PREC_F32)
            kq = self.bounded(kq)
            kq = self.named(g.soft_max_ext(kq, kv.mask, scale, max_bias), "kq_soft_max", il)
            g.soft_max_add_sinks(kq, sinks)
            cur = self.named(g.mul_mat(values, kq), "kqv", il)  # [n_embd_head_v, n_tokens, n_head, n_stream]
            cur = cur if expand is None else g.mul_mat(expand, cur)
            cur = g.permute(cur, 0, 2, 1, 3)
            cur = g.cont_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
        return self.hadamard(self.graph.expand(self.named(cur, "kqv_out", il)), kv.v_rot)

    def store(self, k: Tensor, v: Tensor, il: int) -> None:
        """Store keys and values in the cache, rotated as it wants them."""
        kv = self.inputs.attention(il)
        v = self.graph.expand(self.named(self.hadamard(v, kv.v_rot), "Vcur", il))
        k = self.graph.expand(self.named(self.hadamard(k, kv.k_rot), "Kcur", il))
        kv.store(self.graph, k, v, il)

    def bounded(self, kq: Tensor) -> Tensor:
        """Bound the scores where the architecture does; flash attention does it by itself."""
        return self.softcap(kq, self.c.attn_logit_softcapping) if self.c.attn_logit_softcapping else kq

    def turned(self, k: Tensor, rot: Tensor | None, il: int) -> Tensor:
        """Rotate cached keys [n_rot, n_head_kv, n] in place by the inputs' positions (llama.cpp's K-shift).

        Other than there they are not scaled a second time, where YaRN or the file scales what it rotates.
        """
        g = self.g
        x = k if k.type in (GGMLType.F16, GGMLType.F32) else g.cast(k, GGMLType.F32)
        x = self.hadamard(self.rotate(self.hadamard(x, rot), il, unscaled=True), rot)
        if not k.type.is_quantized:
            return g.cpy(x, k)
        heads = g.argsort(g.arange(0, k.ne[1], 1), ASCENDING)  # ggml_cpy packs only what has no gaps
        return g.set_rows(k, x, heads)

    def hadamard(self, x: Tensor, rot: Tensor | None) -> Tensor:
        """Rotate each run of n values, which spreads outliers before quantization (llama.cpp, quantized caches)."""
        if rot is None:
            return x
        g, n = self.g, rot.ne[0]
        rows = x.n_elements // n
        y = g.mul_mat(rot, g.reshape_2d(x, n, rows) if x.is_contiguous else g.cont_2d(x, n, rows))
        g.mul_mat_set_hint(y, HINT_HADAMARD)
        return g.reshape_4d(y, *x.ne)
