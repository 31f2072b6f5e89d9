"""Llama, the models converted to its name (Llama 1-3, Mistral, Mixtral, SmolLM, Yi and others), and near relatives.

`llama.attention.scale` and `llama.expert_weights_scale` are not read: llama.cpp ignores them for this architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggufpy.arch.decoder import MROPE, NEOX, REQUIRED, Config, Decoder, Has, Moe, Tensor, TensorSpec, f32

__all__ = [
    "Apertus", "Arcee", "Baichuan", "BitNet", "Ernie45", "InternLM2", "Llama", "Llama4", "MainCoder", "Mistral3",
    "OpenELM", "PaddleOCR", "PanguEmbedded", "Refact", "SeedOss", "SmolLM3", "XVerse",
]  # fmt: skip

WINDOW = 8192
N_EXPERT_MAVERICK = 128
N_LAYER_7B, N_LAYER_13B = 32, 40


class Llama(Decoder, name="llama"):
    """The common decoder with every option it has."""

    rope_factors = "scaling"
    output_bias = None
    ffn_bias = None
    ffn_scale = True
    moe = Moe(required=False, gate=None, scale=True)


class Mistral3(Llama, name="mistral3"):
    """Ministral 3 and Mistral Small 3: YaRN to the file's measures; queries grow with the logarithm of the position."""

    keys = {"attn_temperature_scale": 0.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "rope_yarn_log_mul": 0.0}


class Arcee(Decoder, name="arcee", rope_factors="freqs", ffn_gate=False, activation="relu2"):
    """Arcee (AFM): no gate, and squared ReLU."""


class XVerse(Decoder, name="xverse", tie=False):
    """XVERSE: the output matrix is always one of its own."""


class InternLM2(XVerse, name="internlm2"):
    """InternLM 2 and 3."""


class MainCoder(Decoder, name="maincoder", qk_norm="rotated"):
    """Maincoder: norms of queries and keys after their rotation."""


class SmolLM3(Decoder, name="smollm3", no_rope_step=4):
    """SmolLM 3: every fourth layer knows no positions."""


class Refact(Decoder, name="refact"):
    """Refact: ALiBi instead of rotation. Biases in a file do nothing, as in llama.cpp."""

    ignored = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias", "rope_freqs.weight")
    rope = None
    alibi = 8.0


class Llama4(Decoder, name="llama4"):
    """Llama 4: windows that do not slide in three layers of four; the fourth knows no positions but for a temperature.

    Queries and keys are normalized after their rotation (not in the 128-expert model); the experts' inputs are weighed.
    """

    keys = {
        "n_ff_exp": REQUIRED, "interleave_moe_layer_step": REQUIRED, "n_swa": WINDOW, "rope_freq_base_swa": 0.0,
    }  # fmt: skip
    swa_period = 4
    swa_rope = "scaled"
    no_rope_step = 4
    rope_factors = "freqs"
    moe = Moe(gating="sigmoid", normalize=False, shared="one", select_logits=True, weight_first=True)
    tiny = {"n_layer": 4}
    tiny_variants = {
        "window-array": {"swa_pattern": [True, False, True, True]},
        "all-experts": {"interleave_moe_layer_step": 1},
        "maverick": {"n_expert": N_EXPERT_MAVERICK, "n_expert_used": 1},
    }

    def check(self) -> Iterator[str]:
        if not self.c.n_swa:
            yield "attention.sliding_window: 0 (no windows) is not supported"

    def adjust(self) -> Config:
        return replace(self.c, n_swa=WINDOW, swa_chunked=True)  # llama.cpp takes no other size

    def is_moe(self, il: int, has: Has = ()) -> bool:
        step = self.c.interleave_moe_layer_step
        return step > 0 and (il + 1) % step == 0

    def temperature(self, il: int) -> tuple[float, float, float]:
        return (0.0, 0.0, 0.0) if self.rotates(il) else (0.1, WINDOW, 1.0)

    def position(self, q: Tensor, k: Tensor, il: int) -> tuple[Tensor, Tensor]:
        q, k = super().position(q, k, il)
        if not self.rotates(il) or self.c.n_expert == N_EXPERT_MAVERICK:
            return q, k
        eps = f32(self.c.norm_rms_eps)
        return self.g.rms_norm(q, eps), self.g.rms_norm(k, eps)


class Baichuan(Decoder, name="baichuan"):
    """Baichuan 1 and 2: the 7B model rotates, the 13B model has ALiBi instead."""

    tie = False
    alibi = 8.0
    tiny = {"n_layer": N_LAYER_7B, "n_embd": 64, "n_ff": 96, "n_head": 2, "n_head_kv": 1}
    tiny_variants = {"alibi": {"n_layer": N_LAYER_13B}}

    def check(self) -> Iterator[str]:
        if self.c.n_layer not in (N_LAYER_7B, N_LAYER_13B):
            yield f"block_count: expected {N_LAYER_7B} or {N_LAYER_13B}, found {self.c.n_layer}"

    def rotates(self, il: int) -> bool:
        return self.c.n_layer == N_LAYER_7B

    def max_alibi_bias(self) -> float:
        return self.alibi if self.c.n_layer == N_LAYER_13B else 0.0


class Apertus(Decoder, name="apertus"):
    """Apertus: norms of queries and keys; no gate, and xIELU with four numbers for each layer."""

    keys = dict.fromkeys(("xielu_alpha_n", "xielu_alpha_p", "xielu_beta", "xielu_eps"), REQUIRED)
    ignored = ("attn_q_norm.bias", "attn_k_norm.bias")
    tie = False
    rope = NEOX
    rope_factors = "scaling"
    output_bias = None
    qk_norm = "head"
    ffn_gate = False

    def activate(self, gate: Tensor, up: Tensor | None, il: int) -> Tensor:
        c = self.c
        numbers = c.xielu_alpha_n[il], c.xielu_alpha_p[il], c.xielu_beta[il], c.xielu_eps[il]
        return self.g.xielu(gate, *(f32(x) for x in numbers))


class BitNet(Decoder, name="bitnet"):
    """BitNet b1.58: a norm before the last matrix of attention and of the FFN; matrices with scales."""

    partial_rope = True
    tie = True
    rope = NEOX
    qkv_fused = False
    qkv_bias = False
    ffn_scale = True

    def layer_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from super().layer_tensors(il, has)
        yield from self.norm_tensors("attn_sub_norm", self.c.n_embd)
        yield from self.norm_tensors("ffn_sub_norm", self.c.n_ff[il])

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, il: int) -> Tensor:
        return self.normalize(super().attend(q, k, v, il), f"blk.{il}.attn_sub_norm", "attn_sub_norm", il)

    def before_down(self, x: Tensor, il: int) -> Tensor:
        return self.normalize(x, f"blk.{il}.ffn_sub_norm", "ffn_sub_norm", il)


class OpenELM(Decoder, name="openelm"):
    """OpenELM: each layer has its own numbers of heads and its own width of the FFN."""

    partial_rope = True
    tie = True
    rope = NEOX
    qkv_fused = True
    qkv_bias = False
    qkv_scale = False
    qk_norm = "head"
    tiny_variants = {"widths": {"n_head": [4, 2, 6], "n_head_kv": [2, 1, 3], "n_ff": [96, 128, 192]}}


class PanguEmbedded(Decoder, name="pangu-embedded"):
    """openPangu Embedded: biases in attention. Frequencies' factors do nothing, as in llama.cpp."""

    ignored = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    rope = NEOX
    output_bias = True


class SeedOss(Decoder, name="seed_oss", ffn_norm="post_attention_norm", rope=NEOX):
    """Seed-OSS: Llama rotated by halves; the norm before the FFN goes by another name."""


class Ernie45(Decoder, name="ernie4_5", ignored=("attn_output.bias",)):
    """ERNIE 4.5, dense. A bias of the attention's output does nothing, as in llama.cpp."""


class PaddleOCR(Decoder, name="paddleocr", keys={"rope_sections": REQUIRED}, rope=MROPE, output_bias=None):
    """PaddleOCR-VL, the text part: rotation by time, height and width."""
