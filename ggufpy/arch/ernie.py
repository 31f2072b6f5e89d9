"""ERNIE 4.5, and PaddleOCR-VL, which is made of it."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import MROPE, Decoder, Moe

__all__ = ["Ernie45", "Ernie45Moe", "PaddleOCR"]


class Ernie45(Decoder):
    """ERNIE 4.5, dense. A bias of the attention's output does nothing, as in llama.cpp."""

    name = "ernie4_5"
    ignored = ("attn_output.bias",)


class Ernie45Moe(Decoder):
    """ERNIE 4.5 with experts after some dense layers; a bias for the choice and shared ones where files have them."""

    name = "ernie4_5-moe"
    keys = {
        "n_ff_exp": REQUIRED, "n_ff_shexp": 0, "interleave_moe_layer_step": REQUIRED, "n_layer_dense_lead": 0,
    }  # fmt: skip
    moe = Moe(gate=None, bias=None, shared="many")
    tiny = {"interleave_moe_layer_step": 1}

    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.c.interleave_moe_layer_step != 1:
            yield f"interleave_moe_layer_step: expected 1, found {self.c.interleave_moe_layer_step}"


class PaddleOCR(Decoder):
    """PaddleOCR-VL, the text part: rotation by time, height and width."""

    name = "paddleocr"
    keys = {"rope_sections": REQUIRED}
    rope = MROPE
    output_bias = None
