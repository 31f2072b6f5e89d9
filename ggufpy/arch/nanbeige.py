"""Nanbeige."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggufpy.arch.config import MAX_LAYERS, Config
from ggufpy.arch.decoder import Decoder, GraphInputs, Has
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Nanbeige"]


class Nanbeige(Decoder):
    """Nanbeige: Llama whose layers are run through several times, with keys and values of their own each time."""

    name = "nanbeige"
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
        yield from super().check()
        if c.n_layer * c.n_loops > MAX_LAYERS:
            yield f"block_count times num_loops: expected at most {MAX_LAYERS}, found {c.n_layer * c.n_loops}"

    def adjust(self) -> Config:
        """Count each run through a layer as a layer."""
        c = self.c
        n = c.n_loops
        return replace(
            c,
            n_layer=c.n_layer * n,
            n_head=c.n_head * n,
            n_head_kv=c.n_head_kv * n,
            n_ff=c.n_ff * n,
            is_swa=c.is_swa * n,
        )

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        if il < self.n_block:
            yield from super().layer_tensors(il, has)

    def __init__(self, c: Config, inputs: GraphInputs | None = None) -> None:
        super().__init__(c, inputs)
        n = self.n_block = c.n_layer // c.n_loops
        if not inputs:
            return
        names = {il: f"blk.{il % n}." for il in range(n, c.n_layer)}
        again = {
            f"blk.{il}.{name.removeprefix(blk)}": weight
            for il, blk in names.items()
            for name, weight in self.w.items()
            if name.startswith(blk)
        }
        self.w = {**self.w, **again}

    def layer(self, x: Tensor, il: int) -> Tensor:
        x = super().layer(x, il)
        ends_loop = (il + 1) % self.n_block == 0 and il + 1 < self.c.n_layer
        if ends_loop and not self.c.skip_loop_final_norm:
            x = self.normalize(x, "output_norm", "loop_norm", il)
        return x
