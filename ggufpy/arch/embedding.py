"""Embedding models made of decoders: their tokens see all others of their call, and there is no output matrix."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.decoder import NEOX, Decoder, Has
from ggufpy.arch.gemma import Gemma3
from ggufpy.arch.llama import Llama
from ggufpy.arch.tensors import TensorSpec
from ggufpy.graph import Tensor

__all__ = ["EuroBert", "GemmaEmbedding", "LlamaEmbed"]


class EuroBert(Decoder):
    """EuroBERT: Llama that rotates by halves."""

    name = "eurobert"
    cacheless = True
    logits = False
    rope = NEOX
    partial_rope = True


class LlamaEmbed(Llama):
    """Llama for embeddings; its tokens see those before them only where the file does not say otherwise."""

    name = "llama-embed"
    cacheless = True
    logits = False
    ignored = ("output.weight",)

    def adjust(self) -> Config:
        return self.c


class GemmaEmbedding(Gemma3):
    """EmbeddingGemma: Gemma 3 whose windows reach to both sides, with two more matrices behind the pooling."""

    name = "gemma-embedding"
    keys = {
        "n_swa": REQUIRED, "rope_freq_base_swa": 10000.0,
        "dense_2_in": 0, "dense_2_out": 0, "dense_3_in": 0, "dense_3_out": 0,
    }  # fmt: skip
    cacheless = True
    logits = False
    ignored = ("output.weight",)
    n_layer_27b = 0
    tiny = {"n_layer": 7, "dense_2_out": 256, "dense_3_in": 256}
    tiny_variants = {
        "window-array": {"n_swa": 24, "n_layer": 3, "swa_pattern": [True, False, True]},
        "without-dense_2": None,
        "without-dense_3": None,
        "no-dense": {"dense_2_out": 0, "dense_3_in": 0},
    }

    def check(self) -> Iterator[str]:
        c = self.c
        yield from super().check()
        if not {c.dense_2_in, c.dense_3_out} <= {0, c.n_embd}:
            yield f"dense_2_feat_in {c.dense_2_in} and dense_3_feat_out {c.dense_3_out}: expected {c.n_embd} or 0"
        if c.dense_2_out != c.dense_3_in:
            yield f"dense_2_feat_out {c.dense_2_out} and dense_3_feat_in {c.dense_3_in} must be equal"

    def tensors(self, has: Has = ()) -> Iterator[TensorSpec]:
        c = self.c
        yield from super().tensors(has)
        if c.dense_2_out:
            yield TensorSpec("dense_2.weight", (c.n_embd, c.dense_2_out), optional=True)
            yield TensorSpec("dense_3.weight", (c.dense_3_in, c.n_embd), optional=True)

    def pool(self, x: Tensor) -> Tensor:
        x = super().pool(x)
        for name in ("dense_2.weight", "dense_3.weight"):
            x = self.g.mul_mat(self.w[name], x) if name in self.w else x
        return x
