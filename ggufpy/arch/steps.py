"""What a graph is built from, and the small steps that every part of it takes.

Shapes are in ggml order: the first number is the contiguous dimension. Nodes are named as in llama.cpp (`Qcur-3`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ggufpy.arch.config import Config
from ggufpy.arch.scaling import Rope, f32
from ggufpy.arch.tensors import Presence, TensorSpec
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Graph, Tensor

__all__ = ["Attention", "FromPositions", "GraphInputs", "States", "Steps"]

PREC_F32 = 10

FromPositions = Callable[[npt.NDArray[np.int32]], npt.NDArray[Any]]


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
    pool: Tensor | None = None  # f32 [n_tokens, n_seqs] to weigh all rows, or i32 [n_seqs] to choose one for each
    classify: bool = False  # what the classifier makes of pooled rows is wanted
    derived: list[tuple[Tensor, FromPositions]] = field(default_factory=list)
    """Further inputs that a graph made, and how their values follow from the tokens' positions."""


class Steps:
    """A graph in the making, and how its parts multiply, normalize and name."""

    norm: ClassVar[str] = "rms"  # or "layer"
    norm_weight: ClassVar[bool] = True
    norm_bias: ClassVar[Presence] = False
    prec_f32: ClassVar[bool] = False
    """The last matrices of attention and FFN add up in single precision on all devices."""

    def norm_tensors(self, role: str, width: int) -> Iterator[TensorSpec]:
        """List the tensors of a norm: weight and bias, as far as this architecture's norms have them."""
        if self.norm_weight:
            yield TensorSpec(f"{role}.weight", (width,))
        if self.norm_bias is not False:
            yield TensorSpec(f"{role}.bias", (width,), optional=self.norm_bias is None)

    def __init__(self, c: Config, inputs: GraphInputs | None = None) -> None:
        """Take a model's hyper-parameters, from which its tensor table follows, and what a graph is built from."""
        self.c = c
        if inputs:
            self.inputs = inputs
            self.g, self.graph, self.w = inputs.g, inputs.graph, inputs.weights

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
        if bias_first:
            return self.times(self.plus(y, f"{role}.bias"), f"{role}.scale")
        return self.plus(self.times(y, f"{role}.scale"), f"{role}.bias")

    def times(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a tensor where the file has it."""
        return self.g.mul(x, self.w[name]) if name in self.w else x

    def plus(self, x: Tensor, name: str) -> Tensor:
        """Add a tensor where the file has it."""
        return self.g.add(x, self.w[name]) if name in self.w else x

    def normalize(self, x: Tensor, role: str, name: str, il: int = -1, *, kind: str = "", eps: float = 0.0) -> Tensor:
        """Normalize the rows; multiply by a weight and add a bias where the file has them."""
        if (kind or self.norm) == "rms":
            y = self.g.rms_norm(x, f32(eps or self.c.norm_rms_eps))
        else:
            y = self.g.norm(x, f32(eps or self.c.norm_eps))
        return self.named(self.plus(self.times(y, f"{role}.weight"), f"{role}.bias"), name, il)

    def has_norm(self, role: str) -> bool:
        """Say whether there is such a norm: norms that have no weights are everywhere."""
        return not self.norm_weight or f"{role}.weight" in self.w

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Bound values smoothly to ±cap."""
        x = self.g.scale(x, float(np.float32(1.0) / np.float32(cap)))
        return self.g.scale(self.g.tanh(x), f32(cap))
