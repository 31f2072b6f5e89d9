"""Tiny random models of any architecture, for tests: small enough to make anew each time, and llama.cpp loads them too.

This file owns how a declaration (keys and tensor table) is turned into a file with made-up values. The values are
such that every tensor moves the logits. It needs no model and no network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ggufpy import arch
from ggufpy.arch import Config, Decoder, TensorSpec
from ggufpy.gguf import GGMLType, GGUFWriter
from ggufpy.types import quantize

__all__ = ["variants", "write_tiny_model"]

TOKENS = [
    "<|bos|>", "<|eos|>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *".,:;!?'-()", "Ġ", "Ċ",
    "th", "Ġt", "Ġa", "in", "er", "Ġth", "an", "re", "on", "Ġs", "Ġw", "Ġthe", "ou", "it",
]  # fmt: skip
MERGES = [
    "t h", "Ġ t", "Ġ a", "i n", "e r", "Ġ th", "a n", "r e", "o n", "Ġ s", "Ġ w", "Ġt he", "Ġth e", "o u", "i t",
]  # fmt: skip
CONTROL, NORMAL = 3, 1
SHAPE: dict[str, Any] = {
    "n_ctx_train": 1024, "n_embd": 128, "n_layer": 3, "n_ff": 192, "n_head": 4, "n_head_kv": 2, "norm_rms_eps": 1e-5,
    "norm_eps": 1e-5,
}  # fmt: skip
K_QUANT_SHAPE = {"n_embd": 256, "n_ff": 512}


def variants(name: str) -> dict[str, dict[str, Any]]:
    """List the variants of an architecture that change its graph: a label and the keywords for `write_tiny_model`."""
    declaration = arch.find(name)
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "separate-output": {"tied": False},
        "biases": {"bias": True},
        "fused": {"fused_qkv": True},
        "fused-biases": {"fused_qkv": True, "bias": True},
        "scales": {"scale": True, "bias": True},
        "no-gqa": {"n_head_kv": 4},
        "one-kv-head": {"n_head_kv": 1},
        "linear": {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        "yarn": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_ctx_orig_yarn": 64},
        "no-scaling": {"rope_scaling_type": "none", "rope_scaling_factor": 4.0},
        "ignored-keys": {"extra": {f"{name}.attention.scale": 0.25, f"{name}.expert_weights_scale": 2.0}},
    }
    if declaration.rope_factors:
        found["rope-factors"] = {"rope_factors": True}
        found["longrope"] = {"rope_scaling_type": "longrope", "rope_factors": True, "n_ctx_orig_yarn": 2048}
        found["longrope-long"] = {"rope_scaling_type": "longrope", "rope_factors": True, "n_ctx_orig_yarn": 64}
    if declaration.moe:
        found["experts"] = {"n_expert": 4, "n_expert_used": 2}
        found["one-expert"] = {"n_expert": 4, "n_expert_used": 1}
        found["ungated-experts"] = {"n_expert": 4, "n_expert_used": 2, "gated": False, "scale": True}
    if "n_swa" in declaration.keys:
        found["window"] = {"n_swa": 16, "n_layer": declaration.swa_period + 1}
        found["window-base"] = {"n_swa": 16, "n_layer": 3, "rope_freq_base_swa": 500.0, "swa_pattern": 2}
        found["window-array"] = {"n_swa": 24, "n_layer": 3, "swa_pattern": [True, False, True]}
    if "final_logit_softcapping" in declaration.keys:
        found["softcap"] = {"final_logit_softcapping": 5.0}
    for type in ("f16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_nl", "mxfp4"):
        found[type] = {"type": type}
    return found


def write_tiny_model(
    name: str, path: str | os.PathLike[str], *, seed: int = 0, type: str = "f32", **variant: Any
) -> Path:
    """Write a small random GGUF of an architecture to `path` and return the path.

    `type` is that of the matrices; vectors stay f32. Variants: any field of `Config` by name, and

    tied          False writes an output matrix of its own      bias      True writes all optional biases
    fused_qkv     True writes one q, k, v matrix                scale     True writes all optional scales
    rope_factors  True writes rope frequencies' factors         gated     False leaves out the experts' gates
    swa_pattern   the window pattern, a period or a bool for each layer
    extra         more metadata, by its full key

    The vocabulary has 64 tokens: two control tokens, single characters and a few merges. Raises ValueError for an
    unknown variant, UnsupportedArchitectureError for an unknown architecture.
    """
    declaration = arch.find(name)
    switches = {key: variant.pop(key) for key in list(variant) if key in _SWITCHES}
    unknown = set(variant) - {f.name for f in fields(Config)}
    if unknown:
        raise ValueError(f"unknown variants: {', '.join(sorted(unknown))}")
    kind = GGMLType[type.upper()]
    shape = SHAPE | dict(declaration.tiny) | (K_QUANT_SHAPE if kind.block_size > 32 else {}) | variant
    metadata = _metadata(declaration, shape, switches)
    config = declaration.config(metadata)
    writer = GGUFWriter(path)
    for key, value in metadata.items():
        writer.add(key, value)
    rng = np.random.default_rng(seed)
    for spec in _chosen(declaration, config, switches):
        values = _values(spec, rng)
        if len(spec.shape) > 1 and not (spec.indexed or spec.f32) and kind != GGMLType.F32:
            writer.add_tensor(spec.name, quantize(values, kind), type=kind, shape=values.shape)
        else:
            writer.add_tensor(spec.name, values)
    writer.write()
    return Path(path)


_SWITCHES = {"tied", "bias", "fused_qkv", "scale", "rope_factors", "gated", "swa_pattern", "extra"}


def _metadata(declaration: type[Decoder], shape: Mapping[str, Any], switches: Mapping[str, Any]) -> dict[str, Any]:
    keys = {f.name: f.metadata["key"].name for f in fields(Config) if "key" in f.metadata}
    metadata: dict[str, Any] = {"general.architecture": declaration.name, "general.name": f"tiny {declaration.name}"}
    for field, value in shape.items():
        metadata[f"{declaration.name}.{keys[field]}"] = value
    if "swa_pattern" in switches:
        metadata[f"{declaration.name}.attention.sliding_window_pattern"] = switches["swa_pattern"]
    return metadata | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (len(TOKENS) - 2),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **switches.get("extra", {}),
    }


def _chosen(declaration: type[Decoder], config: Config, switches: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """Choose from the tensor table what a variant's file has."""
    fused = [f"blk.{il}.attn_qkv.weight" for il in range(config.n_layer)] if switches.get("fused_qkv") else []
    for spec in declaration.tensors(config, fused):
        name = spec.name
        if not spec.optional:
            yield spec
        elif name == "output.weight":
            if not switches.get("tied", True):
                yield spec
        elif name.endswith(".bias"):
            separate_beside_fused = fused and any(f".attn_{role}." in name for role in "qkv")
            if switches.get("bias") and not separate_beside_fused:
                yield spec
        elif name.endswith(".scale"):
            exists = switches.get("gated", True) or "ffn_gate_exps" not in name
            if switches.get("scale") and exists:
                yield spec
        elif "rope_f" in name:
            if switches.get("rope_factors"):
                yield spec
        elif switches.get("gated", True):
            yield spec


def _values(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draw values of a size that keeps activations near one, so that every tensor matters and nothing saturates."""
    shape = spec.shape[::-1]
    noise = rng.standard_normal(shape)
    if "rope_f" in spec.name or spec.name.endswith(".scale"):
        values = np.exp(0.3 * noise)
    elif spec.name.endswith(".bias"):
        values = 0.2 * noise
    elif len(shape) == 1:
        values = 1 + 0.2 * noise
    elif spec.indexed:
        values = noise / np.sqrt(8)
    else:
        values = noise * 1.5 / np.sqrt(shape[-1])
    return values.astype(np.float32)
