"""Liquid's LFM2: short convolutions between gates in most layers, attention in the others; dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ggufpy.arch.decoder import NEOX, REQUIRED, Config, Has, Moe, Tensor, TensorSpec, linear
from ggufpy.arch.hybrid import Hybrid

__all__ = ["Lfm2", "Lfm2Moe"]


class Lfm2(Hybrid, name="lfm2"):
    """LFM2: where there is a window, all attention has it."""

    keys = {"shortconv_l_cache": REQUIRED, "n_swa": 0}
    output_norm = "token_embd_norm"
    swa_rope = "same"
    rope = NEOX
    qk_norm = "head"
    tiny = {"n_layer": 4, "n_head_kv": [0, 2, 0, 2], "shortconv_l_cache": 3}
    tiny_variants = {
        "no-gqa": {"n_head_kv": [0, 4, 0, 0]},
        "one-kv-head": {"n_head_kv": [1, 0, 0, 1]},
        "longer-convolution": {"shortconv_l_cache": 4},
        "window": {"n_swa": 16},
    }

    def check(self) -> Iterator[str]:
        c = self.c
        if c.n_head[0] * c.n_embd_head_k != c.n_embd:
            yield f"attention.key_length: {c.n_head[0]} heads of {c.n_embd_head_k} do not make {c.n_embd}"
        if not c.causal_attn:
            yield "attention.causal: convolutions that look ahead are not supported"

    def adjust(self) -> Config:
        c = self.c
        return replace(c, is_swa=(c.n_swa > 0,) * c.n_layer)

    def states(self) -> Mapping[int, Mapping[str, int]]:
        c = self.c
        return {il: {"r": c.n_embd * (c.shortconv_l_cache - 1)} for il, n in enumerate(c.n_head_kv) if not n}

    def recurrent_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        yield TensorSpec("shortconv.conv.weight", (c.shortconv_l_cache, c.n_embd), f32=True)
        yield from linear("shortconv.in_proj", c.n_embd, 3 * c.n_embd, False, scale=False)
        yield from linear("shortconv.out_proj", c.n_embd, c.n_embd, False, scale=False)

    def recur(self, x: Tensor, il: int) -> Tensor:
        """Convolve along the tokens, between a gate on what goes in and one on what comes out."""
        g, n, role = self.g, x.ne[0], f"blk.{il}.shortconv"
        y = self.linear(self.by_sequence(x, n), f"{role}.in_proj")
        gate_in, gate_out, x = (g.view_3d(y, n, *y.ne[1:3], y.nb[1], y.nb[2], i * n * 4) for i in range(3))
        joined = self.behind_state(g.mul(gate_in, x), self.c.shortconv_l_cache - 1, il)
        y = g.mul(gate_out, g.ssm_conv(joined, self.w[f"{role}.conv.weight"]))
        y = self.linear(y, f"{role}.out_proj")
        return g.reshape_2d(y, n, y.n_elements // n)


class Lfm2Moe(Lfm2, name="lfm2moe"):
    """LFM2 with experts, chosen with a bias, behind some dense layers."""

    keys = {
        "shortconv_l_cache": REQUIRED, "n_layer_dense_lead": 0, "n_ff_exp": REQUIRED, "expert_gating_func": REQUIRED,
    }  # fmt: skip
    moe = Moe(gating=None, bias=True)
    tiny_variants = {**Lfm2.tiny_variants, "window": None}
