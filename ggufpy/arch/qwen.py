"""Qwen: rotation by halves, with biases of the queries, keys and values or, since Qwen 3, with norms instead.

With experts too, and what is built like Qwen 3's: Grove, Mellum, Maple.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ggufpy.arch.decoder import CLAMP_MIN, IMROPE, MROPE, NEOX, REQUIRED, Config, Decoder, Has, Moe, TensorSpec, f32
from ggufpy.gguf import GGMLType
from ggufpy.graph import Tensor

__all__ = [
    "GroveMoe", "Maple", "Mellum", "Qwen", "Qwen2", "Qwen2Moe", "Qwen2VL", "Qwen3", "Qwen3Moe", "Qwen3TTS",
    "Qwen3VL", "Qwen3VlMoe",
]  # fmt: skip

N_VOCAB_TALKER = 3072


class Qwen(Decoder, name="qwen"):
    """Qwen 1: one matrix for q, k and v; `feed_forward_length` counts gate and up together."""

    grouped = False
    partial_rope = True
    tie = False
    rope = NEOX
    qkv_fused = True
    qkv_bias = True
    tiny = {"n_head_kv": 4}

    def adjust(self) -> Config:
        return replace(self.c, n_ff=tuple(n // 2 for n in self.c.n_ff))


class Qwen2(Decoder, name="qwen2", rope=NEOX, head_bias=None):
    """Qwen 2 and 2.5: biases of q, k and v, and of the output matrix where the file has one."""


class Qwen2VL(Qwen2, name="qwen2vl"):
    """Qwen 2 VL and 2.5 VL, the text part: rotation by time, height and width.

    llama.cpp reads neither this architecture's epsilon, which is 0 then, nor a bias of the output matrix.
    """

    keys = {"rope_sections": REQUIRED, "norm_rms_eps": 0.0}
    ignored = ("output.bias",)
    rope = MROPE
    head_bias = False

    def adjust(self) -> Config:
        return replace(self.c, norm_rms_eps=0.0)


class Qwen3(Decoder, name="qwen3"):
    """Qwen 3: each head's queries and keys are normalized."""

    classifier: ClassVar[tuple[str, ...]] = ("cls.output.weight",)
    rope = NEOX
    qk_norm = "head"
    ffn_scale: ClassVar[bool] = True

    def classify(self, x: Tensor) -> Tensor:
        """Make probabilities of the scores."""
        return self.g.soft_max(super().classify(x))


class Qwen3VL(Qwen3, name="qwen3vl", keys={"rope_sections": REQUIRED}, rope=IMROPE, ffn_scale=False):
    """Qwen 3 VL, the text part: rotation by time, height and width, interleaved."""


class Qwen3TTS(Qwen3VL, name="qwen3tts"):
    """Qwen 3 TTS, the talker: an output matrix of its own knows only the last tokens, those of sound."""

    ignored = ("cls.output.weight",)
    classifier = ()
    tiny = {"n_vocab": N_VOCAB_TALKER + 64}

    def check(self) -> Iterator[str]:
        if self.c.n_vocab < N_VOCAB_TALKER:
            yield f"tokenizer.ggml.tokens: expected {N_VOCAB_TALKER} or more, found {self.c.n_vocab}"

    def tensors(self, has: Has = ()) -> Iterator[TensorSpec]:
        for spec in super().tensors(has):
            yield replace(spec, shape=(self.c.n_embd, N_VOCAB_TALKER)) if spec.name == "output.weight" else spec

    def head(self, x: Tensor) -> Tensor:
        g, y = self.g, super().head(x)
        n_silent = self.c.n_vocab - y.ne[0]
        if not n_silent:
            return y
        none = g.scale_bias(g.view_1d(self.w["output_norm.weight"], 1, 0), 0.0, -math.inf)
        return g.concat(g.repeat_4d(none, n_silent, y.ne[1], 1, 1), y, 0)


class Qwen2Moe(Decoder, name="qwen2moe"):
    """Qwen 1.5 and 2 MoE: Qwen 2 with experts, and shared ones that a gate of their own weighs for each token."""

    keys = {"n_ff_exp": 0, "n_ff_shexp": 0}
    tie = False
    rope = NEOX
    moe = Moe(normalize=False, split_ff=True, shared="dense", shared_gate=True)

    def shared_weight(self, score: Tensor, il: int) -> Tensor:
        """Compute the sigmoid as llama.cpp does here: silu(x) / x."""
        return self.named(self.g.div(self.g.silu(score), score), "ffn_shexp_gate", il)


class Qwen3Moe(Decoder, name="qwen3moe"):
    """Qwen 3 MoE: Qwen 3 with experts in every layer."""

    keys = {"n_ff_exp": 0}
    rope = NEOX
    qk_norm = "head"
    moe = Moe(split_ff=True, scale=True)


class Qwen3VlMoe(Qwen3Moe, name="qwen3vlmoe"):
    """Qwen 3 VL MoE: rotation by sections that are interleaved. Only text is supported."""

    keys = {"n_ff_exp": 0, "rope_sections": REQUIRED}
    rope = IMROPE
    moe = Moe(split_ff=True)
    tiny_variants = {"deepstack": {"extra": {"qwen3vlmoe.n_deepstack_layers": 2}}}


class GroveMoe(Qwen3Moe, name="grovemoe"):
    """GroveMoE: groups of experts share a small adjoint expert; experts are chosen by the sigmoid of their scores."""

    keys = {"n_ff_exp": REQUIRED, "n_ff_chexp": 0, "expert_group_scale": REQUIRED, "n_group_experts": REQUIRED}
    moe = Moe(split_ff=True)
    tiny_variants = {"expert-groups": None, "ungrouped": {"n_group_experts": 1}}

    def check(self) -> Iterator[str]:
        c = self.c
        if c.n_expert and c.n_expert // c.n_group_experts < c.n_expert_used:
            yield f"experts_per_group {c.n_group_experts}: there are fewer groups than expert_used_count"
        if c.n_expert_groups > 1:
            yield f"expert_group_count {c.n_expert_groups}: the adjoint experts do not allow a choice by groups"

    def moe_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        yield from super().moe_tensors(il, has)
        n_ff, n_chunk = c.n_ff_chexp or c.n_embd_head_k, c.n_expert // c.n_group_experts
        for role, n_in, n_out in (("gate", c.n_embd, n_ff), ("up", c.n_embd, n_ff), ("down", n_ff, c.n_embd)):
            yield TensorSpec(f"ffn_{role}_chexps.weight", (n_in, n_out, n_chunk))

    def experts(self, x: Tensor, il: int, logits: Tensor | None = None) -> Tensor:
        """Send the experts' output through the adjoint experts of their groups and add what these make of it."""
        g, c = self.g, self.c
        logits = self.router_logits(x, il)
        probs, ids = g.soft_max(logits), self.choose(g.sigmoid(logits), il)
        out = self.mix(x, ids, self.weigh(probs, ids), il)
        if c.n_group_experts > 1:
            number = g.scale(g.cast(ids, GGMLType.F32), float(np.float32(1.0) / np.float32(c.n_group_experts)))
            ids = g.cast(number, GGMLType.I32)
        adjoint = self.mix(out, ids, self.weigh(probs, ids), il, "_chexps")
        return g.add(out, g.scale(adjoint, f32(c.expert_group_scale)))


class Mellum(Qwen3Moe, name="mellum"):
    """Mellum 2: Qwen 3 MoE with windows in three layers of four, where rotation is not scaled."""

    keys = {"n_ff_exp": REQUIRED, "n_swa": 0}
    swa_period = 4
    swa_rope = "plain"
    tie = False


class Maple(Qwen3Moe, name="maple"):
    """Maple: windows where the file says, rotation in those layers only, and gates and values that are clamped."""

    keys = {
        "n_ff_exp": REQUIRED, "n_swa": REQUIRED, "rope_freq_base_swa": 0.0, "n_rot_swa": 0,
        "swiglu_clamp_exp": REQUIRED,
    }  # fmt: skip
    swa_period = None
    full_rope = False
    swa_rope = "scaled"
    tie = False
    moe = Moe()

    def activate_experts(self, gate: Tensor | None, up: Tensor, il: int) -> Tensor:
        limit = f32(self.c.swiglu_clamp_exp[il])
        if gate is None or limit <= CLAMP_MIN:
            return super().activate_experts(gate, up, il)
        return self.g.swiglu_clamp(gate, up, limit)
