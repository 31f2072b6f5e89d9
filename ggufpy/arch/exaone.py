"""EXAONE."""

from __future__ import annotations

from dataclasses import replace

from ggufpy.arch.config import Config
from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["Exaone4"]

N_LAYER_32B = 64


class Exaone4(Decoder):
    """EXAONE 4: norms of the sublayers' outputs only; the 32B model has windows, and rotates in these layers alone."""

    name = "exaone4"
    keys = {"n_swa": 4096}
    swa_period = 4
    swa_rope = "same"
    nextn = True
    pre_norm = False
    post_norms = ("post_attention_norm", "post_ffw_norm")
    rope = NEOX
    rope_factors = "freqs"
    qk_norm = "head"
    ffn_scale = False
    tiny_variants = {"window": {"n_layer": 64, "n_embd": 64, "n_ff": 96, "n_head": 2, "n_head_kv": 1, "n_swa": 16}}

    @classmethod
    def adjust(cls, c: Config) -> Config:
        return c if c.n_layer == N_LAYER_32B else replace(c, n_swa=0, is_swa=(False,) * c.n_layer)

    @classmethod
    def rotates(cls, c: Config, il: int) -> bool:
        return c.is_swa[il] or not c.n_swa
