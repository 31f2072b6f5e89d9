"""The decoder that most language models share, as a class to declare differences on.

`Decoder` is both the declaration of an architecture and one graph of it in the making. Its class attributes say what a
file has (the metadata keys, the tensor table) and which variant of each step is taken; its methods build the graph, in
llama.cpp's order to the last addition. The class as it stands is Llama. An architecture is a subclass in its family's
file: attributes where the difference is data, a method where it is another formula.

This file does not know where weights lie, how the cache keeps its cells or who runs the graph. Shapes are in ggml
order: the first number is the contiguous dimension. Nodes are named as in llama.cpp (`Qcur-3`, `ffn_out-3`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.tensors import TensorSpec
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Graph, Tensor

__all__ = [
    "ALIBI_8", "CLAMP_MIN", "GATING", "IMROPE", "MROPE", "NEOX", "NORM",
    "Attention", "Decoder", "FromPositions", "GraphInputs", "Has", "Moe", "Presence", "Rope",
    "f32", "inv_sqrt", "linear",
]  # fmt: skip

NORM, NEOX = 0, 2  # which values of a head rotate together: neighbours, or those half a head apart
MROPE, IMROPE = 8, 40  # as NEOX, by four positions a token: in sections of a head, or interleaved
PREC_F32 = 10
HINT_HADAMARD = 1
ALIBI_8 = 8.0
CLAMP_MIN = 1e-6
"""Limits of SwiGLU that are no larger mean none."""
MIN_F16 = 6.103515625e-5

Presence = bool | None
"""Whether a file has something: True always, False never, None as it likes."""
Has = Collection[str]
FromPositions = Callable[[npt.NDArray[np.int32]], npt.NDArray[Any]]


def f32(x: float) -> float:
    """Round to single precision, in which llama.cpp computes its constants."""
    return float(np.float32(x))


def inv_sqrt(n: float) -> float:
    """Compute 1/sqrt(n) in single precision."""
    return float(np.float32(1.0) / np.sqrt(np.float32(n)))


# ----------------------------------------------------------------------------------------- what a graph is built from


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation's parameters for a context, the same for all layers (llama.cpp's cparams)."""

    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float

    @classmethod
    def of(cls, c: Config) -> Rope:
        """Derive the parameters as llama_context does, in single precision."""
        one, tenth = np.float32(1.0), np.float32(0.1)
        factor = np.float32(c.rope_scaling_factor)
        freq_scale = one / factor if factor and c.rope_scaling_type != "none" else one
        ext_factor = c.yarn_ext_factor if c.yarn_ext_factor >= 0 else float(c.rope_scaling_type == "yarn")
        attn_factor = np.float32(c.yarn_attn_factor)
        if ext_factor:
            stretch = one / freq_scale
            log = np.float32(math.log(stretch))
            attn_factor = _mscale(stretch, log, one)
            if c.rope_yarn_log_mul:
                attn_factor = _mscale(stretch, log, np.float32(c.yarn_mscale))
                attn_factor /= _mscale(stretch, log, np.float32(c.rope_yarn_log_mul))
            attn_factor *= one / (one + tenth * log)  # ggml multiplies by this itself
        attn_factor *= np.float32(c.rope_attn_factor)
        return cls(
            c.n_ctx_orig_yarn, f32(c.rope_freq_base), float(freq_scale), f32(ext_factor), float(attn_factor),
            f32(c.yarn_beta_fast), f32(c.yarn_beta_slow),
        )  # fmt: skip


def _mscale(stretch: np.float32, log: np.float32, m: np.float32) -> np.float32:
    scale: np.float32 = np.float32(0.1) * m * log + np.float32(1.0)
    return np.float32(1.0) if stretch <= 1 else scale


class Attention(Protocol):
    """What a layer's attention needs of the memory: inputs of this graph and the cache behind them."""

    mask: Tensor  # [n_kv, n_tokens per stream, 1, n_stream]
    k_rot: Tensor | None  # [n, n], with a quantized K cache
    v_rot: Tensor | None

    def store(self, graph: Graph, k: Tensor, v: Tensor, il: int) -> None: ...
    def keys(self, il: int) -> Tensor: ...  # [n_embd_head_k, n_head_kv, n_kv, n_stream]
    def values(self, il: int) -> Tensor: ...  # the same of V; [n_kv, n_head_kv, n_embd_head_v, n_stream] if transposed


class States(Protocol):
    """What recurrent layers need of the memory: the states of the micro-batch's sequences, by name and layer."""

    n_seqs: int  # of equally many tokens each

    def load(self, name: str, il: int) -> Tensor: ...  # [width, n_seqs]
    def save(self, graph: Graph, state: Tensor, name: str, il: int) -> None: ...


@dataclass(slots=True)
class GraphInputs:
    """What a session gives to a graph: the context to build in, the model, and the inputs of a micro-batch."""

    g: Context
    graph: Graph
    config: Config
    weights: Mapping[str, Tensor]
    rope: Rope
    flash_attn: bool
    use_long_factors: bool
    tokens: Tensor  # i32 [n_tokens]
    positions: Tensor  # i32 [n_tokens], or [4 * n_tokens] in four planes (Decoder.n_planes)
    out_ids: Tensor | None  # i32 [n_outputs]; None where no logits are wanted
    attention: Callable[[int], Attention]
    states: States | None = None
    embeddings: bool = False  # what the last norm gives is wanted, not logits
    pool: Tensor | None = None  # f32 [n_tokens, 1] to weigh all rows, or i32 [1] to choose one
    derived: list[tuple[Tensor, FromPositions]] = field(default_factory=list)
    """Further inputs that a graph made, and how their values follow from the tokens' positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """What experts a model has, and how a router's logits become the weights of the chosen (build_moe_ffn).

    An architecture that reads `expert_gating_func` lets the file say so, with `gating` for files that do not; None for
    either leaves it to the file alone (`normalize`: to `expert_weights_norm`).
    """

    required: bool = True  # False: the same name stands for dense models too
    by_tensors: bool = False  # which layers have experts is seen from the file's tensors alone
    gating: str | None = "softmax"  # or "sigmoid", "softmax_weight" (softmax over the chosen), "sqrt_softplus"
    normalize: bool | None = True
    bias: Presence = False  # added for the choice only
    bias_name: str = "exp_probs_b.bias"
    split_ff: bool = False  # without a width of their own, the experts of a token share feed_forward_length
    shared: bool = False  # experts that every token uses
    fused: bool = False  # the file may have gate and up as one matrix
    scale: bool = False  # the file may have scales of the experts' matrices
    expert_bias: bool = False
    select_logits: bool = False  # choose by the logits, whatever the gating
    weight_first: bool = False  # weigh what goes into the experts, not what comes out


GATING = {1: "softmax", 2: "sigmoid", 3: "softmax_weight", 4: "sqrt_softplus"}


# --------------------------------------------------------------------------------------------------------- the decoder


class Decoder:
    """Llama, and what other architectures declare their differences from. See the head of this file."""

    name: ClassVar[str] = ""
    # --- keys
    keys: ClassVar[Mapping[str, Any]] = {}
    """Optional fields of `Config` that this architecture reads, with their defaults."""
    swa_period: ClassVar[int | None] = 0
    """With a window: of each run of that many layers the last one sees everything (or the first: `swa_dense_first`), if
    the file does not say otherwise; None if it has to say it for each layer."""
    swa_dense_first: ClassVar[bool] = False
    swa_rope: ClassVar[str] = "own"
    """How windowed layers rotate: by their "own" base, if the file has one, and unscaled but for YaRN; by that base and
    the file's scale ("scaled"); by that base without any scaling ("plain"); or as all layers do ("same")."""
    split_heads: ClassVar[bool] = False
    """A head's values may be of another width than its keys."""
    grouped: ClassVar[bool] = True
    """Heads of queries may share one of keys and values."""
    headless: ClassVar[bool] = False
    """Layers may have no heads of keys and values, and then nothing in the cache."""
    partial_rope: ClassVar[bool] = False
    """`rope.dimension_count` may be less than a head's width."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Tensors that files may bring and that change no logits: by name, those of layers without `blk.N.`."""
    nextn: ClassVar[bool] = False
    """The last `nextn_predict_layers` blocks, which guess further tokens, may be in the file; they are left out."""
    cacheless: ClassVar[bool] = False
    """Tokens see all others of their call and nothing else; nothing is kept."""
    logits: ClassVar[bool] = True  # False: embeddings only
    # --- tensors and steps
    norm: ClassVar[str] = "rms"  # or "layer"
    norm_weight: ClassVar[bool] = True
    norm_bias: ClassVar[Presence] = False
    embedding_norm: ClassVar[bool] = False
    learned_positions: ClassVar[Presence] = False
    """Embeddings of positions are added to those of tokens."""
    output_norm: ClassVar[str] = "output_norm"  # none: the last layer's output is the result
    pre_norm: ClassVar[bool] = True
    ffn_norm: ClassVar[str] = "ffn_norm"  # none: the FFN takes what attention takes
    parallel: ClassVar[str] = ""
    """Attention and FFN stand side by side: "ffn + attn" or "ffn + x" says which two are added first."""
    post_norms: ClassVar[tuple[str, str] | None] = None
    """Norms of the attention's and the FFN's output, before these are added."""
    post_norm_eps: ClassVar[float] = 0.0  # where it is not that of the other norms
    tie: ClassVar[Presence] = None  # True: the output matrix is always the token embeddings
    stand_ins: ClassVar[Mapping[str, str]] = {"output.weight": "token_embd.weight"}
    """Tensors that a file may lack, and which are used in their place."""
    head_bias: ClassVar[Presence] = False
    rope: ClassVar[int | None] = NORM
    rope_factors: ClassVar[str] = ""
    """Frequencies' factors that a file may bring: "freqs", "long" (and short ones), or "scaling": as its type says."""
    no_rope_step: ClassVar[int] = 0
    """The last of each run of that many layers does not know positions."""
    qkv_fused: ClassVar[Presence] = None
    qkv_bias: ClassVar[Presence] = None
    qkv_scale: ClassVar[bool] = True  # of one fused matrix
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
    ffn_gate: ClassVar[bool] = True
    ffn_fused: ClassVar[bool] = False  # gate and up are one matrix
    ffn_bias: ClassVar[Presence] = False
    ffn_scale: ClassVar[bool] = True
    activation: ClassVar[str] = "silu"  # of the gate, or of up where there is no gate
    moe: ClassVar[Moe | None] = None
    flash_attn: ClassVar[bool] = True  # False: what bounds the scores has no kernel
    prec_f32: ClassVar[bool] = False
    """The last matrices of attention and FFN add up in single precision on all devices."""
    tiny: ClassVar[Mapping[str, Any]] = {}
    """Fields of `Config` that small models for tests need otherwise than usual (testing.py)."""
    tiny_variants: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {}
    """Variants that tests need beyond those that follow from the rest; None for one that does not apply."""
    crop: ClassVar[str] = "early"
    """Where unwanted rows are dropped: "early" in the last layer, "late" before the last norm, "last" after it."""

    # ---------------------------------------------------------------------------------------------- keys and tensors

    @classmethod
    def config(cls, metadata: Mapping[str, Any], *, path: str = "") -> Config:
        """Read and check the hyper-parameters; one GGUFError lists all faults."""
        eps = {"norm_rms_eps": REQUIRED} if cls.norm == "rms" else {"norm_eps": REQUIRED}
        pattern = (cls.swa_period, cls.swa_dense_first)
        config = Config.from_gguf(metadata, {**eps, **cls.keys}, swa_pattern=pattern, check=cls.check, path=path)
        return cls.adjust(config)

    @classmethod
    def check(cls, c: Config) -> Iterator[str]:
        """Yield what is wrong with the hyper-parameters beyond each key's own range."""
        if c.n_embd_head_k != c.n_embd_head_v and not cls.split_heads:
            yield f"attention.key_length {c.n_embd_head_k} and attention.value_length {c.n_embd_head_v} must be equal"
        if not cls.grouped and c.n_head_kv != c.n_head:
            yield f"attention.head_count_kv: expected {c.n_head[0]} (head_count), found {c.n_head_kv[0]}"
        for name, heads in (("head_count", c.n_head), ("head_count_kv", c.n_head_kv)):
            if not cls.headless and not all(heads):
                yield f"{c.architecture}.attention.{name}: expected at least 1, found 0"
        if not cls.partial_rope and c.n_rot != c.n_embd_head_k:
            yield f"rope.dimension_count {c.n_rot} and attention.key_length {c.n_embd_head_k} must be equal"
        if cls.rope_mode(c) in (MROPE, IMROPE) and not 0 < sum(c.rope_sections) <= c.n_embd_head_k:
            yield f"rope.dimension_sections: expected a sum of 1 to {c.n_embd_head_k}, found {list(c.rope_sections)}"
        if cls.moe and cls.moe.required and not c.n_expert:
            yield "expert_count: the key is missing or 0"
        if cls.moe and c.n_expert and not cls.moe.gating and c.expert_gating_func not in GATING:
            yield "expert_gating_func: the key is missing or 0"

    @classmethod
    def adjust(cls, c: Config) -> Config:
        """Change what this architecture takes in another way than the keys say."""
        return replace(c, causal_attn=False) if cls.cacheless else c

    @classmethod
    def tensors(cls, c: Config, has: Has = ()) -> Iterator[TensorSpec]:
        """List every tensor that a file of this architecture has or may have.

        `has` are the names a file has: they decide between forms, such as one fused or three separate q, k, v matrices.
        """
        yield TensorSpec("token_embd.weight", (c.n_embd, c.n_vocab), indexed=True)
        if cls.learned_positions is not False:
            optional = cls.learned_positions is None
            yield TensorSpec("position_embd.weight", (c.n_embd, c.n_ctx_train), optional, indexed=True)
        if cls.embedding_norm:
            yield from cls.norm_tensors("token_embd_norm", c.n_embd)
        if cls.output_norm:
            yield from cls.norm_tensors(cls.output_norm, c.n_embd)
        if cls.logits and cls.tie is not True:
            yield TensorSpec("output.weight", (c.n_embd, c.n_vocab), optional=cls.tie is None)
        if cls.head_bias is not False:
            yield TensorSpec("output.bias", (c.n_vocab,), optional=cls.head_bias is None)
        for name in cls.factor_names(c):
            n_rot = max(c.n_rot, c.n_rot_swa if any(c.is_swa) else 0)
            yield TensorSpec(f"{name}.weight", (n_rot // 2,), optional=True)
        nextn = range(c.n_layer, c.n_layer + c.n_layer_nextn) if cls.nextn else ()
        blocks = tuple(f"blk.{il}." for il in nextn)
        for name in has:
            if name in cls.ignored or _in_layer(name) in cls.ignored or name.startswith(blocks):
                yield TensorSpec(name, (), unused=True)
        for il in range(c.n_layer):
            names_here = {name.removeprefix(f"blk.{il}.") for name in has if name.startswith(f"blk.{il}.")}
            for spec in cls.layer_tensors(c, il, names_here):
                yield replace(spec, name=f"blk.{il}.{spec.name}")

    @classmethod
    def factor_names(cls, c: Config) -> tuple[str, ...]:
        """Name the tensors of frequencies' factors that a file may have."""
        kind = cls.rope_factors
        if kind == "scaling":
            kind = "long" if c.rope_scaling_type == "longrope" else "freqs"
        return {"": (), "freqs": ("rope_freqs",), "long": ("rope_factors_long", "rope_factors_short")}[kind]

    @classmethod
    def layer_tensors(cls, c: Config, il: int, has: Has) -> Iterator[TensorSpec]:
        """List a layer's tensors, by their names behind `blk.N.`."""
        if cls.pre_norm:
            yield from cls.norm_tensors("attn_norm", c.n_embd)
        yield from cls.attention_tensors(c, il, has)
        if cls.post_norms:
            yield from cls.norm_tensors(cls.post_norms[0], c.n_embd)
        if cls.pre_norm and cls.ffn_norm:
            yield from cls.norm_tensors(cls.ffn_norm, c.n_embd)
        yield from cls.ffn_tensors(c, il, has)
        if cls.post_norms:
            yield from cls.norm_tensors(cls.post_norms[1], c.n_embd)

    @classmethod
    def attention_tensors(cls, c: Config, il: int, has: Has) -> Iterator[TensorSpec]:
        """List the tensors of a layer's attention."""
        n_head, n_head_kv = c.n_head[il], c.n_head_kv[il]
        widths = {"q": c.n_embd_head_k * n_head, "k": c.n_embd_head_k * n_head_kv, "v": c.n_embd_head_v * n_head_kv}
        if cls.qkv_fused or (cls.qkv_fused is None and "attn_qkv.weight" in has):
            yield from linear("attn_qkv", c.n_embd, sum(widths.values()), cls.qkv_bias, scale=cls.qkv_scale)
            if cls.qkv_fused is None and cls.qkv_bias is None and "attn_qkv.bias" not in has:
                for role, width in widths.items():  # converters have left separate biases beside a fused matrix
                    yield TensorSpec(f"attn_{role}.bias", (width,), optional=True)
        else:
            for role, width in widths.items():
                yield from linear(f"attn_{role}", c.n_embd, width, cls.qkv_bias, scale=cls.qkv_scale)
        yield from linear("attn_output", c.n_embd_head_v * n_head, c.n_embd, cls.output_bias)
        if cls.qk_norm:
            optional = cls.qk_norm_weight is None
            for role, n in (("q", n_head), ("k", n_head_kv)):
                shape = {"full": (widths[role],), "heads": (c.n_embd_head_k, n)}.get(cls.qk_norm, (c.n_embd_head_k,))
                yield TensorSpec(f"attn_{role}_norm.weight", shape, optional, f32=True)
        if cls.sinks is not False:
            yield TensorSpec("attn_sinks.weight", (n_head,), optional=cls.sinks is None)
        if cls.attn_gate:
            per_element, per_head = (c.n_embd, c.n_embd_head_v * n_head), (c.n_embd, n_head)
            first, other = (per_head, per_element) if cls.gate_per == "head" else (per_element, per_head)
            yield TensorSpec("attn_gate.weight", first, or_shape=other if cls.gate_per == "either" else ())

    @classmethod
    def ffn_tensors(cls, c: Config, il: int, has: Has) -> Iterator[TensorSpec]:
        """List the tensors of a layer's FFN, dense or with experts."""
        if cls.is_moe(c, il, has):
            yield from cls.moe_tensors(c, il, has)
        else:
            yield from cls.dense_tensors(c, c.n_ff[il])

    @classmethod
    def dense_tensors(cls, c: Config, n_ff: int, suffix: str = "") -> Iterator[TensorSpec]:
        """List the tensors of one gated FFN; shared experts are one with the suffix `_shexp`."""
        bias = cls.ffn_bias if not suffix else False
        if cls.ffn_gate and not cls.ffn_fused:
            yield from linear(f"ffn_gate{suffix}", c.n_embd, n_ff, bias, scale=cls.ffn_scale)
        yield from linear(f"ffn_up{suffix}", c.n_embd, n_ff * 2 if cls.ffn_fused else n_ff, bias, scale=cls.ffn_scale)
        yield from linear(f"ffn_down{suffix}", n_ff, c.n_embd, bias, scale=cls.ffn_scale)

    @classmethod
    def moe_tensors(cls, c: Config, il: int, has: Has) -> Iterator[TensorSpec]:
        """List the tensors of a layer's router and experts."""
        assert cls.moe is not None
        moe, n_ff, n_expert = cls.moe, cls.n_ff_exp(c, il), c.n_expert
        yield TensorSpec("ffn_gate_inp.weight", (c.n_embd, n_expert))
        if moe.expert_bias:
            yield TensorSpec("ffn_gate_inp.bias", (n_expert,))
        if moe.fused and "ffn_gate_up_exps.weight" in has:
            matrices = [("gate_up", c.n_embd, n_ff * 2), ("down", n_ff, c.n_embd)]
        else:
            matrices = [("gate", c.n_embd, n_ff), ("up", c.n_embd, n_ff), ("down", n_ff, c.n_embd)]
        for role, n_in, n_out in matrices:
            yield TensorSpec(f"ffn_{role}_exps.weight", (n_in, n_out, n_expert), optional=cls.expert_optional(role))
            if moe.expert_bias:
                yield TensorSpec(f"ffn_{role}_exps.bias", (n_out, n_expert), f32=True)
            if moe.scale and role != "gate_up":
                yield TensorSpec(f"ffn_{role}_exps.scale", (n_expert,), optional=True)
        if moe.bias is not False:
            yield TensorSpec(moe.bias_name, (n_expert,), optional=moe.bias is None)
        if moe.shared and (width := cls.n_ff_shexp(c, il)):
            yield from cls.dense_tensors(c, width, "_shexp")

    @classmethod
    def nextn_tensors(cls, c: Config) -> Iterator[TensorSpec]:
        """List what a block that guesses a further token has at least, by the names behind `blk.N.`."""
        yield from cls.layer_tensors(c, c.n_layer - 1, ())
        yield TensorSpec("nextn.eh_proj.weight", (2 * c.n_embd, c.n_embd))
        yield from (TensorSpec(f"nextn.{name}.weight", (c.n_embd,)) for name in ("enorm", "hnorm"))

    @classmethod
    def norm_tensors(cls, role: str, width: int) -> Iterator[TensorSpec]:
        """List the tensors of a norm: weight and bias, as far as this architecture's norms have them."""
        if cls.norm_weight:
            yield TensorSpec(f"{role}.weight", (width,))
        if cls.norm_bias is not False:
            yield TensorSpec(f"{role}.bias", (width,), optional=cls.norm_bias is None)

    @classmethod
    def is_moe(cls, c: Config, il: int, has: Has = ()) -> bool:
        """Say whether a layer has experts, by the keys or by the names it has in the file."""
        if cls.moe and cls.moe.by_tensors:
            return any("_exps." in name or "ffn_gate_inp." in name for name in has) if has else il > 0
        step = c.interleave_moe_layer_step or 1
        return bool(cls.moe and c.n_expert and il >= c.n_layer_dense_lead and (il + 1) % step == 0)

    @classmethod
    def n_ff_exp(cls, c: Config, il: int) -> int:
        """Return an expert's width."""
        own = c.n_ff_exp[il] if c.n_ff_exp else 0
        return own or c.n_ff[il] // (c.n_expert_used if cls.moe and cls.moe.split_ff else 1)

    @classmethod
    def n_ff_shexp(cls, c: Config, il: int) -> int:
        """Return the width of the shared experts together; 0 for none."""
        return c.n_ff_shexp or cls.n_ff_exp(c, il) * c.n_expert_shared

    @classmethod
    def expert_optional(cls, role: str) -> bool:
        """Say whether a file may lack one of the experts' matrices: gate, up or down."""
        return False

    @classmethod
    def states(cls, c: Config) -> Mapping[int, Mapping[str, int]]:
        """Return the widths of the states that recurrent layers keep for each sequence, by layer and name."""
        return {}

    # -------------------------------------------------------------------------------------------------- small steps

    def __init__(self, inputs: GraphInputs) -> None:
        self.inputs = inputs
        self.g, self.graph, self.c, self.w = inputs.g, inputs.graph, inputs.config, inputs.weights
        self.q_scale: Tensor | None = None

    def named(self, x: Tensor, name: str, il: int = -1) -> Tensor:
        """Give a node llama.cpp's name."""
        x.name = f"{name}-{il}" if il >= 0 else name
        return x

    def input(self, name: str, type: GGMLType, *ne: int, values: FromPositions) -> Tensor:
        """Make a further input of the graph, whose values follow from the tokens' positions."""
        x = self.g.input(type, *ne, name=name)
        self.inputs.derived.append((x, values))
        return x

    def linear(self, x: Tensor, role: str, *, bias_first: bool = False) -> Tensor:
        """Multiply by a weight; apply its scale and bias where the file has them."""
        y = self.g.mul_mat(self.w[f"{role}.weight"], x)
        if self.prec_f32 and role.endswith(("attn_output", "ffn_down")):
            self.g.prec_set_acc(y, PREC_F32)
        scale, bias = self.w.get(f"{role}.scale"), self.w.get(f"{role}.bias")
        if scale is not None and not bias_first:
            y = self.g.mul(y, scale)
        if bias is not None:
            y = self.g.add(y, bias)
        if scale is not None and bias_first:
            y = self.g.mul(y, scale)
        return y

    def normalize(self, x: Tensor, role: str, name: str, il: int = -1, *, kind: str = "", eps: float = 0.0) -> Tensor:
        """Normalize the rows; multiply by a weight and add a bias where the file has them."""
        if (kind or self.norm) == "rms":
            y = self.g.rms_norm(x, f32(eps or self.c.norm_rms_eps))
        else:
            y = self.g.norm(x, f32(eps or self.c.norm_eps))
        weight, bias = self.w.get(f"{role}.weight"), self.w.get(f"{role}.bias")
        if weight is not None:
            y = self.g.mul(y, weight)
        if bias is not None:
            y = self.g.add(y, bias)
        return self.named(y, name, il)

    def wanted(self, il: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """In the last layer, keep only the rows whose logits are wanted, [n_embd, n_outputs]."""
        if il < self.c.n_layer - 1 or self.crop != "early" or self.inputs.out_ids is None:
            return tensors
        return tuple(self.g.get_rows(t, self.inputs.out_ids) for t in tensors)

    # ------------------------------------------------------------------------------------------------------ the graph

    def build(self) -> Tensor | None:
        """Build the graph; returns its logits, [n_vocab, n_outputs], if any are wanted, or embeddings.

        Where none are, the last layer stops as soon as its keys and values are stored.
        """
        x = self.embed()
        for il in range(self.c.n_layer - 1):
            x = self.layer(x, il)
        il = self.c.n_layer - 1
        if self.inputs.out_ids is None:
            self.store_only(x, il)
            return None
        x = self.layer(x, il)
        if self.crop == "late":
            x = self.g.get_rows(x, self.inputs.out_ids)
        if self.output_norm:
            x = self.normalize(x, self.output_norm, "result_norm")
        if self.crop == "last":
            x = self.g.get_rows(x, self.inputs.out_ids)
        if self.inputs.embeddings:
            return self.graph.expand(self.named(self.pool(x), "result_embd_pooled"))
        return self.graph.expand(self.named(self.head(x), "result_output"))

    def pool(self, x: Tensor) -> Tensor:
        """Make one embedding of all tokens', where that is wanted: their weighted sum, or one of them."""
        g, pool = self.g, self.inputs.pool
        if pool is None:
            return x
        return g.get_rows(x, pool) if pool.type == GGMLType.I32 else g.mul_mat(g.cont(g.transpose(x)), pool)

    def embed(self) -> Tensor:
        """Return what the first layer takes, [n_embd, n_tokens]: tokens, where they stand, normalized."""
        x = self.look_up()
        if self.learned_positions is not False and "position_embd.weight" in self.w:
            positions = self.g.get_rows(self.w["position_embd.weight"], self.inputs.positions)
            x = self.named(self.g.add(x, self.named(positions, "pos_embd")), "inpL")
        return self.normalize(x, "token_embd_norm", "inp_norm") if self.embedding_norm else x

    def look_up(self) -> Tensor:
        """Look up the tokens' embeddings and scale them."""
        x = self.g.get_rows(self.w["token_embd.weight"], self.inputs.tokens)
        scale = self.embedding_scale(self.c)
        return self.named(self.g.scale(x, scale), "inp_scaled") if scale else x

    @classmethod
    def embedding_scale(cls, c: Config) -> float:
        """Return what embeddings are multiplied by; 0 for nothing."""
        return f32(c.embedding_scale)

    def head(self, x: Tensor) -> Tensor:
        """Project on the vocabulary."""
        y = self.g.mul_mat(self.w["output.weight"], x)
        if self.head_bias is not False and "output.bias" in self.w:
            y = self.g.add(y, self.w["output.bias"])
        scale = self.logit_scale(self.c)
        if scale:
            y = self.g.scale(y, scale)
        return self.softcap(y, self.c.final_logit_softcapping) if self.c.final_logit_softcapping else y

    @classmethod
    def logit_scale(cls, c: Config) -> float:
        """Return what logits are multiplied by; 0 for nothing."""
        return f32(c.logit_scale)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Bound values smoothly to ±cap."""
        x = self.g.scale(x, float(np.float32(1.0) / np.float32(cap)))
        return self.g.scale(self.g.tanh(x), f32(cap))

    def layer(self, x: Tensor, il: int) -> Tensor:
        """Add attention and the FFN to the residual stream, [n_embd, n_tokens], in turn or side by side."""
        normed = self.attention_input(x, il)
        cur, x, normed = self.wanted(il, self.attention(normed, il), x, normed)
        if self.is_parallel(self.c):
            return self.named(self.add_both(cur, x, normed, il), "l_out", il)
        h = self.add_residual(cur, x, 0, il)
        cur = self.feed_forward(self.ffn_input(h, normed, il), il)
        return self.named(self.add_residual(cur, h, 1, il), "l_out", il)

    @classmethod
    def is_parallel(cls, c: Config) -> bool:
        """Say whether attention and FFN stand side by side."""
        return bool(cls.parallel)

    def add_both(self, attn: Tensor, x: Tensor, normed: Tensor, il: int) -> Tensor:
        """Add attention's output and the FFN's to the stream that both came from."""
        ffn = self.feed_forward(self.ffn_input(x, normed, il), il)
        first, last = (attn, x) if self.parallel == "ffn + attn" else (x, attn)
        return self.g.add(self.g.add(ffn, first), last)

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        """Return what the FFN is made of: the stream, mostly normalized, or what attention was made of."""
        if not self.pre_norm:
            return h
        return self.normalize(h, f"blk.{il}.{self.ffn_norm}", "ffn_norm", il) if self.ffn_norm else normed

    def attention_input(self, x: Tensor, il: int) -> Tensor:
        """Return what queries, keys and values are made of."""
        return self.normalize(x, f"blk.{il}.attn_norm", "attn_norm", il) if self.pre_norm else x

    def post_norm(self, which: int, il: int) -> str:
        """Name the norm of a sublayer's output."""
        assert self.post_norms is not None
        return self.post_norms[which]

    def add_residual(self, cur: Tensor, x: Tensor, which: int, il: int) -> Tensor:
        """Add a sublayer's output (0: attention's, 1: the FFN's) to the stream it came from."""
        if self.post_norms:
            role, name = self.post_norm(which, il), ("attn_post_norm", "ffn_post_norm")[which]
            cur = self.normalize(cur, f"blk.{il}.{role}", name, il, eps=self.post_norm_eps)
        if self.c.residual_scale:
            cur = self.g.scale(cur, f32(self.c.residual_scale))
        y = self.g.add(cur, x)
        return y if which else self.named(y, "ffn_inp", il)

    # ------------------------------------------------------------------------------------------------------ attention

    def attention(self, x: Tensor, il: int) -> Tensor:
        """Project, rotate, store in the cache, attend, project back."""
        q, k, v = self.qkv(x, il)
        q, k = self.position(q, k, il)
        cur = self.attend(q, k, v, il)
        if self.attn_gate:
            cur = self.weaken(cur, x, il)
        return self.named(self.linear(cur, f"blk.{il}.attn_output"), "attn_out", il)

    def weaken(self, cur: Tensor, x: Tensor, il: int) -> Tensor:
        """Multiply attention's output by a gate made of attention's input, one value for each element or head."""
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

    def store_only(self, x: Tensor, il: int) -> None:
        """Compute a layer's keys and values and store them, and nothing else."""
        q, k, v = self.qkv(self.attention_input(x, il), il)
        _, k = self.position(q, k, il)
        self.store(k, v, il)

    def qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values, each [n_embd_head, n_head, n_tokens]."""
        g, c, blk = self.g, self.c, f"blk.{il}"
        n_tokens = x.ne[1]
        heads = (
            (c.n_embd_head_k, c.n_head[il]),
            (c.n_embd_head_k, c.n_head_kv[il]),
            (c.n_embd_head_v, c.n_head_kv[il]),
        )
        full = self.qk_norm == "full"
        if f"{blk}.attn_qkv.weight" in self.w:
            y = self.clamp_kqv(self.fused_qkv(x, blk), full)
            parts, offset = [], 0
            for d, n in heads:
                if full:
                    parts.append(g.cont(g.view_2d(y, d * n, n_tokens, y.nb[1], offset)))
                else:
                    parts.append(g.view_3d(y, d, n, n_tokens, d * 4, y.nb[1], offset))
                offset += d * n * 4
        else:
            parts = [self.clamp_kqv(self.linear(x, f"{blk}.attn_{role}"), full) for role in "qkv"]
            if not full:
                parts = [g.reshape_3d(p, d, n, n_tokens) for p, (d, n) in zip(parts, heads, strict=True)]
        q, k, v = parts
        if full:
            q, k = self.normalize_qk(q, k, il)
            q, k, v = (g.reshape_3d(p, d, n, n_tokens) for p, (d, n) in zip((q, k, v), heads, strict=True))
        return q, k, v

    def fused_qkv(self, x: Tensor, blk: str) -> Tensor:
        """Multiply by the fused matrix and add its bias, or the three that a converter left separate."""
        y = self.linear(x, f"{blk}.attn_qkv")
        biases = [self.w[name] for role in "qkv" if (name := f"{blk}.attn_{role}.bias") in self.w]
        if f"{blk}.attn_qkv.bias" not in self.w and len(biases) == 3:
            y = self.g.add(y, self.g.concat(self.g.concat(biases[0], biases[1], 0), biases[2], 0))
        return y

    def clamp_kqv(self, x: Tensor, full: bool) -> Tensor:
        """Clamp projections where the file asks for it."""
        c = f32(self.c.clamp_kqv)
        return self.g.clamp(x, -c, c) if c > 0 and not full else x

    def position(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """Normalize queries and keys where the architecture does, and rotate them by their positions."""
        if self.qk_norm in ("head", "heads"):
            q, k = self.normalize_qk(q, k, il)
        if self.rotates(self.c, il):
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

    def tempered(self, q: Tensor, il: int) -> Tensor:
        """Scale the queries by their positions, where the architecture does."""
        if not self.temperature(self.c, il):
            return q
        if self.q_scale is None:
            scale, length, offset = (np.float32(x) for x in self.temperature(self.c, il))

            def values(positions: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
                steps = np.floor((positions.astype(np.float32) + offset) / length).astype(np.float64)
                scales: npt.NDArray[np.float32] = (np.log(steps + 1.0) * float(scale) + 1.0).astype(np.float32)
                return scales.reshape(-1, 1, 1)

            self.q_scale = self.input("inp_attn_scale", GGMLType.F32, 1, 1, q.ne[2], values=values)
        return self.g.mul(q, self.q_scale)

    @classmethod
    def temperature(cls, c: Config, il: int) -> tuple[float, float, float] | tuple[()]:
        """Return s, length and offset of a layer's scaling by log(floor((position + offset) / length) + 1) s + 1."""
        return ()

    @classmethod
    def rotates(cls, c: Config, il: int) -> bool:
        """Say whether a layer's queries and keys know their positions."""
        return cls.rope is not None and not (cls.no_rope_step and (il + 1) % cls.no_rope_step == 0)

    @classmethod
    def rope_mode(cls, c: Config) -> int | None:
        """Return the kind of rotation; sections in the file of a NORM or NEOX architecture make it MROPE."""
        return MROPE if cls.rope in (NORM, NEOX) and min(c.rope_sections[:2], default=0) > 0 else cls.rope

    @classmethod
    def n_planes(cls, c: Config) -> int:
        """Return how many positions a token has; of four, text uses the first three alike and leaves the last 0."""
        return 4 if cls.rope_mode(c) in (MROPE, IMROPE) else 1

    def rotate(self, x: Tensor, il: int) -> Tensor:
        """Rotate heads by their positions (ggml_rope_ext, ggml_rope_multi)."""
        mode, r = self.rope_mode(self.c), self.rope_of(il)
        assert mode is not None
        scaling = r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow
        at, factors, n = self.inputs.positions, self.factors(il), self.n_rot(il)
        if mode in (MROPE, IMROPE):
            return self.g.rope_multi(x, at, factors, n, self.c.rope_sections, mode, *scaling)
        return self.g.rope_ext(x, at, factors, n, mode, *scaling)

    def n_rot(self, il: int) -> int:
        """Return how many values of a head rotate."""
        return self.c.n_rot_swa or self.c.n_rot if self.c.is_swa[il] else self.c.n_rot

    def rope_of(self, il: int) -> Rope:
        """Return a layer's rotation: windowed layers may have a base and a scale of their own."""
        r, c = self.inputs.rope, self.c
        if not c.is_swa[il] or self.swa_rope == "same":
            return r
        base = f32(c.rope_freq_base_swa) if c.rope_freq_base_swa else r.freq_base
        if self.swa_rope == "plain":
            return replace(r, freq_base=base, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
        factor = np.float32(c.rope_scaling_factor)  # whatever the type of scaling
        scaled = factor and self.swa_rope == "scaled"
        return replace(r, freq_base=base, freq_scale=float(np.float32(1) / factor) if scaled else 1.0)

    def factors(self, il: int) -> Tensor | None:
        """Return the per-frequency divisors the file brings, if any."""
        if "rope_freqs.weight" in self.w:
            return self.w["rope_freqs.weight"]
        return self.w.get(f"rope_factors_{'long' if self.inputs.use_long_factors else 'short'}.weight")

    @classmethod
    def attention_scale(cls, c: Config) -> float:
        """Return what scores (or queries) are multiplied by."""
        return f32(c.attention_scale) or inv_sqrt(c.n_embd_head_k)

    @classmethod
    def max_alibi_bias(cls, c: Config) -> float:
        """Return the largest slope of ALiBi; 0 for none."""
        return f32(c.max_alibi_bias)

    def store(self, k: Tensor, v: Tensor, il: int, q: Tensor | None = None) -> Tensor | None:
        """Store keys and values in the cache; returns the queries, rotated as the cache wants them."""
        kv = self.inputs.attention(il)
        if kv.k_rot is not None:
            q, k = self.hadamard(q, kv.k_rot) if q is not None else None, self.hadamard(k, kv.k_rot)
        if kv.v_rot is not None:
            v = self.hadamard(v, kv.v_rot)
        for name, t in (("Qcur", q), ("Vcur", v), ("Kcur", k)):
            if t is not None:
                self.graph.expand(self.named(t, name, il))
        kv.store(self.graph, k, v, il)
        return q

    def attend(self, q: Tensor, k: Tensor, v: Tensor, il: int) -> Tensor:
        """Store K and V and attend over the cache; returns [n_embd_head_v * n_head, n_tokens]."""
        scale = self.attention_scale(self.c)
        if self.scale_query:
            q, scale = self.g.scale(q, scale), 1.0
        stored = self.store(k, v, il, q)
        assert stored is not None
        q, g, kv = stored, self.g, self.inputs.attention(il)
        keys, values = kv.keys(il), kv.values(il)
        n_stream = keys.ne[3]
        d, n_head, n_tokens = q.ne[0], q.ne[1], q.ne[2] // n_stream
        q = g.view_4d(q, d, n_head, n_tokens, n_stream, q.nb[1], q.nb[2], q.nb[2] * n_tokens, 0)
        q, keys, values = (g.permute(t, 0, 2, 1, 3) for t in (q, keys, values))
        max_bias = self.max_alibi_bias(self.c)
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
        self.graph.expand(self.named(cur, "kqv_out", il))
        return self.hadamard(cur, kv.v_rot) if kv.v_rot is not None else cur

    def bounded(self, kq: Tensor) -> Tensor:
        """Bound the scores where the architecture does; flash attention does it by itself."""
        return self.softcap(kq, self.c.attn_logit_softcapping) if self.c.attn_logit_softcapping else kq

    def hadamard(self, x: Tensor, rot: Tensor) -> Tensor:
        """Rotate each run of n values, which spreads outliers before quantization (llama.cpp, quantized caches)."""
        g, n = self.g, rot.ne[0]
        rows = x.n_elements // n
        y = g.mul_mat(rot, g.reshape_2d(x, n, rows) if x.is_contiguous else g.cont_2d(x, n, rows))
        g.mul_mat_set_hint(y, HINT_HADAMARD)
        return g.reshape_4d(y, *x.ne)

    # ------------------------------------------------------------------------------------------------------------ FFN

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        """Compute a layer's FFN, [n_embd, n_tokens]: dense, or experts and those that all tokens share."""
        if f"blk.{il}.ffn_gate_inp.weight" not in self.w:
            return self.named(self.ffn(x, f"blk.{il}", il), "ffn_out", il)
        out = self.experts(x, il)
        if f"blk.{il}.ffn_up_shexp.weight" in self.w:
            out = self.g.add(out, self.shared_expert(x, il))
        return self.named(out, "ffn_out", il)

    def shared_expert(self, x: Tensor, il: int) -> Tensor:
        """Compute the experts that all tokens share."""
        return self.named(self.ffn(x, f"blk.{il}", il, "_shexp"), "ffn_shexp", il)

    def ffn(self, x: Tensor, blk: str, il: int, suffix: str = "") -> Tensor:
        """Compute one feed-forward network, up first as llama.cpp does."""
        up = self.named(self.linear(x, f"{blk}.ffn_up{suffix}", bias_first=True), f"ffn_up{suffix}", il)
        if self.ffn_fused:
            cur = self.activate_fused(up)
        elif f"{blk}.ffn_gate{suffix}.weight" in self.w:
            gate = self.linear(x, f"{blk}.ffn_gate{suffix}", bias_first=True)
            cur = self.activate(self.named(gate, f"ffn_gate{suffix}", il), up, il)
        else:
            cur = self.activate(up, None, il)
        return self.linear(self.before_down(cur, il), f"{blk}.ffn_down{suffix}", bias_first=True)

    def activate(self, gate: Tensor, up: Tensor | None, il: int) -> Tensor:
        """Apply the activation to the gate and multiply by up, or apply it alone."""
        g = self.g
        if up is not None:
            return {"silu": g.swiglu_split, "gelu": g.geglu_split, "relu": g.reglu_split}[self.activation](gate, up)
        if self.activation == "relu2":
            return g.sqr(g.relu(gate))
        return {"silu": g.silu, "gelu": g.gelu, "relu": g.relu}[self.activation](gate)

    def activate_fused(self, both: Tensor) -> Tensor:
        """Apply the activation to the first half and multiply by the second."""
        g = self.g
        return {"silu": g.swiglu, "gelu": g.geglu, "relu": g.reglu}[self.activation](both)

    def before_down(self, x: Tensor, il: int) -> Tensor:
        """Do what stands between the activation and the last matrix: nothing."""
        return x

    def router_logits(self, x: Tensor, il: int) -> Tensor:
        """Score the experts for each token, [n_expert, n_tokens]."""
        return self.named(self.linear(x, f"blk.{il}.ffn_gate_inp"), "ffn_moe_logits", il)

    def gating(self) -> tuple[str, bool]:
        """Return how logits become weights, and whether these are made to sum to one."""
        assert self.moe is not None
        gating = GATING.get(self.c.expert_gating_func, self.moe.gating)
        assert gating is not None
        return gating, self.c.expert_weights_norm if self.moe.normalize is None else self.moe.normalize

    def experts(self, x: Tensor, il: int, logits: Tensor | None = None) -> Tensor:
        """Route each token to its best experts and add up their weighted outputs, [n_embd, n_tokens]."""
        assert self.moe is not None
        logits = self.router_logits(x, il) if logits is None else logits
        probs = self.named(self.probabilities(logits, self.gating()[0]), "ffn_moe_probs", il)
        ids = self.named(self.choose(logits if self.moe.select_logits else probs, il), "ffn_moe_topk", il)
        return self.mix(x, ids, self.weigh(probs, ids), il)

    def weigh(self, probs: Tensor, ids: Tensor) -> Tensor:
        """Turn the probabilities of the chosen experts ([n_used, n_tokens]) into weights, [1, n_used, n_tokens]."""
        g, (n_used, n_tokens, *_) = self.g, ids.ne
        gating, normalize = self.gating()
        weights = g.get_rows(g.reshape_3d(probs, 1, *probs.ne[:2]), ids)
        if gating == "softmax_weight":
            weights = g.reshape_3d(g.soft_max(g.reshape_2d(weights, n_used, n_tokens)), 1, n_used, n_tokens)
        if normalize:
            weights = g.reshape_2d(weights, n_used, n_tokens)
            total = g.clamp(g.sum_rows(weights), MIN_F16, math.inf)
            weights = g.reshape_3d(g.div(weights, total), 1, n_used, n_tokens)
        if self.c.expert_weights_scale not in (0.0, 1.0):
            weights = g.scale(weights, f32(self.c.expert_weights_scale))
        return self.graph.expand(weights)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, il: int, suffix: str = "_exps") -> Tensor:
        """Compute the chosen experts and add up their outputs by their weights, [n_embd, n_tokens]."""
        assert self.moe is not None
        g, (n_embd, n_tokens, *_), n_used, blk = self.g, x.ne, ids.ne[0], f"blk.{il}"
        cur = g.reshape_3d(x, n_embd, 1, n_tokens)
        if self.moe.weight_first:
            cur = g.mul(g.repeat_4d(cur, n_embd, n_used, n_tokens, 1), weights)
        gate, up = self.gate_and_up(cur, ids, blk, suffix)  # [n_ff, n_used, n_tokens]
        cur = self.expert_linear(self.activate_experts(gate, up, il), f"{blk}.ffn_down{suffix}", ids)
        if not self.moe.weight_first:
            cur = g.mul(cur, weights)  # [n_embd, n_used, n_tokens]
        return self.named(self.add_up(cur, n_embd, n_tokens, n_used), "ffn_moe_out", il)

    def probabilities(self, logits: Tensor, gating: str) -> Tensor:
        """Turn a router's logits into probabilities, as far as that is done before the choice."""
        if gating == "softmax":
            return self.g.soft_max(logits)
        if gating == "sigmoid":
            return self.g.sigmoid(logits)
        return self.g.sqrt(self.g.softplus(logits)) if gating == "sqrt_softplus" else logits

    def choose(self, scores: Tensor, il: int) -> Tensor:
        """Choose the best experts of each token, of its best groups where there are groups: i32 [n_used, n_tokens].

        Scores that are not numbers come out in some order, but the numbers of experts stay sound.
        """
        g, c = self.g, self.c
        bias = self.w.get(f"blk.{il}.{self.moe.bias_name}") if self.moe else None
        if bias is not None:
            scores = g.add(scores, bias)
        if c.n_expert_groups > 1:
            scores = self.best_groups(scores)
        return g.argsort_top_k(scores, c.n_expert_used)

    def best_groups(self, scores: Tensor) -> Tensor:
        """Leave only the experts of the best groups in the running; a group counts as its two best together."""
        g, c, n_tokens = self.g, self.c, scores.ne[1]
        n_group = c.n_expert_groups
        groups = g.reshape_3d(scores, c.n_expert // n_group, n_group, n_tokens)
        top = g.argsort_top_k(groups, 2)  # [2, n_group, n_tokens]
        top = g.get_rows(g.reshape_4d(groups, 1, *groups.ne[:3]), top)  # [1, 2, n_group, n_tokens]
        total = g.sum_rows(g.reshape_3d(top, *top.ne[1:]))  # [1, n_group, n_tokens]
        best = g.argsort_top_k(g.reshape_2d(total, n_group, n_tokens), c.n_group_used)
        kept = g.set_rows(g.fill(groups, -math.inf), g.get_rows(groups, best), best)
        return g.reshape_2d(kept, c.n_expert, n_tokens)

    def gate_and_up(self, x: Tensor, ids: Tensor, blk: str, suffix: str) -> tuple[Tensor | None, Tensor]:
        """Multiply by the chosen experts' first matrices, which may be one."""
        g = self.g
        if f"{blk}.ffn_gate_up{suffix}.weight" in self.w:
            both = self.expert_linear(x, f"{blk}.ffn_gate_up{suffix}", ids)
            n_ff, (_, n_used, n_tokens, _) = both.ne[0] // 2, both.ne
            gate, up = (
                g.view_3d(both, n_ff, n_used, n_tokens, both.nb[1], both.nb[2], offset)
                for offset in (0, n_ff * both.nb[0])
            )
            return gate, up
        up = self.expert_linear(x, f"{blk}.ffn_up{suffix}", ids)
        has_gate = f"{blk}.ffn_gate{suffix}.weight" in self.w
        return self.expert_linear(x, f"{blk}.ffn_gate{suffix}", ids) if has_gate else None, up

    def activate_experts(self, gate: Tensor | None, up: Tensor, il: int) -> Tensor:
        """Apply the activation within the experts."""
        return self.activate(up, None, il) if gate is None else self.activate(gate, up, il)

    def expert_linear(self, x: Tensor, role: str, ids: Tensor) -> Tensor:
        """Multiply each token by the matrices of its experts; apply those experts' scales and biases where given."""
        g = self.g
        y = g.mul_mat_id(self.w[f"{role}.weight"], x, ids)
        scale, bias = self.w.get(f"{role}.scale"), self.w.get(f"{role}.bias")
        if scale is not None:
            n_expert, n_tokens = scale.ne[0], x.ne[2]
            s = g.repeat_4d(g.reshape_3d(scale, 1, n_expert, 1), 1, n_expert, n_tokens, 1)
            y = g.mul(y, g.get_rows(s, ids))
        return g.add_id(y, bias, ids) if bias is not None else y

    def add_up(self, x: Tensor, n_embd: int, n_tokens: int, n_used: int) -> Tensor:
        """Sum over the experts of each token, from the best to the last."""
        g = self.g
        self.graph.expand(x)
        parts = [g.view_2d(x, n_embd, n_tokens, x.nb[2], i * x.nb[1]) for i in range(n_used)]
        for part in parts:
            self.graph.expand(part)
        out = parts[0]
        for part in parts[1:]:
            out = self.graph.expand(g.add(out, part))
        return out if n_used > 1 else g.cont(out)


def _in_layer(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else ""


def linear(role: str, n_in: int, n_out: int, bias: Presence, *, scale: bool = True) -> Iterator[TensorSpec]:
    """List the tensors of a matrix: weight, scale and bias."""
    yield TensorSpec(f"{role}.weight", (n_in, n_out))
    if scale:
        yield TensorSpec(f"{role}.scale", (1,), optional=True)
    if bias is not False:
        yield TensorSpec(f"{role}.bias", (n_out,), optional=bias is None)
