"""Tiny random models of any architecture, for tests: small enough to make anew each time, and llama.cpp loads them too.

This file owns how a declaration (keys and tensor table) is turned into a file with made-up values. The values are
such that every tensor moves the logits. It needs no model and no network.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ggufpy import arch
from ggufpy.arch import Config, Decoder, TensorSpec
from ggufpy.arch.config import REQUIRED, Key
from ggufpy.arch.decoder import GATING
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
    "n_ctx_train": 1024, "n_embd": 128, "n_layer": 3, "n_ff": 192, "n_head": 4, "n_head_kv": 2,
}  # fmt: skip
K_QUANT_SHAPE = {"n_embd": 256, "n_ff": 512, "n_ff_exp": 256, "n_ff_shexp": 256, "n_ff_chexp": 256}
EXPERTS = {"n_expert": 8, "n_expert_used": 2}
VALUES: dict[str, Any] = {
    "norm_rms_eps": 1e-5, "norm_eps": 1e-5, "clamp_kqv": 0.7, "attn_temperature_scale": 0.3, "yarn_beta_fast": 8.0,
    "yarn_beta_slow": 2.0, "rope_yarn_log_mul": 0.7, "attention_scale": 0.25, "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0, "logit_scale": 1.5, "residual_scale": 0.5, "embedding_scale": 3.0,
    "rope_finetuned": False, "rope_sections": [4, 6, 6, 0], "rope_scaling_alpha": 50.0, "max_alibi_bias": 4.0,
    "n_swa": 16, "n_ff_exp": 64, "n_ff_shexp": 160, "n_expert_shared": 2, "n_layer_dense_lead": 1,
    "interleave_moe_layer_step": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2,
    "n_ff_chexp": 96, "n_group_experts": 2, "expert_group_scale": 0.7, "n_rot_swa": 16, "attn_value_scale": 0.6,
    "attn_output_scale": 0.2, "yarn_ext_factor": 0.7, "yarn_attn_factor": 1.3,
    "swiglu_clamp_exp": [0.5, 0.0, 0.3], "swiglu_clamp_shexp": [0.3, 0.4, 0.0], "swin_norm": True,
    "xielu_alpha_n": [0.9, 0.5, 0.7], "xielu_alpha_p": [0.6, 0.8, 0.7], "xielu_beta": 0.4, "xielu_eps": -1e-6,
}  # fmt: skip
"""Values that change the logits, for keys that some architectures read."""
BESIDE: dict[str, dict[str, Any]] = {
    "n_ff_shexp": EXPERTS,
    "attn_temperature_scale": {"n_ctx_orig_yarn": 8},
    "yarn_beta_fast": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_ctx_orig_yarn": 64},
    "yarn_beta_slow": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_ctx_orig_yarn": 64},
    "rope_yarn_log_mul": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_ctx_orig_yarn": 64},
}
"""What such a key needs beside it."""
TYPES = ("f16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_nl", "mxfp4")
EVERY_TYPE = ("llama", "qwen2", "qwen3", "gemma3")
"""Architectures that are tried with every type; the others share them out."""


def variants(name: str) -> dict[str, dict[str, Any]]:
    """List the variants of an architecture that change its graph: a label and the keywords for `write_tiny_model`."""
    declaration = arch.find(name)
    table = list(declaration(declaration.config(_metadata(declaration, _shape(declaration), {}))).tensors())
    optional = {spec.name.rpartition(".")[2] for spec in table if spec.optional and spec.name.startswith("blk.")}
    n_head = _shape(declaration)["n_head"]
    found: dict[str, dict[str, Any]] = {"plain": {}}
    if declaration.grouped:
        found |= {"no-gqa": {"n_head_kv": n_head}, "one-kv-head": {"n_head_kv": 1}}
    if declaration.logits and declaration.tie is None:
        found["separate-output"] = {"tied": False}
    if "bias" in optional or declaration.head_bias is None:
        found["biases"] = {"bias": True, "tied": False}
    if declaration.qkv_fused is None:
        found["fused"] = {"fused_qkv": True}
        if declaration.qkv_bias is None:
            found["fused-biases"] = {"fused_qkv": True, "bias": True}
            found["fused-separate-biases"] = {"fused_qkv": True, "separate_bias": True}
    for role in dict.fromkeys(role for spec in table if spec.optional and (role := _role(spec.name))):
        found[f"without-{role}"] = {"without": role}
    if "scale" in optional:
        found["scales"] = {"scale": True, "bias": True}
    for variants_of in (_rope_variants, _window_variants, _expert_variants):
        found |= variants_of(declaration)
    for field, default in declaration.keys.items():
        if field in VALUES and default is not REQUIRED:
            found[field.replace("_", "-")] = {field: VALUES[field], **BESIDE.get(field, {})}
    if declaration.split_heads:
        found["split-heads"] = {"n_embd_head_k": 32, "n_embd_head_v": 16}
    if declaration.nextn:
        found["nextn"] = {"n_layer": 4, "n_layer_nextn": 1}
    if name == "llama":
        keys = {"llama.attention.scale": 0.25, "llama.expert_weights_scale": 2.0}
        found["ignored-keys"] = {"extra": keys}
    if "n_swa" in declaration.keys:
        found.pop("n-swa", None)
    for type in TYPES if name in EVERY_TYPE else (TYPES[zlib.crc32(name.encode()) % len(TYPES)],):
        found[type] = {"type": type}
    found |= {label: dict(variant) for label, variant in declaration.tiny_variants.items() if variant is not None}
    return {label: v for label, v in found.items() if declaration.tiny_variants.get(label, v) is not None}


def _rope_variants(declaration: type[Decoder]) -> dict[str, dict[str, Any]]:
    if declaration.rope is None:
        return {}
    found: dict[str, dict[str, Any]] = {
        "linear": {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        "yarn": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_ctx_orig_yarn": 64},
        "no-scaling": {"rope_scaling_type": "none", "rope_scaling_factor": 4.0},
    }
    if declaration.partial_rope:
        found["partial-rope"] = {"n_rot": 16}
    if declaration.rope_factors in ("freqs", "scaling"):
        found["rope-factors"] = {"rope_factors": True}
    if declaration.rope_factors in ("long", "scaling"):
        longrope = {"rope_scaling_type": "longrope", "rope_factors": True, "rope_attn_factor": 1.2}
        found["longrope"] = longrope | {"n_ctx_orig_yarn": 2048}
        found["longrope-long"] = longrope | {"n_ctx_orig_yarn": 64}
    return found


def _window_variants(declaration: type[Decoder]) -> dict[str, dict[str, Any]]:
    if "n_swa" not in declaration.keys:
        return {}
    n_layer = {**SHAPE, **declaration.tiny}["n_layer"]
    found: dict[str, dict[str, Any]] = {
        "window": {"n_swa": 16, "n_layer": (declaration.swa_period or 2) + 1},
        "window-scaled": {"n_swa": 16, "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_ctx_orig_yarn": 64},
        "window-no-scaling": {"n_swa": 16, "rope_scaling_type": "none", "rope_scaling_factor": 4.0},
        "window-array": {"n_swa": 24, "swa_pattern": [il % 2 == 0 for il in range(n_layer)]},
    }
    if declaration.swa_period is not None:
        found["window-pattern"] = {"n_swa": 16, "swa_pattern": 2}
    if "rope_freq_base_swa" in declaration.keys:
        pattern = {} if declaration.swa_period is None else {"swa_pattern": 2}
        found["window-base"] = {"n_swa": 16, "rope_freq_base_swa": 500.0, **pattern}
    return found


def _expert_variants(declaration: type[Decoder]) -> dict[str, dict[str, Any]]:
    moe = declaration.moe
    if not moe:
        return {}
    found: dict[str, dict[str, Any]] = {
        "one-expert": EXPERTS | {"n_expert_used": 1},
        "expert-groups": EXPERTS | {"n_expert_groups": 4, "n_group_used": 2},
    }
    if not moe.required:
        found["experts"] = EXPERTS
    if moe.gate is None:
        found["ungated-experts"] = EXPERTS | {"gated": False, "scale": moe.scale}
    if moe.fused:
        found["fused-experts"] = EXPERTS | {"has": "ffn_gate_up_exps.weight"}
    if "expert_gating_func" in declaration.keys:
        found |= {f"gating-{gating.replace('_', '-')}": {"expert_gating_func": n} for n, gating in GATING.items()}
    return found


def write_tiny_model(
    name: str, path: str | os.PathLike[str], *, seed: int = 0, type: str = "f32", **variant: Any
) -> Path:
    """Write a small random GGUF of an architecture to `path` and return the path.

    `type` is that of the matrices whose rows fill its blocks; all else is f32. Variants: any field of
    `Config` by name, and

    tied          False writes an output matrix of its own      bias      True writes all optional biases
    fused_qkv     True writes one q, k, v matrix                scale     True writes all optional scales
    separate_bias True writes three biases beside that matrix
    or_shape      True takes the second shape where a tensor may have two
    rope_factors  True writes rope frequencies' factors         gated     False leaves out the experts' gates
    has           writes layers in the form that a tensor of this name, as in a layer, makes them have
    without       leaves out other tensors that files may lack, named as in a layer, without suffix, with blanks between
    classifier    True writes what scores pooled embeddings
    swa_pattern   the window pattern, a period or a bool for each layer
    extra         more metadata, by its full key

    The vocabulary has 64 tokens: two control tokens, single characters and a few merges. Raises ValueError for an
    unknown variant or type, UnsupportedArchitectureError for an unknown architecture.
    """
    declaration = arch.find(name)
    switches = {key: variant.pop(key) for key in list(variant) if key in _SWITCHES}
    unknown = set(variant) - {f.name for f in fields(Config)}
    if unknown:
        raise ValueError(f"unknown variants: {', '.join(sorted(unknown))}")
    if type.upper() not in GGMLType.__members__:
        raise ValueError(f"unknown type {type!r}: expected one of {', '.join(GGMLType.__members__).lower()}")
    kind = GGMLType[type.upper()]
    shape = _shape(declaration) | variant
    if kind.block_size > 32:
        shape |= {field: n for field, n in K_QUANT_SHAPE.items() if field in shape or field in declaration.keys}
    metadata = _metadata(declaration, shape, switches)
    decoder = declaration(declaration.config(metadata))
    unscaled = decoder.attention_scale() == 1.0
    writer = GGUFWriter(path)
    for key, value in metadata.items():
        writer.add(key, value)
    rng = np.random.default_rng(seed)
    for spec in _chosen(decoder, switches):
        values = _values(spec, rng)
        if unscaled and spec.name.endswith("attn_q_norm.weight"):  # else each token would look at one other only
            values *= spec.shape[0] ** -0.5
        fits = len(spec.shape) > 1 and spec.shape[0] % kind.block_size == 0
        if fits and not (spec.indexed or spec.f32) and kind != GGMLType.F32:
            writer.add_tensor(spec.name, quantize(values, kind), type=kind, shape=values.shape)
        else:
            writer.add_tensor(spec.name, values)
    writer.write()
    return Path(path)


_SWITCHES = {
    "tied", "bias", "separate_bias", "fused_qkv", "scale", "rope_factors", "gated", "or_shape", "has", "without",
    "swa_pattern", "extra", "classifier",
}  # fmt: skip


def _shape(declaration: type[Decoder]) -> dict[str, Any]:
    """Return the fields every small model of an architecture has."""
    required = {"norm_rms_eps" if declaration.norm == "rms" else "norm_eps": REQUIRED, **declaration.keys}
    experts = EXPERTS if declaration.moe and declaration.moe.required else {}
    values = {**VALUES, **declaration.tiny}
    needed = {f: values[f] for f, default in required.items() if default is REQUIRED}
    return SHAPE | experts | needed | dict(declaration.tiny)


def _metadata(declaration: type[Decoder], shape: Mapping[str, Any], switches: Mapping[str, Any]) -> dict[str, Any]:
    tokens = TOKENS + [f"<{i}>" for i in range(len(TOKENS), shape.get("n_vocab", 0))]
    keys: dict[str, Key] = {f.name: f.metadata["key"] for f in fields(Config) if "key" in f.metadata}
    metadata: dict[str, Any] = {"general.architecture": declaration.name, "general.name": "tiny"}
    for field, value in shape.items():
        if field != "n_vocab":
            key = keys[field]
            metadata[f"{declaration.name}.{key.name}" if key.prefixed else key.name] = value
    pattern = switches.get("swa_pattern")
    if declaration.swa_period is None and pattern is None:
        pattern = [il % 2 == 0 for il in range(shape["n_layer"])]
    if pattern is not None:
        metadata[f"{declaration.name}.attention.sliding_window_pattern"] = pattern
    return metadata | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **switches.get("extra", {}),
    }


def _chosen(decoder: Decoder, switches: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """Choose from the tensor table what a variant's file has."""
    config = decoder.c
    names = {spec.name for spec in decoder.tensors()}
    without = switches.get("without", "").split()
    names = {name for name in names if _role(name) not in without}
    for name in ("attn_qkv.weight" if switches.get("fused_qkv") else "", switches.get("has", "")):
        names |= {f"blk.{il}.{name}" for il in range(config.n_layer)}
    for il in range(config.n_layer, config.n_layer + config.n_layer_nextn):
        for spec in decoder.nextn_tensors():
            if not spec.optional:
                yield replace(spec, name=f"blk.{il}.{spec.name}")
    for spec in decoder.tensors(names):
        name = spec.name
        if spec.or_shape and switches.get("or_shape"):
            spec = replace(spec, shape=spec.or_shape)
        if not spec.optional:
            yield spec
        elif name.startswith("cls."):
            if switches.get("classifier"):
                yield spec
        elif name == "output.weight":
            if not switches.get("tied", True):
                yield spec
        elif name.endswith(".bias"):
            beside_fused = switches.get("fused_qkv") and any(f".attn_{role}." in name for role in "qkv")
            if switches.get("separate_bias" if beside_fused else "bias"):
                yield spec
        elif name.endswith(".scale"):
            exists = switches.get("gated", True) or "ffn_gate_exps" not in name
            if switches.get("scale") and exists:
                yield spec
        elif "rope_f" in name:
            if switches.get("rope_factors"):
                yield spec
        elif switches.get("gated", True) and _role(name) not in without:
            yield spec


def _role(name: str) -> str:
    """Name the part of a model that an optional tensor is, unless that has a switch of its own."""
    if name.endswith((".bias", ".scale")) or name.startswith(("rope_f", "output.", "cls.")) or "ffn_gate_exps" in name:
        return ""
    part = name.split(".", 2 if name.startswith("blk.") else 0)[-1]
    return part.rpartition(".")[0] or part


def _values(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draw values of a size that keeps activations near one, so that every tensor matters and nothing saturates."""
    shape = spec.shape[::-1]
    noise = rng.standard_normal(shape)
    if "rope_f" in spec.name or spec.name.endswith(".scale"):
        values = np.exp(0.3 * noise)
    elif spec.name.endswith("ssm_a"):  # states fade, slowly enough to matter
        values = -np.exp(noise - 2)
    elif spec.name.endswith(".bias"):
        values = 0.2 * noise
    elif len(shape) == 1:
        values = 1 + 0.2 * noise
    elif spec.indexed:
        values = noise / np.sqrt(8)
    else:
        values = noise * 1.5 / np.sqrt(shape[-1])
    return values.astype(np.float32)
