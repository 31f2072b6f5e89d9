"""GPT-2, Falcon, StarCoder 2, Phi 2 and kin: LayerNorm, mostly with biases, and mostly a plain FFN with GELU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ggufpy.arch.config import REQUIRED
from ggufpy.arch.decoder import NEOX, NORM, Decoder, Has, Presence, f32
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = [
    "GPT2", "MPT", "Bloom", "CodeShell", "Falcon", "GPTNeoX", "Jais", "Jais2", "Nemotron", "Orion", "Phi2",
    "PocketTTS", "StableLM", "StarCoder", "StarCoder2",
]  # fmt: skip


class GPT2(Decoder):
    """GPT-2: positions are embedded like tokens."""

    name = "gpt2"
    norm = "layer"
    norm_bias: ClassVar[Presence] = True
    learned_positions: ClassVar[Presence] = True
    rope: ClassVar[int | None] = None
    qkv_fused: ClassVar[Presence] = True
    qkv_bias: ClassVar[Presence] = True
    output_bias: ClassVar[Presence] = True
    ffn_gate = False
    ffn_bias: ClassVar[Presence] = True
    activation = "gelu"


class StarCoder(GPT2):
    """StarCoder: GPT-2 whose heads share one key and one value."""

    name = "starcoder"


class Bloom(GPT2):
    """BLOOM: distances weaken scores (ALiBi) instead of positions, and embeddings are normalized."""

    name = "bloom"
    learned_positions = False
    alibi = 8.0
    embedding_norm = True
    tiny_variants = {"six-heads": {"n_embd": 192, "n_head": 6}}


class MPT(GPT2):
    """MPT: ALiBi or positions as the file says, few biases, clamped projections, scaled activations.

    Files that normalize queries and keys are refused: llama.cpp lists those tensors but cannot compute with them.
    """

    name = "mpt"
    keys = {"clamp_kqv": 0.0, "max_alibi_bias": 0.0}
    norm_bias = None
    learned_positions = None
    qkv_bias = None
    output_bias = None
    ffn_bias = None

    def ffn_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().ffn_tensors(il, has)
        yield TensorSpec("ffn.act.scales", (self.c.n_ff[il],), optional=True)

    def before_down(self, x: Tensor, il: int) -> Tensor:
        scales = self.w.get(f"blk.{il}.ffn.act.scales")
        return x if scales is None else self.g.div(x, scales)


class Jais(GPT2):
    """Jais: ALiBi, a gated FFN, and scores divided by the head's width itself."""

    name = "jais"
    keys = {"max_alibi_bias": 0.0}
    learned_positions = False
    tie = False
    ffn_gate = True
    activation = "silu"

    def attention_scale(self) -> float:
        return f32(1.0 / self.c.n_embd_head_v)


class Falcon(Decoder):
    """Falcon: no biases but in norms; in the larger models attention has a norm of its own."""

    name = "falcon"
    norm = "layer"
    norm_bias = True
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    parallel = "ffn + attn"
    ffn_norm = ""
    ffn_gate = False
    activation = "gelu"

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        yield TensorSpec("attn_norm_2.weight", (self.c.n_embd,), optional=True)
        yield TensorSpec("attn_norm_2.bias", (self.c.n_embd,), optional=True)

    def attention_input(self, x: Tensor, il: int) -> Tensor:
        if f"blk.{il}.attn_norm_2.weight" in self.w:
            return self.normalize(x, f"blk.{il}.attn_norm_2", "attn_norm_2", il)
        return super().attention_input(x, il)

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        if f"blk.{il}.attn_norm_2.weight" in self.w:
            return self.normalize(h, f"blk.{il}.attn_norm", "attn_norm", il)
        return normed


class GPTNeoX(GPT2):
    """GPT-NeoX and Pythia: part of each head rotates; attention and FFN stand side by side if the file says so."""

    name = "gptneox"
    keys = {"use_parallel_residual": REQUIRED}
    learned_positions = False
    tie = False
    rope = NEOX
    partial_rope = True
    parallel = "ffn + x"
    tiny = {"use_parallel_residual": True}
    tiny_variants = {"serial": {"use_parallel_residual": False}}


class StarCoder2(GPT2):
    """StarCoder 2: rotation instead of embedded positions; q, k and v may be separate."""

    name = "starcoder2"
    learned_positions = False
    rope = NEOX
    qkv_fused = None
    qkv_bias = None


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


class Phi2(StarCoder2):
    """Phi 1, 1.5 and 2: attention and FFN side by side, scaled queries, a bias of the output matrix."""

    name = "phi2"
    tie = False
    head_bias = True
    partial_rope = True
    scale_query = True
    parallel = "ffn + attn"
    ffn_norm = ""


class Orion(Decoder):
    """Orion: Llama with LayerNorm, biases in it, and rotation by halves."""

    name = "orion"
    norm = "layer"
    norm_bias = True
    tie = False
    rope = NEOX


class StableLM(Orion):
    """StableLM: Orion; the 12B normalizes each query and key head, and its FFN takes what attention takes."""

    name = "stablelm"
    partial_rope = True
    lacking = ("ffn_norm.weight", "ffn_norm.bias")
    qk_norm = "heads"
    qk_norm_weight = None

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        return super().ffn_input(h, normed, il) if f"blk.{il}.ffn_norm.weight" in self.w else normed
