"""GLM."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, REQUIRED, ROUTER, Decoder, Moe

__all__ = ["ChatGLM", "Glm4", "Glm4Moe"]


class ChatGLM(Decoder, name="chatglm", partial_rope=True, ffn_fused=True):
    """ChatGLM 3 and GLM 4 of 2024: one matrix for gate and up; half of each head rotates."""


class Glm4(Decoder, name="glm4"):
    """GLM 4: norms around both sublayers, one matrix for gate and up; files with sections rotate by MROPE."""

    keys = {"rope_sections": ()}
    partial_rope = True
    nextn = True
    post_norms = ("post_attention_norm", "post_ffw_norm")
    ffn_fused = True
    prec_f32 = True


class Glm4Moe(Decoder, name="glm4moe"):
    """GLM 4.5 and 4.6: Llama's layers with experts after some dense layers; the largest normalizes queries and keys."""

    keys = {
        **ROUTER, "n_ff_exp": REQUIRED, "n_expert_shared": REQUIRED, "n_layer_dense_lead": 0, "rope_sections": (),
    }  # fmt: skip
    partial_rope = True
    nextn = True
    rope = NEOX
    qk_norm = "head"
    qk_norm_weight = None
    ffn_norm = "post_attention_norm"
    moe = Moe(gating="sigmoid", normalize=None, bias=True, shared="many", split_ff=True)
    prec_f32 = True
