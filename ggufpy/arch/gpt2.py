"""GPT-2, Falcon, StarCoder 2, Phi 2 and kin: LayerNorm, mostly with biases, and mostly a plain FFN with GELU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ggufpy.arch.decoder import NEOX, NORM, REQUIRED, Decoder, Has, Presence, Tensor, TensorSpec, f32

__all__ = [
    "GPT2", "MPT", "Bloom", "CodeShell", "Falcon", "GPTNeoX", "Jais", "Jais2", "Nemotron", "Orion", "Phi2",
    "PocketTTS", "StableLM", "StarCoder", "StarCoder2",
]  # fmt: skip


class GPT2(Decoder, name="gpt2"):
    """GPT-2: positions are embedded like tokens."""

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


class StarCoder(GPT2, name="starcoder"):
    """StarCoder: GPT-2 whose heads share one key and one value."""


class Bloom(GPT2, name="bloom"):
    """BLOOM: distances weaken scores (ALiBi) instead of positions, and embeddings are normalized."""

    learned_positions = False
    alibi = 8.0
    embedding_norm = True
    tiny_variants = {"six-heads": {"n_embd": 192, "n_head": 6}}


class MPT(GPT2, name="mpt"):
    """MPT: ALiBi or positions as the file says, few biases, clamped projections, scaled activations.

    Files that normalize queries and keys are refused: llama.cpp lists those tensors but cannot compute with them.
    """

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


class Jais(GPT2, name="jais"):
    """Jais: ALiBi, a gated FFN, and scores divided by the head's width itself."""

    keys = {"max_alibi_bias": 0.0}
    learned_positions = False
    tie = False
    ffn_gate = True
    activation = "silu"

    def attention_scale(self) -> float:
        return f32(1.0 / self.c.n_embd_head_v)


class Falcon(Decoder, name="falcon"):
    """Falcon: no biases but in norms; in the larger models attention has a norm of its own."""

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


class GPTNeoX(GPT2, name="gptneox"):
    """GPT-NeoX and Pythia: part of each head rotates; attention and FFN stand side by side if the file says so."""

    keys = {"use_parallel_residual": REQUIRED}
    learned_positions = False
    tie = False
    rope = NEOX
    partial_rope = True
    parallel = "ffn + x"
    tiny = {"use_parallel_residual": True}
    tiny_variants = {"serial": {"use_parallel_residual": False}}


class StarCoder2(GPT2, name="starcoder2", learned_positions=False, rope=NEOX, qkv_fused=None, qkv_bias=None):
    """StarCoder 2: rotation instead of embedded positions; q, k and v may be separate."""


class CodeShell(StarCoder2, name="codeshell"):
    """CodeShell: StarCoder 2 with an output matrix, which may serve as token embeddings too."""

    tie = False
    lacking = ("token_embd.weight",)
    stand_ins = {"token_embd.weight": "output.weight"}


class Jais2(StarCoder2, name="jais2", prec_f32=True, activation="relu2"):
    """Jais 2: StarCoder 2 with squared ReLU."""


class Nemotron(StarCoder2, name="nemotron"):
    """Nemotron: squared ReLU, part of each head rotates, and biases are optional."""

    tie = False
    partial_rope = True
    output_bias = None
    ffn_bias = None
    activation = "relu2"


class PocketTTS(StarCoder2, name="pockettts", tie=True, rope=NORM, output_bias=False, ffn_bias=False):
    """Pocket TTS: neighbours rotate together, and only norms have biases; its logits mean nothing."""


class Phi2(StarCoder2, name="phi2"):
    """Phi 1, 1.5 and 2: attention and FFN side by side, scaled queries, a bias of the output matrix."""

    tie = False
    head_bias = True
    partial_rope = True
    scale_query = True
    parallel = "ffn + attn"
    ffn_norm = ""


class Orion(Decoder, name="orion", norm="layer", norm_bias=True, tie=False, rope=NEOX):
    """Orion: Llama with LayerNorm, biases in it, and rotation by halves."""


class StableLM(Orion, name="stablelm"):
    """StableLM: Orion; the 12B normalizes each query and key head, and its FFN takes what attention takes."""

    partial_rope = True
    lacking = ("ffn_norm.weight", "ffn_norm.bias")
    qk_norm = "heads"
    qk_norm_weight = None
