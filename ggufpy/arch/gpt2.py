"""GPT-2 and its kin: LayerNorm with biases, one fused matrix for q, k and v, a plain FFN with GELU, no rotation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ggufpy.arch.decoder import Decoder, Has, Presence, f32
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["GPT2", "MPT", "Bloom", "Jais", "StarCoder"]


class GPT2(Decoder):
    """GPT-2: positions are embedded like tokens."""

    name = "gpt2"
    norm = "layer"
    norm_bias: ClassVar[Presence] = True
    learned_positions: ClassVar[Presence] = True
    rope = None
    qkv_fused = True
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
