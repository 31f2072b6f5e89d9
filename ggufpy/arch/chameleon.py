"""Chameleon."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import Decoder, Has
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["Chameleon"]

FIRST_IMAGE_TOKEN, END_OF_IMAGE_TOKENS = 4, 8196
LOWEST = -3.4028234663852886e38
EPS = 1e-5


class Chameleon(Decoder):
    """Chameleon, text alone: LayerNorm of each head of queries and keys.

    With `swin_norm`, norms stand behind the sublayers, and the FFN takes what attention gave, as in llama.cpp.
    """

    name = "chameleon"
    keys = {"swin_norm": False}
    qk_norm = "heads"
    tiny = {"n_vocab": END_OF_IMAGE_TOKENS + 64}

    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.c.n_vocab < END_OF_IMAGE_TOKENS:
            yield f"tokenizer.ggml.tokens: expected {END_OF_IMAGE_TOKENS} or more, found {self.c.n_vocab}"

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        yield from super().attention_tensors(il, has)
        for role, n in (("q", c.n_head[il]), ("k", c.n_head_kv[il])):
            yield TensorSpec(f"attn_{role}_norm.bias", (c.n_embd_head_k, n), optional=True, f32=True)

    def normalize_qk(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        q = self.normalize(q, f"blk.{il}.attn_q_norm", "Qcur_normed", il, kind="layer", eps=EPS)
        return q, self.normalize(k, f"blk.{il}.attn_k_norm", "Kcur_normed", il, kind="layer", eps=EPS)

    def attention_input(self, x: Tensor, il: int) -> Tensor:
        return x if self.c.swin_norm else super().attention_input(x, il)

    def ffn_input(self, h: Tensor, normed: Tensor, il: int) -> Tensor:
        return self.attended if self.c.swin_norm else super().ffn_input(h, normed, il)

    def add_residual(self, cur: Tensor, x: Tensor, which: int, il: int) -> Tensor:
        if self.c.swin_norm:
            role = ("attn_norm", "ffn_norm")[which]
            cur = self.attended = self.normalize(cur, f"blk.{il}.{role}", role, il)
        return super().add_residual(cur, x, which, il)

    def head(self, x: Tensor) -> Tensor:
        """Rule out the tokens of images; like llama.cpp, in the first row of a micro-batch only."""
        g, y = self.g, super().head(x)
        n_before, n_behind = FIRST_IMAGE_TOKEN, y.n_elements - END_OF_IMAGE_TOKENS
        before = g.view_1d(y, n_before, 0)
        images = g.fill(g.view_1d(y, END_OF_IMAGE_TOKENS - n_before, n_before * 4), LOWEST)
        kept = g.concat(before, images, 0)
        if n_behind:
            kept = g.concat(kept, g.view_1d(y, n_behind, END_OF_IMAGE_TOKENS * 4), 0)
        return g.reshape_2d(kept, *y.ne[:2])
