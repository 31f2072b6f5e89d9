"""How queries and keys learn where their tokens stand: by rotation, and by a temperature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ggufpy.arch.scaling import Rope, f32
from ggufpy.arch.steps import Steps
from ggufpy.arch.tensors import TensorSpec
from ggufpy.gguf import GGMLType
from ggufpy.graph import Tensor

__all__ = ["IMROPE", "MROPE", "NEOX", "NORM", "Rotation"]

NORM, NEOX = 0, 2  # which values of a head rotate together: neighbours, or those half a head apart
MROPE, IMROPE = 8, 40  # as NEOX, by four positions a token: in sections of a head, or interleaved


class Rotation(Steps):
    """Rotation by positions, of windowed layers in their own way, and scaling of the queries by positions."""

    rope: ClassVar[int | None] = NORM
    partial_rope: ClassVar[bool] = False
    """`rope.dimension_count` may be less than a head's width."""
    rope_factors: ClassVar[str] = ""
    """Frequencies' factors that a file may bring: "freqs", "long" (and short ones), or "scaling": as its type says."""
    swa_factors: ClassVar[bool] = True  # of windowed layers too
    full_rope: ClassVar[bool] = True  # False: only layers with a window rotate
    no_rope_step: ClassVar[int] = 0
    """The last of each run of that many layers does not know positions."""
    swa_rope: ClassVar[str] = "own"
    """How windowed layers rotate: by their "own" base, if the file has one, and unscaled but for YaRN; by that base and
    the file's scale ("scaled"); by that base without any scaling ("plain"); or as all layers do ("same")."""
    q_scale: Tensor | None = None

    def rotates(self, il: int) -> bool:
        """Say whether a layer's queries and keys know their positions."""
        c, step = self.c, self.no_rope_step
        if self.rope is None or not c.rope_finetuned or (c.rope_pattern and not c.rope_pattern[il]):
            return False
        return (self.full_rope or c.is_swa[il]) and not (step and (il + 1) % step == 0)

    def rope_mode(self) -> int | None:
        """Return the kind of rotation; sections in the file of a NORM or NEOX architecture make it MROPE."""
        return MROPE if self.rope in (NORM, NEOX) and min(self.c.rope_sections[:2], default=0) > 0 else self.rope

    def n_planes(self) -> int:
        """Return how many positions a token has; of four, text uses the first three alike and leaves the last 0."""
        return 4 if self.rope_mode() in (MROPE, IMROPE) else 1

    def factor_tensors(self) -> Iterator[TensorSpec]:
        """List the tensors of frequencies' factors that a file may have."""
        c, kind = self.c, self.rope_factors
        if kind == "scaling":
            kind = "long" if c.rope_scaling_type == "longrope" else "freqs"
        names = {"": (), "freqs": ("rope_freqs",), "long": ("rope_factors_long", "rope_factors_short")}[kind]
        n_rot = max(c.n_rot, c.n_rot_swa if any(c.is_swa) else 0)
        for name in names:
            yield TensorSpec(f"{name}.weight", (n_rot // 2,), optional=True)

    def rotate(self, x: Tensor, il: int, *, unscaled: bool = False) -> Tensor:
        """Rotate heads by their positions (ggml_rope_ext, ggml_rope_multi), and do no more if `unscaled`."""
        mode, r = self.rope_mode(), self.rope_of(il)
        if unscaled:  # what ggml multiplies by itself becomes one
            r = replace(r, attn_factor=1 / (1 - 0.1 * math.log(r.freq_scale)) if r.ext_factor else 1.0)
        assert mode is not None
        scaling = r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow
        at, factors, n = self.inputs.positions, self.factors(il), self.n_rot(il)
        if mode in (MROPE, IMROPE):
            return self.g.rope_multi(x, at, factors, n, self.c.rope_sections, mode, *scaling)
        return self.g.rope_ext(x, at, factors, n, mode, *scaling)

    def n_rot(self, il: int) -> int:
        """Return how many values of a head rotate."""
        return self.c.n_rot_swa or self.c.n_rot if self.c.is_swa[il] else self.c.n_rot

    def rope_of(self, il: int) -> Rope:
        """Return a layer's rotation: windowed layers may have a base and a scale of their own."""
        r, c = self.inputs.rope, self.c
        if not c.is_swa[il] or self.swa_rope == "same":
            return r
        base = f32(c.rope_freq_base_swa) if c.rope_freq_base_swa else r.freq_base
        if self.swa_rope == "plain":
            return replace(r, freq_base=base, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
        factor = np.float32(c.rope_scaling_factor)  # whatever the type of scaling
        scaled = factor and self.swa_rope == "scaled"
        return replace(r, freq_base=base, freq_scale=float(np.float32(1) / factor) if scaled else 1.0)

    def factors(self, il: int) -> Tensor | None:
        """Return the per-frequency divisors the file brings, if any."""
        if self.c.is_swa[il] and not self.swa_factors:
            return None
        if "rope_freqs.weight" in self.w:
            return self.w["rope_freqs.weight"]
        return self.w.get(f"rope_factors_{'long' if self.inputs.use_long_factors else 'short'}.weight")

    def tempered(self, q: Tensor, il: int) -> Tensor:
        """Scale the queries by their positions, where the architecture does."""
        if not self.temperature(il)[0]:
            return q
        if self.q_scale is None:
            scale, length, offset = (np.float32(x) for x in self.temperature(il))

            def values(positions: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
                steps = np.floor((positions.astype(np.float32) + offset) / length).astype(np.float64)
                scales: npt.NDArray[np.float32] = (np.log(steps + 1.0) * float(scale) + 1.0).astype(np.float32)
                return scales.reshape(-1, 1, 1)

            self.q_scale = self.input("inp_attn_scale", GGMLType.F32, 1, 1, q.ne[2], values=values)
        return self.g.mul(q, self.q_scale)

    def temperature(self, il: int) -> tuple[float, float, float]:
        """Return s (0: none), length and offset; queries grow by log(floor((position + offset) / length) + 1) s + 1."""
        c = self.c
        return (c.attn_temperature_scale, c.attn_temperature_length or c.n_ctx_orig_yarn, 0.0)
