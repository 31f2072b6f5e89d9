"""Cohere's Command R and Command R7B: LayerNorm without biases, attention and FFN side by side, scaled logits."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.decoder import NORM, Decoder, Has
from ggufpy.arch.tensors import TensorSpec

__all__ = ["Cohere2", "CommandR"]

N_LAYER_PLUS = 64


class CommandR(Decoder):
    """Command R; from 64 layers on (Command R+) each head of queries and keys is normalized its own way."""

    name = "command-r"
    keys = {"logit_scale": 0.0}
    norm = "layer"
    tie = True
    rope = NORM
    partial_rope = True
    qk_norm = "heads"
    parallel = "ffn + x"
    ffn_norm = ""
    tiny_variants = {"plus": {"n_layer": N_LAYER_PLUS}}
    ffn_scale = False

    @classmethod
    def attention_tensors(cls, c: Config, il: int, has: Has) -> Iterator[TensorSpec]:
        for spec in super().attention_tensors(c, il, has):
            if c.n_layer >= N_LAYER_PLUS or "_norm" not in spec.name:
                yield spec


class Cohere2(CommandR):
    """Command R7B: three layers of four see a window, and only those know positions."""

    name = "cohere2"
    keys = {"logit_scale": REQUIRED, "n_swa": REQUIRED}
    swa_period = 4
    swa_rope = "same"  # llama.cpp reads a base for windows but does not use it
    qk_norm = ""
    tiny_variants = {}
    tiny = {"logit_scale": 0.5, "n_swa": 16}
    ffn_scale = True

    @classmethod
    def rotates(cls, c: Config, il: int) -> bool:
        return c.is_swa[il]
