"""GLM."""

from __future__ import annotations

from ggufpy.arch.decoder import Decoder

__all__ = ["Glm4"]


class Glm4(Decoder):
    """GLM 4: norms around both sublayers, one matrix for gate and up; files with sections rotate by MROPE."""

    name = "glm4"
    keys = {"rope_sections": ()}
    partial_rope = True
    nextn = True
    post_norms = ("post_attention_norm", "post_ffw_norm")
    ffn_fused = True
    ffn_scale = False
    prec_f32 = True
