"""CogVLM."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import NEOX, Decoder, Has, Rope
from ggufpy.arch.tensors import TensorSpec

__all__ = ["CogVLM"]


class CogVLM(Decoder):
    """CogVLM, text alone: layers have a second set of matrices, for images. The rotation heeds no keys."""

    name = "cogvlm"
    grouped = False
    ignored = ("rope_freqs.weight",)
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    qkv_scale = False
    crop = "last"
    tiny = {"n_head_kv": 4}

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        yield from super().layer_tensors(il, has)
        for role, n_in, n_out in (
            ("vis_attn_qkv", c.n_embd, 3 * c.n_embd),
            ("vis_attn_output", c.n_embd, c.n_embd),
            ("vis_gate", c.n_embd, c.n_ff[il]),
            ("vis_up", c.n_embd, c.n_ff[il]),
            ("vis_down", c.n_ff[il], c.n_embd),
        ):
            yield TensorSpec(f"{role}.weight", (n_in, n_out), unused=True)

    def rope_of(self, il: int) -> Rope:
        return Rope(0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)
