"""DeepSeek 2 and 3, and what is built like them: attention over keys and values compressed to one vector per token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ggufpy.arch.decoder import REQUIRED, ROUTER, Config, Decoder, Has, Moe, Rope, Tensor, TensorSpec, linear

__all__ = ["DeepSeek2", "Mistral4"]

N_VOCAB_KANANA, N_VOCAB_GLM_LITE = 128256, 154880
TENTH = np.float32(0.1)


class LatentAttention(Decoder):
    """Attention over one compressed vector per token; part of a head rotates, the same for all heads' keys.

    The matrix from the vector to keys is applied to the queries, that to values to attention's output; older files have
    both as one and give each head its keys and values.
    """

    partial_rope = True
    split_heads = True
    qkv_fused = False

    def check(self) -> Iterator[str]:
        c = self.c
        if bool(c.n_embd_head_k_mla) != bool(c.n_embd_head_v_mla):
            yield "attention.key_length_mla and attention.value_length_mla: expected both or neither"
        if c.n_rot >= (c.n_embd_head_k_mla or c.n_embd_head_k):
            yield f"rope.dimension_count: expected less than a head's width, found {c.n_rot}"
        if c.is_mla and c.n_embd_head_k != c.n_lora_kv + c.n_rot:
            yield f"attention.key_length: expected {c.n_lora_kv + c.n_rot} (kv_lora_rank and rope.dimension_count)"
        if any(n != (1 if c.is_mla else c.n_head[0]) for n in c.n_head_kv) or len(set(c.n_head)) > 1:
            yield "attention.head_count_kv: expected 1 with attention.key_length_mla, else head_count, in all layers"
        if c.attn_temperature_scale and not c.attn_temperature_length:
            yield "attention.temperature_length: expected at least 1, found 0"

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c, n_head = self.c, self.c.n_head[il]
        k, v = c.n_embd_head_k_mla or c.n_embd_head_k, c.n_embd_head_v_mla or c.n_embd_head_v
        if c.n_lora_q:
            yield TensorSpec("attn_q_a.weight", (c.n_embd, c.n_lora_q))
            yield TensorSpec("attn_q_a_norm.weight", (c.n_lora_q,))
            yield TensorSpec("attn_q_b.weight", (c.n_lora_q, n_head * k))
        else:
            yield TensorSpec("attn_q.weight", (c.n_embd, n_head * k))
        yield TensorSpec("attn_kv_a_mqa.weight", (c.n_embd, c.n_lora_kv + c.n_rot))
        yield TensorSpec("attn_kv_a_norm.weight", (c.n_lora_kv,))
        if c.is_mla:
            yield TensorSpec("attn_k_b.weight", (k - c.n_rot, c.n_lora_kv, n_head))
            yield TensorSpec("attn_v_b.weight", (c.n_lora_kv, v, n_head))
        else:
            yield TensorSpec("attn_kv_b.weight", (c.n_lora_kv, n_head * (k - c.n_rot + v)))
        yield from linear("attn_output", n_head * v, c.n_embd, False)

    def attention_scale(self) -> float:
        """Scale by the head's width, and by the square of what YaRN's stretch asks for."""
        c = self.c
        r = Rope.of(c)
        log = np.float32(math.log(np.float32(1) / np.float32(r.freq_scale)))
        stretch = np.float32(r.attn_factor) * (np.float32(1) + TENTH * log)
        stretch *= np.float32(1) + TENTH * np.float32(c.rope_yarn_log_mul) * log
        return float(stretch * stretch / np.sqrt(np.float32(c.n_embd_head_k_mla or c.n_embd_head_k)))

    def qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compress; rotate a part; give the rest to the heads, on the queries' side or on that of keys and values."""
        g, c, blk, n_tokens, n_head = self.g, self.c, f"blk.{il}", x.ne[1], self.c.n_head[il]
        q = self.queries(x, il)  # [n_embd_head_k_mla, n_head, n_tokens]
        d = q.ne[0] - c.n_rot
        both = self.named(self.linear(x, f"{blk}.attn_kv_a_mqa"), "kv_cmpr_pe", il)
        row = both.nb[1]
        k_pe = self.rotate(g.view_3d(both, c.n_rot, 1, n_tokens, row, row, c.n_lora_kv * 4), il)
        kv = g.view_2d(both, c.n_lora_kv, n_tokens, row, 0)
        kv = self.normalize(kv, f"{blk}.attn_kv_a_norm", "kv_cmpr", il)
        if c.is_mla:
            q_pe = self.rotate(g.view_3d(q, c.n_rot, n_head, n_tokens, q.nb[1], q.nb[2], d * 4), il)
            q = g.permute(g.view_3d(q, d, n_head, n_tokens, q.nb[1], q.nb[2], 0), 0, 2, 1, 3)
            q = g.permute(g.mul_mat(self.w[f"{blk}.attn_k_b.weight"], q), 0, 2, 1, 3)
            kv = g.reshape_3d(kv, c.n_lora_kv, 1, n_tokens)
            return g.concat(q, q_pe, 0), g.concat(kv, k_pe, 0), kv
        kv = self.linear(kv, f"{blk}.attn_kv_b")
        row = 4 * (d + c.n_embd_head_v)
        v = g.cont(g.view_3d(kv, c.n_embd_head_v, n_head, n_tokens, row, row * n_head, d * 4))
        q = self.rotate(q, il)
        g.rope_set_offset(q, d)
        k = g.view_3d(kv, d, n_head, n_tokens, row, row * n_head, 0)
        return q, g.concat(k, g.repeat_4d(k_pe, c.n_rot, n_head, n_tokens, 1), 0), v

    def queries(self, x: Tensor, il: int) -> Tensor:
        """Project to queries, in one step or by way of a compressed vector."""
        blk = f"blk.{il}"
        if self.c.n_lora_q:
            x = self.normalize(self.linear(x, f"{blk}.attn_q_a"), f"{blk}.attn_q_a_norm", "q", il)
        q = self.linear(x, f"{blk}.attn_q_b" if self.c.n_lora_q else f"{blk}.attn_q")
        return self.g.reshape_3d(q, q.ne[0] // self.c.n_head[il], self.c.n_head[il], x.ne[1])

    def position(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        return self.tempered(q, il), k


def _is_lite(n_layer: int, n_vocab: int) -> bool:
    """Say whether a model is one of those whose queries are not compressed, whatever `q_lora_rank` says."""
    return n_layer in (26, 27) or (n_layer == 48 and n_vocab == N_VOCAB_KANANA)


def _n_lora_q(values: dict[str, Any]) -> Any:
    return 0 if _is_lite(values["n_layer"] - (values["n_layer_nextn"] or 0), values["n_vocab"]) else REQUIRED


class DeepSeek2(LatentAttention, name="deepseek2"):
    """DeepSeek 2 and 3, GLM 4.7 Lite: latent attention; dense layers first, then experts in groups."""

    keys = {
        **ROUTER, "n_layer_dense_lead": 0, "n_lora_q": _n_lora_q, "n_lora_kv": REQUIRED, "n_embd_head_k_mla": 0,
        "n_embd_head_v_mla": 0, "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "rope_yarn_log_mul": 0.0,
        "attn_temperature_scale": 0.0, "attn_temperature_length": 0,
    }  # fmt: skip
    nextn = True
    even_stretch = True  # YaRN stretches what rotates as all else
    moe = Moe(normalize=None, bias=None, shared="many", fused=True)
    tiny = {
        "n_head_kv": 1, "n_lora_q": 64, "n_lora_kv": 64, "n_rot": 32, "n_embd_head_k": 96, "n_embd_head_v": 64,
        "n_embd_head_k_mla": 48, "n_embd_head_v_mla": 24,
    }  # fmt: skip
    tiny_variants = {
        "no-gqa": None, "one-kv-head": None, "split-heads": None, "partial-rope": None, "n-lora-q": {"n_lora_q": 0},
        "kv-b": {
            "n_head_kv": 4, "n_embd_head_k": 48, "n_embd_head_v": 24, "n_embd_head_k_mla": 0, "n_embd_head_v_mla": 0,
        },
        "lite": {"n_layer": 27, "n_embd": 64, "n_ff": 96, "n_ff_exp": 32},
        "attn-temperature-scale": {"attn_temperature_scale": 0.3, "attn_temperature_length": 8},
    }  # fmt: skip

    def adjust(self) -> Config:
        """Take from the multiplier what converters put in, and the value's width from the compressed vector."""
        c = self.c
        multiplier = float(np.float32(c.rope_yarn_log_mul) / TENTH)
        sigmoid = c.n_layer in (47, 48) and c.n_vocab == N_VOCAB_GLM_LITE and not c.expert_gating_func
        return replace(
            c,
            n_lora_q=0 if _is_lite(c.n_layer, c.n_vocab) else c.n_lora_q,
            n_embd_head_v=c.n_lora_kv if c.is_mla else c.n_embd_head_v,
            rope_yarn_log_mul=multiplier,
            yarn_mscale=multiplier if self.even_stretch else 1.0,
            expert_gating_func=2 if sigmoid else c.expert_gating_func,
        )


class Mistral4(DeepSeek2, name="mistral4", even_stretch=False):
    """Mistral 4: YaRN stretches what rotates in its own way."""
