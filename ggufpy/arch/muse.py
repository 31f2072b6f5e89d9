"""Muse Glimmer."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import Decoder
from ggufpy.graph import Tensor

__all__ = ["MuseGlimmer"]


class MuseGlimmer(Decoder):
    """Muse Glimmer: normalized embeddings, gated attention, norms around sublayers; only windowed layers rotate."""

    name = "muse-glimmer"
    keys = {"n_swa": REQUIRED, "rope_freq_base_swa": 0.0, "logit_scale": REQUIRED, "final_logit_softcapping": 30.0}
    swa_period = 4
    full_rope = False
    partial_rope = True
    post_norms = ("post_attention_norm", "post_ffw_norm")
    post_norm_eps = 1e-8
    tie = False
    qk_norm = "head"
    attn_gate = "sigmoid"

    def embed(self) -> Tensor:
        return self.normalize(super().embed(), "", "inp_norm")
