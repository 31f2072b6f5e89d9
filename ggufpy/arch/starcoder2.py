"""LayerNorm with biases around a rotating attention: StarCoder 2, CodeShell, Nemotron, Jais 2, StableLM, Pocket TTS."""

from __future__ import annotations

from typing import ClassVar

from ggufpy.arch.decoder import NEOX, NORM, Decoder, Presence
from ggufpy.graph import Tensor

__all__ = ["CodeShell", "Jais2", "Nemotron", "PocketTTS", "StableLM", "StarCoder2"]


class StarCoder2(Decoder):
    """StarCoder 2: biases everywhere and a plain FFN with GELU."""

    name = "starcoder2"
    norm = "layer"
    norm_bias = True
    rope = NEOX
    output_bias: ClassVar[Presence] = True
    ffn_gate = False
    ffn_bias: ClassVar[Presence] = True
    activation = "gelu"


class CodeShell(StarCoder2):
    """CodeShell: StarCoder 2 with an output matrix, which may serve as token embeddings too."""

    name = "codeshell"
    tie = False
    lacking = ("token_embd.weight",)
    stand_ins = {"token_embd.weight": "output.weight"}


class Jais2(StarCoder2):
    """Jais 2: StarCoder 2 with squared ReLU."""

    name = "jais2"
    prec_f32 = True
    activation = "relu2"


class Nemotron(StarCoder2):
    """Nemotron: squared ReLU, part of each head rotates, and biases are optional."""

    name = "nemotron"
    tie = False
    partial_rope = True
    output_bias = None
    ffn_bias = None
    activation = "relu2"


class PocketTTS(StarCoder2):
    """Pocket TTS: neighbours rotate together, and only norms have biases; its logits mean nothing."""

    name = "pockettts"
    tie = True
    rope = NORM
    output_bias = False
    ffn_bias = False


class StableLM(Decoder):
    """StableLM: a gated FFN; the 12B normalizes each query and key head, and its FFN takes what attention takes."""

    name = "stablelm"
    norm = "layer"
    norm_bias = True
    tie = False
    rope = NEOX
    partial_rope = True
    lacking = ("ffn_norm.weight", "ffn_norm.bias")
    qk_norm = "heads"
    qk_norm_weight = None

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        return super().ffn_input(h, normed, il) if f"blk.{il}.ffn_norm.weight" in self.w else normed
