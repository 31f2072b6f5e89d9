"""Cohere's Command R and Command R7B: LayerNorm without biases, attention and FFN side by side, scaled logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ggufpy.arch.decoder import REQUIRED, ROUTER, Decoder, Has, Moe, Presence, Tensor, TensorSpec

__all__ = ["Cohere2", "Cohere2Moe", "CommandR"]

N_LAYER_PLUS = 64


class CommandR(Decoder, name="command-r"):
    """Command R; from 64 layers on (Command R+) each head of queries and keys is normalized its own way."""

    keys = {"logit_scale": 0.0}
    norm = "layer"
    tie: ClassVar[Presence] = True
    partial_rope = True
    qk_norm = "heads"
    parallel = "ffn + x"
    ffn_norm = ""
    tiny_variants = {"plus": {"n_layer": N_LAYER_PLUS}}

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        for spec in super().attention_tensors(il, has):
            if self.c.n_layer >= N_LAYER_PLUS or "_norm" not in spec.name:
                yield spec


class Cohere2(CommandR, name="cohere2"):
    """Command R7B: three layers of four see a window, and only those know positions."""

    keys = {"logit_scale": REQUIRED, "n_swa": REQUIRED}
    swa_period = 4
    full_rope = False
    swa_rope = "same"  # llama.cpp reads a base for windows but does not use it
    qk_norm = ""
    tiny_variants = {}
    tiny = {"logit_scale": 0.5, "n_swa": 16}
    ffn_scale = True


class Cohere2Moe(Cohere2, name="cohere2moe"):
    """Cohere 2 with experts after some dense layers, which always know positions; shared experts halve the others.

    The norms are of the kind whose epsilon the file has.
    """

    keys = {
        **Cohere2.keys, **ROUTER, "norm_eps": 0.0, "norm_rms_eps": 0.0, "n_layer_dense_lead": REQUIRED,
        "n_ff_exp": REQUIRED, "n_ff_shexp": 0, "n_expert_shared": 0,
    }  # fmt: skip
    swa_dense_first = True
    partial_rope = False
    nextn = True
    tie = None
    moe = Moe(gating="sigmoid", normalize=None, shared="many", fused=True, scale=True)
    crop = "last"
    tiny = {"logit_scale": 0.5, "n_swa": 16, "norm_eps": 1e-5}
    tiny_variants = {"wide-shared-experts": {"n_expert_shared": 1, "n_ff_shexp": 160}}

    def check(self) -> Iterator[str]:
        if not self.c.norm_eps and not self.c.norm_rms_eps:
            yield "attention.layer_norm_epsilon or attention.layer_norm_rms_epsilon: the key is missing"

    def rotates(self, il: int) -> bool:
        return super().rotates(il) or il < self.c.n_layer_dense_lead

    def n_ff_shexp(self, il: int) -> int:
        return super().n_ff_shexp(il) if self.c.n_expert_shared else 0

    def normalize(self, x: Tensor, role: str, name: str, il: int = -1, *, kind: str = "", eps: float = 0.0) -> Tensor:
        return super().normalize(x, role, name, il, kind="rms" if self.c.norm_rms_eps else "layer", eps=eps)

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        cur = super().feed_forward(x, il)
        return self.g.scale(cur, 0.5) if f"blk.{il}.ffn_up_shexp.weight" in self.w else cur
