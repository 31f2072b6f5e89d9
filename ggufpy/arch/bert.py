"""BERT and its kin: encoders that give embeddings, most with norms behind the sums instead of before the sublayers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ggufpy.arch.decoder import CLASSIFIER, NEOX, REQUIRED, Config, Decoder, Has, Moe, Presence, TensorSpec, linear
from ggufpy.graph import Tensor

__all__ = ["Bert", "JinaBertV2", "JinaBertV3", "ModernBert", "NeoBert", "NomicBert", "NomicBertMoe"]


class Encoder(Decoder):
    """What gives embeddings only, computed from all tokens at once, some with a classifier behind them."""

    cacheless = True
    logits = False
    ignored: ClassVar[tuple[str, ...]] = CLASSIFIER
    partial_rope = True


class Bert(Encoder, name="bert"):
    """BERT: embedded positions, a plain FFN with GELU, LayerNorm behind each sum. All tokens are of the first type."""

    keys = {"n_token_types": REQUIRED}
    classifier: ClassVar[tuple[str, ...]] = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
    norm = "layer"
    norm_bias = True
    embedding_norm = True
    learned_positions: ClassVar[Presence] = True
    token_types: ClassVar[Presence] = None
    pre_norm = False
    output_norm = ""
    sum_norms: ClassVar[tuple[str, str]] = ("attn_output_norm", "layer_output_norm")
    rope: ClassVar[int | None] = None
    output_bias: ClassVar[Presence] = None
    ffn_gate = False
    ffn_bias: ClassVar[Presence] = None
    activation = "gelu"
    tiny = {"n_token_types": 2}

    def tensors(self, has: Has = ()) -> Iterator[TensorSpec]:
        yield from super().tensors(has)
        shape, optional = (self.c.n_embd, self.c.n_token_types), self.token_types is None
        yield TensorSpec("token_types.weight", shape, optional, f32=True)

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        for role in self.sum_norms:
            yield from self.norm_tensors(role, self.c.n_embd)

    def look_up(self) -> Tensor:
        x, types = super().look_up(), self.w.get("token_types.weight")
        return x if types is None else self.g.add(x, self.g.view_1d(types, self.c.n_embd, 0))

    def add_residual(self, cur: Tensor, x: Tensor, which: int, il: int) -> Tensor:
        """Add, then normalize."""
        name = ("ffn_inp", "layer_out_norm")[which]
        return self.normalize(self.g.add(cur, x), f"blk.{il}.{self.sum_norms[which]}", name, il)


class JinaBertV3(Bert, name="jina-bert-v3", classifier=(), learned_positions=False, rope=NEOX):
    """Jina BERT v3: BERT that rotates."""


class NomicBert(JinaBertV3, name="nomic-bert"):
    """Nomic BERT: a gated FFN; llama.cpp loads its biases but leaves them out of the graph."""

    ignored = (*CLASSIFIER, "ffn_up.bias", "ffn_down.bias")
    ffn_gate = True
    ffn_bias = False
    activation = "silu"


class NomicBertMoe(JinaBertV3, name="nomic-bert-moe"):
    """Nomic BERT MoE: experts without gates in every other layer, or as often as the file says."""

    keys = {"n_token_types": REQUIRED, "moe_every_n_layers": 0}
    moe = Moe(required=False, gate=False, normalize=False)
    tiny = {"n_token_types": 2, "moe_every_n_layers": 2, "n_layer": 4, "n_expert": 8, "n_expert_used": 2}
    tiny_variants = {"no-experts": {"moe_every_n_layers": 0}}

    def is_moe(self, il: int, has: Has = ()) -> bool:
        return self.c.moe_every_n_layers > 0 and il % self.c.moe_every_n_layers == 1


class JinaBertV2(Bert, name="jina-bert-v2"):
    """Jina BERT v2: ALiBi, norms of whole queries and keys, a second norm of attention, GELU with or without a gate."""

    classifier = ("cls.weight", "cls.bias")
    learned_positions = False
    token_types = True
    alibi = 8.0
    output_bias = True
    qk_norm = "full"
    qk_norm_weight = None
    tiny = {"n_token_types": 2, "n_head_kv": 4}
    tiny_variants = {
        "one-kv-head": None, "fused": None, "fused-biases": None, "fused-separate-biases": None,
        "gate-in-up": {"without": "ffn_gate", "or_shape": True},
    }  # fmt: skip

    def classifier_tensors(self) -> Iterator[TensorSpec]:
        yield TensorSpec("cls.weight", (self.c.n_embd, 1), optional=True)
        yield TensorSpec("cls.bias", (1,), optional=True)

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().attention_tensors(il, has)
        for role in ("attn_q_norm", "attn_k_norm", "attn_norm_2"):
            yield TensorSpec(f"{role}.bias", (self.c.n_embd,), optional=True)
        yield TensorSpec("attn_norm_2.weight", (self.c.n_embd,), optional=True)

    def dense_tensors(self, n_ff: int, suffix: str = "") -> Iterator[TensorSpec]:
        c = self.c
        yield TensorSpec("ffn_gate.weight", (c.n_embd, n_ff), optional=True)
        yield TensorSpec("ffn_up.weight", (c.n_embd, n_ff), or_shape=(c.n_embd, 2 * n_ff))
        yield TensorSpec("ffn_up.bias", (n_ff,), optional=True, or_shape=(2 * n_ff,))
        yield from linear("ffn_down", n_ff, c.n_embd, True, scale=False)

    def add_residual(self, cur: Tensor, x: Tensor, which: int, il: int) -> Tensor:
        cur = super().add_residual(cur, x, which, il)
        if which or f"blk.{il}.attn_norm_2.weight" not in self.w:
            return cur
        return self.normalize(self.g.add(cur, x), f"blk.{il}.attn_norm_2", "ffn_inp", il)

    def activate(self, gate: Tensor, up: Tensor | None, il: int) -> Tensor:
        """Find the gate in the first half of a matrix twice as wide."""
        both = up is None and gate.ne[0] == 2 * self.c.n_ff[il]
        return self.activate_fused(gate) if both else super().activate(gate, up, il)


class ModernBert(Encoder, name="modern-bert"):
    """ModernBERT: norms before the sublayers, rotation, and windows to both sides in two layers of three."""

    classifier = ("cls.weight", "cls.norm.weight", "cls.output.weight", "cls.output.bias")
    classifier_activation = "gelu"
    keys = {"n_swa": 0, "rope_freq_base_swa": 10000.0, "hidden_activation": ""}
    swa_period = 3
    swa_dense_first = True
    lacking = ("blk.0.attn_norm.weight",)  # embeddings are normalized already
    norm = "layer"
    embedding_norm = True
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    ffn_fused = True
    tiny = {"n_head_kv": 4}
    tiny_variants = {
        "one-kv-head": None,
        "silu": {"hidden_activation": "silu"},
        "reglu": {"hidden_activation": "reglu"},
        "another-activation": {"hidden_activation": "mish"},
    }

    def adjust(self) -> Config:
        """Let classifiers take the mean where the file does not say what they take."""
        c = super().adjust()
        return replace(c, classifier_pooling=1) if c.classifier_pooling is None else c

    def activate_fused(self, both: Tensor) -> Tensor:
        g, name = self.g, self.c.hidden_activation
        functions = {"silu": g.swiglu, "swish": g.swiglu, "swiglu": g.swiglu, "reglu": g.reglu}
        return functions.get(name, g.geglu)(both)


class NeoBert(Encoder, name="neo-bert"):
    """NeoBERT: Llama in one matrix for q, k and v and one for gate and up, and another name for the last norm."""

    classifier = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
    output_norm = "enc.output_norm"
    qkv_fused = True
    qkv_bias = False
    ffn_fused = True
