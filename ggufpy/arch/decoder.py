"""The decoder that most language models share, as a class to declare differences on.

`Decoder` is both the declaration of an architecture and one graph of it in the making. Its class attributes say what a
file has (the metadata keys, the tensor table) and which variant of each step is taken; its methods build the graph, in
llama.cpp's order to the last addition. The class as it stands is Llama. An architecture is a subclass in its family's
file, with the name that files give it in its head: attributes where the difference is data (in the head too, where they
are few), a method where it is another formula. Attention and FFN have rooms of their own (`attention.py` over
`rope.py`, `experts.py` over `ffn.py`); what declarations need of them and of the files below is found here.

This file does not know where weights lie, how the cache keeps its cells or who runs the graph. Shapes are in ggml
order: the first number is the contiguous dimension. Nodes are named as in llama.cpp (`Qcur-3`, `ffn_out-3`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ggufpy.arch.attention import SelfAttention
from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.experts import CLAMP_MIN, GATING, ROUTER, Experts, Moe
from ggufpy.arch.rope import IMROPE, MROPE, NEOX, NORM
from ggufpy.arch.scaling import Rope, f32, inv_sqrt
from ggufpy.arch.steps import Attention, FromPositions, GraphInputs, States
from ggufpy.arch.tensors import Has, Presence, TensorSpec, linear
from ggufpy.gguf import GGMLType
from ggufpy.graph import Tensor

__all__ = [
    "CLAMP_MIN", "CLASSIFIER", "GATING", "IMROPE", "MROPE", "NEOX", "NORM", "REQUIRED", "ROUTER",
    "Attention", "Config", "Decoder", "FromPositions", "GraphInputs", "Has", "Moe", "Presence", "Rope", "States",
    "Tensor", "TensorSpec", "f32", "inv_sqrt", "linear",
]  # fmt: skip


CLASSIFIER = ("cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias")


class Decoder(SelfAttention, Experts):
    """Llama, and what other architectures declare their differences from. See the head of this file."""

    name: ClassVar[str] = ""  # none: no architecture, but what several have in common
    # --- what files have
    keys: ClassVar[Mapping[str, Any]] = {}
    """Optional fields of `Config` that this architecture reads, with their defaults."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Tensors that files may bring and that change no logits: by name, those of layers without `blk.N.`."""
    lacking: ClassVar[tuple[str, ...]] = ()
    """Tensors that files may lack although most architectures need them, named in the same way."""
    stand_ins: ClassVar[Mapping[str, str]] = {"output.weight": "token_embd.weight"}
    """Tensors that a file may lack, and which are used in their place."""
    swa_period: ClassVar[int | None] = 0
    """With a window: of each run of that many layers the last one sees everything (or the first: `swa_dense_first`), if
    the file does not say otherwise; None if it has to say it for each layer."""
    swa_dense_first: ClassVar[bool] = False
    nextn: ClassVar[bool] = False
    """The last `nextn_predict_layers` blocks, which guess further tokens, may be in the file; they are left out."""
    cacheless: ClassVar[bool] = False
    """Tokens see all others of their call and nothing else; nothing is kept."""
    logits: ClassVar[bool] = True  # False: embeddings only
    tie: ClassVar[Presence] = None  # True: the output matrix is always the token embeddings
    head_bias: ClassVar[Presence] = False
    classifier: ClassVar[tuple[str, ...]] = ()
    """Those of `CLASSIFIER` that a file may have, to score pooled embeddings with."""
    classifier_activation: ClassVar[str] = "tanh"  # of its hidden layer
    root_scale: ClassVar[bool] = False  # embeddings are scaled by the root of their width
    embedding_norm: ClassVar[bool] = False
    learned_positions: ClassVar[Presence] = False
    """Embeddings of positions are added to those of tokens."""
    # --- the layer
    pre_norm: ClassVar[bool] = True
    ffn_norm: ClassVar[str] = "ffn_norm"  # none: the FFN takes what attention takes
    post_norms: ClassVar[tuple[str, str] | None] = None
    """Norms of the attention's and the FFN's output, before these are added."""
    post_norm_eps: ClassVar[float] = 0.0  # where it is not that of the other norms
    parallel: ClassVar[str] = ""
    """Attention and FFN stand side by side: "ffn + attn" or "ffn + x" says which two are added first."""
    output_norm: ClassVar[str] = "output_norm"  # none: the last layer's output is the result
    crop: ClassVar[str] = "early"
    """Where unwanted rows are dropped: "early" in the last layer, "late" before the last norm, "last" after it."""
    # --- tests
    tiny: ClassVar[Mapping[str, Any]] = {}
    """Fields of `Config` that small models for tests need otherwise than usual (testing.py)."""
    tiny_variants: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {}
    """Variants that tests need beyond those that follow from the rest; None for one that does not apply."""

    def __init_subclass__(cls, *, name: str = "", **said: Any) -> None:
        """Take the name, which nobody inherits, and other attributes that a declaration's head gives.

        An attribute that does not exist is an AttributeError.
        """
        super().__init_subclass__()
        cls.name = name
        for attribute, value in said.items():
            getattr(cls, attribute)
            setattr(cls, attribute, value)

    # ------------------------------------------------------------------------------------------------- keys and tensors

    @classmethod
    def config(cls, metadata: Mapping[str, Any], *, path: str = "") -> Config:
        """Read and check the hyper-parameters; one GGUFError lists all faults."""
        eps = {"norm_rms_eps": REQUIRED} if cls.norm == "rms" else {"norm_eps": REQUIRED}
        pattern, faults = (cls.swa_period, cls.swa_dense_first), lambda c: cls(c).faults()
        config = Config.from_gguf(metadata, {**eps, **cls.keys}, swa_pattern=pattern, check=faults, path=path)
        return cls(config).adjust()

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the hyper-parameters beyond each key's own range."""
        c = self.c
        for k, v in {c.head_widths(il) for il in range(c.n_layer)}:
            if k != v and not self.split_heads:
                yield f"attention.key_length {k} and attention.value_length {v} must be equal"
        if not self.grouped and c.n_head_kv != c.n_head:
            yield f"attention.head_count_kv: expected {c.n_head[0]} (head_count), found {c.n_head_kv[0]}"
        for name, heads in (("head_count", c.n_head), ("head_count_kv", c.n_head_kv)):
            if not self.headless and not all(heads):
                yield f"{c.architecture}.attention.{name}: expected at least 1, found 0"
        if not self.partial_rope and c.n_rot != c.n_embd_head_k:
            yield f"rope.dimension_count {c.n_rot} and attention.key_length {c.n_embd_head_k} must be equal"
        if self.rope_mode() in (MROPE, IMROPE) and not 0 < sum(c.rope_sections) <= c.n_embd_head_k:
            yield f"rope.dimension_sections: expected a sum of 1 to {c.n_embd_head_k}, found {list(c.rope_sections)}"
        if self.moe and self.moe.required and not c.n_expert:
            yield "expert_count: the key is missing or 0"
        if self.moe and c.n_expert and not self.moe.gating and c.expert_gating_func not in GATING:
            yield "expert_gating_func: the key is missing or 0"
        yield from self.check()

    def check(self) -> Iterator[str]:
        """Yield what is wrong for this architecture alone: nothing."""
        return iter(())

    def adjust(self) -> Config:
        """Change what this architecture takes in another way than the keys say."""
        return replace(self.c, causal_attn=False) if self.cacheless else self.c

    def tensors(self, has: Has = ()) -> Iterator[TensorSpec]:
        """List every tensor that a file of this architecture has or may have.

        `has` are the names a file has: they decide between forms, such as one fused or three separate q, k, v matrices.
        """
        table = [*self.outer_tensors(), *self.unused_tensors(has)]
        for il in range(self.c.n_layer):
            blk = f"blk.{il}."
            here = {name.removeprefix(blk) for name in has if name.startswith(blk)}
            table += (replace(spec, name=blk + spec.name) for spec in self.layer_tensors(il, here))
        table += self.classifier_tensors()
        return self.relaxed(table)

    def relaxed(self, table: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
        """Make optional what files of this architecture may lack."""
        return (replace(spec, optional=spec.optional or _among(self.lacking, spec.name)) for spec in table)

    def outer_tensors(self) -> Iterator[TensorSpec]:
        """List what stands before and behind the layers."""
        c = self.c
        yield TensorSpec("token_embd.weight", (c.n_embd, c.n_vocab), indexed=True)
        if self.learned_positions is not False:
            optional = self.learned_positions is None
            yield TensorSpec("position_embd.weight", (c.n_embd, c.n_ctx_train), optional, indexed=True)
        if self.embedding_norm:
            yield from self.norm_tensors("token_embd_norm", c.n_embd)
        if self.output_norm:
            yield from self.norm_tensors(self.output_norm, c.n_embd)
        if self.logits and self.tie is not True:
            yield TensorSpec("output.weight", (c.n_embd, c.n_vocab), optional=self.tie is None)
        if self.head_bias is not False:
            yield TensorSpec("output.bias", (c.n_vocab,), optional=self.head_bias is None)
        yield from self.factor_tensors()

    def classifier_tensors(self) -> Iterator[TensorSpec]:
        """List what a classifier may have: a hidden layer, a norm of it, and a matrix that gives each label's score."""
        c = self.c
        shapes = ((c.n_embd, c.n_embd), (c.n_embd,), (c.n_embd,), (c.n_embd, c.n_labels), (c.n_labels,))
        for name, shape in zip(CLASSIFIER, shapes, strict=True):
            if name in self.classifier:
                yield TensorSpec(name, shape, optional=True)

    def unused_tensors(self, has: Has) -> Iterator[TensorSpec]:
        """List what a file has and no graph needs."""
        c = self.c
        nextn = tuple(f"blk.{il}." for il in range(c.n_layer, c.n_layer + c.n_layer_nextn)) if self.nextn else ()
        for name in has:
            if (_among(self.ignored, name) and name not in self.classifier) or name.startswith(nextn):
                yield TensorSpec(name, (), unused=True)

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        """List a layer's tensors, by their names behind `blk.N.`."""
        c = self.c
        if self.pre_norm:
            yield from self.norm_tensors("attn_norm", c.n_embd)
        yield from self.attention_tensors(il, has)
        if self.post_norms:
            yield from self.norm_tensors(self.post_norms[0], c.n_embd)
        if self.pre_norm and self.ffn_norm:
            yield from self.norm_tensors(self.ffn_norm, c.n_embd)
        yield from self.ffn_tensors(il, has)
        if self.post_norms:
            yield from self.norm_tensors(self.post_norms[1], c.n_embd)

    def nextn_tensors(self) -> Iterator[TensorSpec]:
        """List what a block that guesses a further token has at least, by the names behind `blk.N.`."""
        c = self.c
        yield from self.relaxed(type(self)(self.nextn_config()).layer_tensors(c.n_layer - 1, ()))
        yield TensorSpec("nextn.eh_proj.weight", (2 * c.n_embd, c.n_embd))
        yield from (TensorSpec(f"nextn.{name}.weight", (c.n_embd,)) for name in ("enorm", "hnorm"))

    def nextn_config(self) -> Config:
        """Return the hyper-parameters with the last layer made one of such blocks."""
        return self.c

    def states(self) -> Mapping[int, Mapping[str, int]]:
        """Return the widths of the states that recurrent layers keep for each sequence, by layer and name."""
        return {}

    # -------------------------------------------------------------------------------------------------------- the graph

    def build(self) -> Tensor | None:
        """Build the graph; returns its logits, [n_vocab, n_outputs], if any are wanted, or embeddings.

        Where none are, the last layer that has any keys and values is done as soon as they are stored.
        """
        x, last = self.embed(), self.c.n_layer - 1
        if self.inputs.out_ids is None:
            last = (self.c.n_layer_kv or self.c.n_layer) - 1
        for il in range(last):
            x = self.layer(x, il)
        if self.inputs.out_ids is None:
            self.store_only(x, last)
            return None
        x = self.layer(x, last)
        if self.crop == "late":
            x = self.g.get_rows(x, self.inputs.out_ids)
        if self.output_norm:
            x = self.normalize(x, self.output_norm, "result_norm")
        if self.crop == "last":
            x = self.g.get_rows(x, self.inputs.out_ids)
        if self.inputs.embeddings:
            return self.graph.expand(self.named(self.pool(x), "result_embd_pooled"))
        return self.graph.expand(self.named(self.head(x), "result_output"))

    def wanted(self, il: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """In the last layer, keep only the rows whose logits are wanted, [n_embd, n_outputs]."""
        if il < self.c.n_layer - 1 or self.crop != "early" or self.inputs.out_ids is None:
            return tensors
        return tuple(self.g.get_rows(t, self.inputs.out_ids) for t in tensors)

    def pool(self, x: Tensor) -> Tensor:
        """Make one embedding of all tokens', where that is wanted: their weighted sum, or one of them."""
        g, pool = self.g, self.inputs.pool
        if pool is None:
            return x
        x = g.get_rows(x, pool) if pool.type == GGMLType.I32 else g.mul_mat(g.cont(g.transpose(x)), pool)
        return self.classify(x) if self.inputs.classify else x

    def classify(self, x: Tensor) -> Tensor:
        """Make scores of pooled embeddings, [n_labels, n_seqs], with as much of a classifier as the file has."""
        if "cls.weight" in self.w:
            bend = {"tanh": self.g.tanh, "gelu": self.g.gelu}[self.classifier_activation]
            x = bend(self.linear(x, "cls"))
            if "cls.norm.weight" in self.w:
                x = self.normalize(x, "cls.norm", "", kind="layer")
        return self.linear(x, "cls.output") if "cls.output.weight" in self.w else x

    # ---------------------------------------------------------------------------------------------- embeddings and head

    def embed(self) -> Tensor:
        """Return what the first layer takes, [n_embd, n_tokens]: tokens, where they stand, normalized."""
        x = self.look_up()
        if "position_embd.weight" in self.w:
            positions = self.g.get_rows(self.w["position_embd.weight"], self.inputs.positions)
            x = self.named(self.g.add(x, self.named(positions, "pos_embd")), "inpL")
        return self.normalize(x, "token_embd_norm", "inp_norm") if self.embedding_norm else x

    def look_up(self) -> Tensor:
        """Look up the tokens' embeddings and scale them."""
        x = self.g.get_rows(self.w["token_embd.weight"], self.inputs.tokens)
        scale = f32(math.sqrt(self.c.n_embd) if self.root_scale else self.c.embedding_scale)
        return self.named(self.g.scale(x, scale), "inp_scaled") if scale else x

    def head(self, x: Tensor) -> Tensor:
        """Project on the vocabulary."""
        y, cap = self.linear(x, "output"), self.c.final_logit_softcapping
        if self.c.logit_scale:
            y = self.g.scale(y, f32(self.c.logit_scale))
        return self.softcap(y, cap) if cap else y

    # -------------------------------------------------------------------------------------------------------- the layer

    def layer(self, x: Tensor, il: int) -> Tensor:
        """Add attention and the FFN to the residual stream, [n_embd, n_tokens], in turn or side by side."""
        normed = self.attention_input(x, il)
        cur, x, normed = self.wanted(il, self.attention(normed, il), x, normed)
        if self.parallel and self.c.use_parallel_residual:
            return self.named(self.add_both(cur, x, normed, il), "l_out", il)
        h = self.add_residual(cur, x, 0, il)
        cur = self.feed_forward(self.ffn_input(h, normed, il), il)
        return self.named(self.add_residual(cur, h, 1, il), "l_out", il)

    def store_only(self, x: Tensor, il: int) -> None:
        """Compute a layer's keys and values and store them, and nothing else."""
        q, k, v = self.qkv(self.attention_input(x, il), il)
        _, k = self.position(q, k, il)
        self.store(k, v, il)

    def add_both(self, attn: Tensor, x: Tensor, normed: Tensor, il: int) -> Tensor:
        """Add attention's output and the FFN's to the stream that both came from."""
        ffn = self.feed_forward(self.ffn_input(x, normed, il), il)
        first, last = (attn, x) if self.parallel == "ffn + attn" else (x, attn)
        return self.g.add(self.g.add(ffn, first), last)

    def attention_input(self, x: Tensor, il: int) -> Tensor:
        """Return what queries, keys and values are made of."""
        here = self.pre_norm and self.has_norm(f"blk.{il}.attn_norm")
        return self.normalize(x, f"blk.{il}.attn_norm", "attn_norm", il) if here else x

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        """Return what the FFN is made of: the stream, mostly normalized, or what attention was made of."""
        role = f"blk.{il}.{self.ffn_norm}"
        if not self.pre_norm:
            return h
        return self.normalize(h, role, "ffn_norm", il) if self.ffn_norm and self.has_norm(role) else normed

    def add_residual(self, cur: Tensor, x: Tensor, which: int, il: int) -> Tensor:
        """Add a sublayer's output (0: attention's, 1: the FFN's) to the stream it came from."""
        if self.post_norms:
            role, name = f"blk.{il}.{self.post_norms[which]}", ("attn_post_norm", "ffn_post_norm")[which]
            cur = self.normalize(cur, role, name, il, eps=self.post_norm_eps)
        if self.c.residual_scale:
            cur = self.g.scale(cur, f32(self.c.residual_scale))
        y = self.g.add(cur, x)
        return y if which else self.named(y, "ffn_inp", il)


def _among(names: tuple[str, ...], name: str) -> bool:
    """Find a tensor among names that leave out `blk.N.` where they mean all layers."""
    return name in names or (name.startswith("blk.") and name.split(".", 2)[2] in names)
