"""EXAONE."""

from __future__ import annotations

from dataclasses import replace

from ggufpy.arch.decoder import NEOX, REQUIRED, ROUTER, Config, Decoder, Moe

__all__ = ["Exaone", "Exaone4", "ExaoneMoe"]

N_LAYER_32B = 64
WINDOWED = {"n_layer": N_LAYER_32B, "n_embd": 64, "n_ff": 96, "n_head": 2, "n_head_kv": 1, "n_swa": 16}


class Exaone(Decoder, name="exaone", rope=NEOX, rope_factors="freqs"):
    """EXAONE 3: Llama rotated by halves."""


class Exaone4(Decoder, name="exaone4"):
    """EXAONE 4: norms of the sublayers' outputs only; the 32B model has windows, and rotates in these layers alone."""

    keys = {"n_swa": 4096}
    swa_period = 4
    full_rope = False
    swa_rope = "same"
    nextn = True
    pre_norm = False
    post_norms = ("post_attention_norm", "post_ffw_norm")
    rope = NEOX
    rope_factors = "freqs"
    qk_norm = "head"
    tiny_variants = {
        "window": WINDOWED,
        "window-array": WINDOWED | {"swa_pattern": [il % 3 == 0 for il in range(N_LAYER_32B)]},
        "window-scaled": WINDOWED | {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        "window-no-scaling": None,
        "window-pattern": None,
    }

    def adjust(self) -> Config:
        c = self.c
        return c if c.n_layer == N_LAYER_32B else replace(c, n_swa=0, is_swa=(False,) * c.n_layer)

    def rotates(self, il: int) -> bool:
        return super().rotates(il) or not self.c.n_swa


class ExaoneMoe(Decoder, name="exaone-moe"):
    """K-EXAONE: norms before the sublayers, rotation in windowed layers alone, experts after some dense layers."""

    keys = {
        "n_swa": REQUIRED, "n_layer_dense_lead": 0, "n_ff_exp": REQUIRED, "n_ff_shexp": 0, **ROUTER,
        "expert_gating_func": REQUIRED,
    }  # fmt: skip
    swa_period = 4
    full_rope = False
    swa_rope = "same"  # llama.cpp reads a base for windows but does not use it
    nextn = True
    tie = False
    rope = NEOX
    rope_factors = "freqs"
    qk_norm = "head"
    moe = Moe(gating=None, normalize=None, bias=None, shared="one")

    def nextn_config(self) -> Config:
        return replace(self.c, n_layer_dense_lead=self.c.n_layer)
