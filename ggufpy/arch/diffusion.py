"""Diffusion language models: known decoders whose tokens see all others of their call, and which keep nothing."""

from __future__ import annotations

from ggufpy.arch.decoder import NEOX, Decoder, Moe
from ggufpy.arch.qwen import Qwen2
from ggufpy.arch.qwen_moe import Qwen3Moe

__all__ = ["RND1", "Dream", "LLaDA", "LLaDAMoe"]


class LLaDA(Decoder):
    """LLaDA: Llama. llama.cpp loads some biases and rope's factors, but leaves them out of the graph."""

    name = "llada"
    cacheless = True
    ignored = ("rope_freqs.weight", "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


class Dream(Qwen2):
    """Dream: Qwen 2; llama.cpp loads the output matrix's bias, but leaves it out of the graph."""

    name = "dream"
    cacheless = True
    head_bias = False
    ignored = ("output.bias",)


class RND1(Qwen3Moe):
    """RND1: Qwen 3 MoE."""

    name = "rnd1"
    cacheless = True
    moe = Moe(split_ff=True)


class LLaDAMoe(Decoder):
    """LLaDA MoE: OLMoE, with norms of each head's queries and keys."""

    name = "llada-moe"
    keys = {"n_ff_exp": 0}
    cacheless = True
    tie = False
    rope = NEOX
    qk_norm = "head"
    moe = Moe(normalize=False, split_ff=True)
