"""Feed-forward networks: their tensors, their activations, with a gate or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ggufpy.arch.steps import Steps
from ggufpy.arch.tensors import Presence, TensorSpec, linear
from ggufpy.graph import Tensor

__all__ = ["FeedForward"]


class FeedForward(Steps):
    """One dense network; shared experts are one too."""

    ffn_gate: ClassVar[bool] = True
    ffn_fused: ClassVar[bool] = False  # gate and up are one matrix
    ffn_bias: ClassVar[Presence] = False
    ffn_scale: ClassVar[bool] = False  # matrices may have scales
    activation: ClassVar[str] = "silu"  # of the gate, or of up where there is no gate

    def dense_tensors(self, n_ff: int, suffix: str = "") -> Iterator[TensorSpec]:
        """List the tensors of one gated FFN; shared experts are one with the suffix `_shexp`."""
        c = self.c
        bias = self.ffn_bias if not suffix else False
        if self.ffn_gate and not self.ffn_fused:
            yield from linear(f"ffn_gate{suffix}", c.n_embd, n_ff, bias, scale=self.ffn_scale)
        yield from linear(f"ffn_up{suffix}", c.n_embd, n_ff * 2 if self.ffn_fused else n_ff, bias, scale=self.ffn_scale)
        yield from linear(f"ffn_down{suffix}", n_ff, c.n_embd, bias, scale=self.ffn_scale)

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
