"""Baichuan and Orion."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["Baichuan", "Orion"]

N_LAYER_7B, N_LAYER_13B = 32, 40


class Baichuan(Decoder):
    """Baichuan 1 and 2: the 7B model rotates, the 13B model has ALiBi instead."""

    name = "baichuan"
    tie = False
    alibi = 8.0
    tiny = {"n_layer": N_LAYER_7B, "n_embd": 64, "n_ff": 96, "n_head": 2, "n_head_kv": 1}
    tiny_variants = {"alibi": {"n_layer": N_LAYER_13B}}

    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.c.n_layer not in (N_LAYER_7B, N_LAYER_13B):
            yield f"block_count: expected {N_LAYER_7B} or {N_LAYER_13B}, found {self.c.n_layer}"

    def rotates(self, il: int) -> bool:
        return self.c.n_layer == N_LAYER_7B

    def max_alibi_bias(self) -> float:
        return self.alibi if self.c.n_layer == N_LAYER_13B else 0.0


class Orion(Decoder):
    """Orion: LayerNorm with biases."""

    name = "orion"
    norm = "layer"
    norm_bias = True
    tie = False
    rope = NEOX
