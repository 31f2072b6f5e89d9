"""Known decoders whose tokens see all others of their call: diffusion language models and embedding models."""

from __future__ import annotations

from collections.abc import Iterator

from ggufpy.arch.decoder import NEOX, REQUIRED, Config, Decoder, Has, Moe, Tensor, TensorSpec
from ggufpy.arch.gemma import Gemma3
from ggufpy.arch.llama import Llama
from ggufpy.arch.qwen import Qwen2, Qwen3Moe

__all__ = ["RND1", "Dream", "EuroBert", "GemmaEmbedding", "LLaDA", "LLaDAMoe", "LlamaEmbed"]


class LLaDA(Decoder, name="llada"):
    """LLaDA: Llama. llama.cpp loads some biases and rope's factors, but leaves them out of the graph."""

    cacheless = True
    ignored = ("rope_freqs.weight", "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


class Dream(Qwen2, name="dream", cacheless=True, head_bias=False, ignored=("output.bias",)):
    """Dream: Qwen 2; llama.cpp loads the output matrix's bias, but leaves it out of the graph."""


class RND1(Qwen3Moe, name="rnd1", cacheless=True, moe=Moe(split_ff=True)):
    """RND1: Qwen 3 MoE."""


class LLaDAMoe(Decoder, name="llada-moe"):
    """LLaDA MoE: OLMoE, with norms of each head's queries and keys."""

    keys = {"n_ff_exp": 0}
    cacheless = True
    tie = False
    rope = NEOX
    qk_norm = "head"
    moe = Moe(normalize=False, split_ff=True)


class EuroBert(Decoder, name="eurobert", cacheless=True, logits=False, rope=NEOX, partial_rope=True):
    """EuroBERT: Llama that rotates by halves."""


class LlamaEmbed(Llama, name="llama-embed"):
    """Llama for embeddings; its tokens see those before them only where the file does not say otherwise."""

    cacheless = True
    logits = False
    ignored = ("output.weight",)

    def adjust(self) -> Config:
        return self.c


class GemmaEmbedding(Gemma3, name="gemma-embedding"):
    """EmbeddingGemma: Gemma 3 whose windows reach to both sides, with two more matrices behind the pooling."""

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
