"""ERNIE 4.5 and PaddleOCR-VL, which is made of it."""

from __future__ import annotations

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import MROPE, Decoder

__all__ = ["Ernie4_5", "PaddleOCR"]


class Ernie4_5(Decoder):
    """ERNIE 4.5, dense. A bias of the attention's output does nothing, as in llama.cpp."""

    name = "ernie4_5"
    ignored = ("attn_output.bias",)
    ffn_scale = False


class PaddleOCR(Decoder):
    """PaddleOCR-VL, the text part: rotation by time, height and width."""

    name = "paddleocr"
    keys = {"rope_sections": REQUIRED}
    rope = MROPE
    output_bias = None
    ffn_scale = False
