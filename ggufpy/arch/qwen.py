"""Qwen 2 and 3: rotation by halves, with biases of the queries, keys and values or with norms of queries and keys."""

from __future__ import annotations

from typing import ClassVar

from ggufpy.arch.decoder import NEOX, Decoder, Presence

__all__ = ["Qwen2", "Qwen3"]


class Qwen2(Decoder):
    """Qwen 2 and 2.5: biases of q, k and v, and of the output matrix where the file has one."""

    name = "qwen2"
    rope = NEOX
    head_bias: ClassVar[Presence] = None
    ffn_scale = False


class Qwen3(Decoder):
    """Qwen 3: each head's queries and keys are normalized."""

    name = "qwen3"
    ignored = ("cls.output.weight",)
    rope = NEOX
    qk_norm = "head"
