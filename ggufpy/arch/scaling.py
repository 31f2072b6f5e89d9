"""Numbers that llama.cpp computes in single precision, the parameters of rotation among them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ggufpy.arch.config import Config

__all__ = ["Rope", "f32", "inv_sqrt"]


def f32(x: float) -> float:
    """Round to single precision, in which llama.cpp computes its constants."""
    return float(np.float32(x))


def inv_sqrt(n: float) -> float:
    """Compute 1/sqrt(n) in single precision."""
    return float(np.float32(1.0) / np.sqrt(np.float32(n)))


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation's parameters for a context, the same for all layers (llama.cpp's cparams)."""

    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float

    @classmethod
    def of(cls, c: Config) -> Rope:
        """Derive the parameters as llama_context does, in single precision."""
        one, tenth = np.float32(1.0), np.float32(0.1)
        factor = np.float32(c.rope_scaling_factor)
        freq_scale = one / factor if factor and c.rope_scaling_type != "none" else one
        ext_factor = c.yarn_ext_factor if c.yarn_ext_factor >= 0 else float(c.rope_scaling_type == "yarn")
        attn_factor = np.float32(c.yarn_attn_factor)
        if ext_factor:
            stretch = one / freq_scale
            log = np.float32(math.log(stretch))
            attn_factor = _mscale(stretch, log, one)
            if c.rope_yarn_log_mul:
                attn_factor = _mscale(stretch, log, np.float32(c.yarn_mscale))
                attn_factor /= _mscale(stretch, log, np.float32(c.rope_yarn_log_mul))
            attn_factor *= one / (one + tenth * log)  # ggml multiplies by this itself
        attn_factor *= np.float32(c.rope_attn_factor)
        return cls(
            c.n_ctx_orig_yarn, f32(c.rope_freq_base), float(freq_scale), f32(ext_factor), float(attn_factor),
            f32(c.yarn_beta_fast), f32(c.yarn_beta_slow),
        )  # fmt: skip


def _mscale(stretch: np.float32, log: np.float32, m: np.float32) -> np.float32:
    scale: np.float32 = np.float32(0.1) * m * log + np.float32(1.0)
    return np.float32(1.0) if stretch <= 1 else scale
