"""openPangu Embedded."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder

__all__ = ["PanguEmbedded"]


class PanguEmbedded(Decoder):
    """openPangu Embedded: biases in attention. Frequencies' factors do nothing, as in llama.cpp."""

    name = "pangu-embedded"
    ignored = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    rope = NEOX
    output_bias = True
