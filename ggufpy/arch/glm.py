"""GLM, the dense models."""

from __future__ import annotations

from ggufpy.arch.decoder import Decoder

__all__ = ["ChatGLM", "Glm4"]


class ChatGLM(Decoder):
    """ChatGLM 3 and GLM 4 of 2024: one matrix for gate and up; half of each head rotates."""

    name = "chatglm"
    partial_rope = True
    ffn_fused = True
    ffn_scale = False


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
