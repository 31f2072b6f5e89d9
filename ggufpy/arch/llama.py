"""Llama, the models converted to its name (Llama 1-3, Mistral, Mixtral, SmolLM, Yi and others), and near relatives.

`llama.attention.scale` and `llama.expert_weights_scale` are not read: llama.cpp ignores them for this architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggufpy.arch.config import REQUIRED, Config
from ggufpy.arch.decoder import Decoder, Has, Moe, f32
from ggufpy.graph import Tensor

__all__ = [
    "Arcee", "InternLM2", "Llama", "Llama4", "MainCoder", "Mistral3", "Refact", "SmolLM3", "XVerse",
]  # fmt: skip

WINDOW = 8192
N_EXPERT_MAVERICK = 128


class Llama(Decoder):
    """The common decoder with every option it has."""

    name = "llama"
    rope_factors = "scaling"
    output_bias = None
    ffn_bias = None
    ffn_scale = True
    moe = Moe(required=False, gate=None, scale=True)


class Mistral3(Llama):
    """Ministral 3 and Mistral Small 3: YaRN to the file's measures; queries grow with the logarithm of the position."""

    name = "mistral3"
    keys = {"attn_temperature_scale": 0.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "rope_yarn_log_mul": 0.0}


class Arcee(Decoder):
    """Arcee (AFM): no gate, and squared ReLU."""

    name = "arcee"
    rope_factors = "freqs"
    ffn_gate = False
    activation = "relu2"


class XVerse(Decoder):
    """XVERSE: the output matrix is always one of its own."""

    name = "xverse"
    tie = False


class InternLM2(XVerse):
    """InternLM 2 and 3."""

    name = "internlm2"


class MainCoder(Decoder):
    """Maincoder: norms of queries and keys after their rotation."""

    name = "maincoder"
    qk_norm = "rotated"


class SmolLM3(Decoder):
    """SmolLM 3: every fourth layer knows no positions."""

    name = "smollm3"
    no_rope_step = 4


class Refact(Decoder):
    """Refact: ALiBi instead of rotation. Biases in a file do nothing, as in llama.cpp."""

    name = "refact"
    ignored = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias", "rope_freqs.weight")
    rope = None
    alibi = 8.0


class Llama4(Decoder):
    """Llama 4: windows that do not slide in three layers of four; the fourth knows no positions but for a temperature.

    Queries and keys are normalized after their rotation (not in the 128-expert model); the experts' inputs are weighed.
    """

    name = "llama4"
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
        yield from super().check()
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
