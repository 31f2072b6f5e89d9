"""OLMo."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder, Moe

__all__ = ["Olmo", "Olmo2", "OlmoE"]


class Olmo(Decoder, name="olmo", keys={"clamp_kqv": 0.0}, norm="layer", norm_weight=False):
    """OLMo 1: norms without weights; queries, keys and values may be clamped."""


class Olmo2(Decoder, name="olmo2"):
    """OLMo 2 and 3: norms of the sublayers' outputs only, and of whole rows of queries and keys."""

    keys = {"n_swa": 0}
    swa_period = 4
    swa_rope = "plain"
    pre_norm = False
    post_norms = ("post_attention_norm", "post_ffw_norm")
    tie = False
    rope = NEOX
    qk_norm = "full"


class OlmoE(Decoder, name="olmoe"):
    """OLMoE: norms of whole rows of queries and keys, and experts whose weights do not add up to one."""

    tie = False
    rope = NEOX
    qk_norm = "full"
    moe = Moe(normalize=False)
    tiny = {"n_head_kv": 4}
    tiny_variants = {"one-kv-head": None}
