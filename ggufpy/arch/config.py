"""Hyper-parameters: which metadata keys a model has, what they must be, and their values.

This file owns the keys that architectures share and the reading of them. It knows no tensors and no graph.
Field names are llama.cpp's `hparams` names, key names are GGUF's without the architecture's prefix. An architecture
says which of the optional fields it reads, and with what default: `{"norm_rms_eps": REQUIRED, "n_swa": 0}`. A default
may be a function of the fields that all architectures read, given by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ggufpy.errors import GGUFError

__all__ = ["REQUIRED", "Config", "Key"]

MAX_LAYERS = 512
MAX_EXPERTS = 1024
INT_MAX = 2**31 - 1
TINY, HUGE = 1.1754944e-38, 3.4028235e38  # the normal numbers of single precision

REQUIRED: Any = object()
"""The default of a key that has none: a file without the key is refused."""


@dataclass(frozen=True, slots=True)
class Key:
    """One metadata key: its name without the prefix, its range, and whether it may differ from layer to layer."""

    name: str
    low: float = 0
    high: float = INT_MAX
    per_layer: bool = False
    prefixed: bool = True  # with the architecture's name
    count: int = 0  # an array of exactly so many values
    choices: tuple[str, ...] = ()
    zero_is_off: bool = False  # 0 is allowed below the range and means what an absent key means


NUMBERS: dict[str, Any] = {"low": -HUGE, "high": HUGE, "per_layer": True, "prefixed": False}
SCALE: dict[str, Any] = {"low": TINY, "high": HUGE, "zero_is_off": True}


def _always(name: str, default: Any, **limits: Any) -> Any:
    """Declare a field that every architecture reads; a default of `REQUIRED` makes the key required."""
    return field(default=default, metadata={"key": Key(name, **limits)})


def _asked(name: str, off: Any, **limits: Any) -> Any:
    """Declare a field that only architectures naming it read; `off` is its value everywhere else."""
    return field(default=off, metadata={"key": Key(name, **limits), "asked": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The hyper-parameters of one model. Per-layer values are tuples with one entry per layer."""

    architecture: str = ""
    n_vocab: int = 0
    n_ctx_train: int = _always("context_length", REQUIRED, low=1)
    n_embd: int = _always("embedding_length", REQUIRED, low=1, high=2**20)
    n_layer: int = _always("block_count", REQUIRED, low=1, high=MAX_LAYERS)
    n_ff: tuple[int, ...] = _always("feed_forward_length", 0, per_layer=True)
    n_head: tuple[int, ...] = _always("attention.head_count", REQUIRED, per_layer=True)
    n_head_kv: tuple[int, ...] = _always("attention.head_count_kv", None, per_layer=True)
    n_embd_head_k: int = _always("attention.key_length", None, low=1, high=65536)
    n_embd_head_v: int = _always("attention.value_length", None, low=1, high=65536)
    n_rot: int = _always("rope.dimension_count", None, low=1, high=65536)
    n_expert: int = _always("expert_count", 0, high=MAX_EXPERTS)
    n_expert_used: int = _always("expert_used_count", 0, high=MAX_EXPERTS)
    causal_attn: bool = _always("attention.causal", True)
    rope_freq_base: float = _always("rope.freq_base", 10000.0, low=TINY, high=HUGE)
    rope_scaling_type: str = _always("rope.scaling.type", "linear", choices=("none", "linear", "yarn", "longrope"))
    rope_scaling_factor: float = _always("rope.scaling.factor", 0.0, **SCALE)
    rope_attn_factor: float = _always("rope.scaling.attn_factor", 1.0)
    n_ctx_orig_yarn: int = _always("rope.scaling.original_context_length", None, low=1)

    n_layer_nextn: int = _always("nextn_predict_layers", 0, high=MAX_LAYERS)
    n_expert_groups: int = _always("expert_group_count", 0, high=MAX_EXPERTS)
    n_group_used: int = _always("expert_group_used_count", 0, high=MAX_EXPERTS)
    pooling: int | None = _always("pooling_type", None, high=4)
    """What `enum llama_pooling_type` calls the way tokens' embeddings become one; None where the file does not say."""
    classifier_pooling: int | None = _always("classifier.pooling_type", None, high=4)
    n_labels: int = 1
    """The scores that a classifier gives."""
    n_layer_kv: int = 0
    """Layers from this one on keep nothing of their own, see `kv_layer`; 0 for none such."""
    is_swa: tuple[bool, ...] = ()
    swa_chunked: bool = False
    """Windows begin at multiples of `n_swa` and do not slide."""
    yarn_mscale: float = 1.0
    """How YaRN stretches what rotates, beside `rope_yarn_log_mul` for all."""

    norm_rms_eps: float = _asked("attention.layer_norm_rms_epsilon", 0.0, high=1.0)
    norm_eps: float = _asked("attention.layer_norm_epsilon", 0.0, high=1.0)
    n_swa: int = _asked("attention.sliding_window", 0)
    n_embd_head_k_swa: int = _asked("attention.key_length_swa", 0, low=1, high=65536)
    n_embd_head_v_swa: int = _asked("attention.value_length_swa", 0, low=1, high=65536)
    n_rot_swa: int = _asked("rope.dimension_count_swa", 0, high=65536)
    rope_freq_base_swa: float = _asked("rope.freq_base_swa", 0.0, low=TINY, high=HUGE)
    yarn_ext_factor: float = _asked("rope.scaling.yarn_ext_factor", -1.0, low=-1.0)
    yarn_attn_factor: float = _asked("rope.scaling.yarn_attn_factor", 1.0)
    yarn_beta_fast: float = _asked("rope.scaling.yarn_beta_fast", 32.0)
    yarn_beta_slow: float = _asked("rope.scaling.yarn_beta_slow", 1.0)
    rope_yarn_log_mul: float = _asked("rope.scaling.yarn_log_multiplier", 0.0)
    rope_scaling_alpha: float = _asked("rope.scaling.alpha", 0.0)
    rope_pattern: tuple[bool, ...] = _asked("attention.rope_pattern", (), per_layer=True)
    rope_finetuned: bool = _asked("rope.scaling.finetuned", True)
    rope_sections: tuple[int, ...] = _asked("rope.dimension_sections", (), count=4)
    attention_scale: float = _asked("attention.scale", 0.0)
    attn_output_scale: float = _asked("attention.output_scale", 0.0)
    attn_logit_softcapping: float = _asked("attn_logit_softcapping", 0.0)
    attn_value_scale: float = _asked("attention.value_scale", 0.0)
    n_layer_kv_shared: int = _asked("attention.shared_kv_layers", 0, high=MAX_LAYERS)
    attn_temperature_scale: float = _asked("attention.temperature_scale", 0.0)
    attn_temperature_length: int = _asked("attention.temperature_length", 0)
    n_lora_q: int = _asked("attention.q_lora_rank", 0, high=2**20)
    n_lora_kv: int = _asked("attention.kv_lora_rank", 0, low=1, high=2**20)
    n_embd_head_k_mla: int = _asked("attention.key_length_mla", 0, high=65536)
    n_embd_head_v_mla: int = _asked("attention.value_length_mla", 0, high=65536)
    xielu_alpha_n: tuple[float, ...] = _asked("xielu.alpha_n", (), **NUMBERS)
    xielu_alpha_p: tuple[float, ...] = _asked("xielu.alpha_p", (), **NUMBERS)
    xielu_beta: tuple[float, ...] = _asked("xielu.beta", (), **NUMBERS)
    xielu_eps: tuple[float, ...] = _asked("xielu.eps", (), **NUMBERS)
    swin_norm: bool = _asked("swin_norm", False)
    n_loops: int = _asked("num_loops", 1, low=1, high=MAX_LAYERS)
    skip_loop_final_norm: bool = _asked("skip_loop_final_norm", False)
    clamp_kqv: float = _asked("attention.clamp_kqv", 0.0)
    max_alibi_bias: float = _asked("attention.max_alibi_bias", 0.0)
    use_parallel_residual: bool = _asked("use_parallel_residual", True)
    embedding_scale: float = _asked("embedding_scale", 0.0)
    residual_scale: float = _asked("residual_scale", 0.0)
    logit_scale: float = _asked("logit_scale", 0.0, low=-3e38)
    final_logit_softcapping: float = _asked("final_logit_softcapping", 0.0, **SCALE)
    n_ff_exp: tuple[int, ...] = _asked("expert_feed_forward_length", (), per_layer=True)
    n_ff_shexp: int = _asked("expert_shared_feed_forward_length", 0)
    n_expert_shared: int = _asked("expert_shared_count", 0, high=MAX_EXPERTS)
    shortconv_l_cache: int = _asked("shortconv.l_cache", 0, low=2, high=2**10)
    ssm_d_conv: int = _asked("ssm.conv_kernel", 0, low=2, high=2**10)
    ssm_d_inner: int = _asked("ssm.inner_size", 0, low=1, high=2**20)
    ssm_d_state: int = _asked("ssm.state_size", 0, low=1, high=2**16)
    ssm_dt_rank: int = _asked("ssm.time_step_rank", 0, low=1, high=2**16)
    ssm_n_group: int = _asked("ssm.group_count", 0, low=1, high=2**16)
    is_recurrent: tuple[bool, ...] = _asked("attention.recurrent_layers", (), per_layer=True)
    full_attention_interval: int = _asked("full_attention_interval", 0, low=1, high=INT_MAX)
    n_layer_dense_lead: int = _asked("leading_dense_block_count", 0, high=MAX_LAYERS)
    interleave_moe_layer_step: int = _asked("interleave_moe_layer_step", 0, high=MAX_LAYERS)
    n_ff_chexp: int = _asked("expert_chunk_feed_forward_length", 0)
    n_group_experts: int = _asked("experts_per_group", 0, low=1, high=MAX_EXPERTS)
    expert_group_scale: float = _asked("expert_group_scale", 0.0)
    moe_every_n_layers: int = _asked("moe_every_n_layers", 0, high=MAX_LAYERS)
    hidden_activation: str = _asked("hidden_activation", "")
    n_embd_per_layer: int = _asked("embedding_length_per_layer_input", 0, high=2**20)
    n_token_types: int = _asked("tokenizer.ggml.token_type_count", 0, low=1, high=2**16, prefixed=False)
    dense_2_in: int = _asked("dense_2_feat_in", 0, high=2**20)
    dense_2_out: int = _asked("dense_2_feat_out", 0, high=2**20)
    dense_3_in: int = _asked("dense_3_feat_in", 0, high=2**20)
    dense_3_out: int = _asked("dense_3_feat_out", 0, high=2**20)
    swiglu_clamp_exp: tuple[float, ...] = _asked("swiglu_clamp_exp", (), per_layer=True)
    swiglu_clamp_shexp: tuple[float, ...] = _asked("swiglu_clamp_shexp", (), per_layer=True)
    expert_weights_scale: float = _asked("expert_weights_scale", 0.0)
    expert_weights_norm: bool = _asked("expert_weights_norm", False)
    expert_gating_func: int = _asked("expert_gating_func", 0, high=4)

    @property
    def is_mla(self) -> bool:
        """Say whether the cache has compressed keys only, of which values are a part."""
        return self.n_embd_head_k_mla > 0

    def kv_layer(self, il: int) -> int:
        """Return the layer whose keys and values a layer looks at: itself, or one of the last two that have any."""
        n = self.n_layer_kv
        return n - (2 if self.is_swa[il] else 1) if 0 < n <= il else il

    def head_widths(self, il: int) -> tuple[int, int]:
        """Return the widths of a head's keys and values in a layer."""
        k, v = (self.n_embd_head_k_swa, self.n_embd_head_v_swa) if self.is_swa[il] else (0, 0)
        return k or self.n_embd_head_k, v or self.n_embd_head_v

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        asked: Mapping[str, Any],
        *,
        swa_pattern: tuple[int | None, bool] = (0, False),
        check: Callable[[Config], Iterable[str]] | None = None,
        path: str = "",
    ) -> Config:
        """Read the keys of the file's architecture; `asked` maps the optional fields it reads to their defaults.

        `swa_pattern` is the architecture's pattern of windows where the file has none: of each run of that many layers
        the last one sees everything, or the first if the second item says so. `check` yields what else the architecture
        finds wrong. Raises one GGUFError that lists every key that is missing, mistyped or out of range.
        """
        architecture = metadata["general.architecture"]
        reader = _Reader(metadata, architecture)
        values: dict[str, Any] = {"architecture": architecture, "n_vocab": reader.n_vocab()}
        n_block = values["n_layer"] = reader.read(Key("block_count", low=1, high=MAX_LAYERS), int, REQUIRED) or 1
        for f in fields(cls):
            key: Key | None = f.metadata.get("key")
            if key is None or f.name == "n_layer" or (f.metadata.get("asked") and f.name not in asked):
                continue
            default = asked.get(f.name, f.default)
            if callable(default):
                default = None if reader.faults else default(values)  # it may count with what is missing
            values[f.name] = reader.read(key, _kind(f.type), default, n_block if key.per_layer else key.count)
        _derive(values, reader, swa_pattern)
        _leave_out_nextn(values, reader)
        config = cls(**values)
        faults = reader.faults or list(check(config) if check else ())
        if faults:
            raise GGUFError((f"{path}: " if path else "") + f"{architecture} model: " + "; ".join(faults))
        return config


def _kind(annotation: Any) -> type:
    """Name the Python type of one value of a field from its annotation (a string, as annotations are postponed)."""
    text = str(annotation)
    return next(kind for kind in (bool, int, float, str) if kind.__name__ in text)


class _Reader:
    """Reads typed values of one architecture and collects the faults instead of raising at the first."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.faults: list[str] = []

    def full_name(self, key: Key | str) -> str:
        name, prefixed = (key, True) if isinstance(key, str) else (key.name, key.prefixed)
        return f"{self.architecture}.{name}" if prefixed else name

    def fault(self, key: Key | str, expected: str, found: object) -> None:
        self.faults.append(f"{self.full_name(key)}: expected {expected}, found {_show(found)}")

    def n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, Sequence) and not isinstance(tokens, str):
            return len(tokens)
        return self.read(Key("vocab_size", low=1), int, REQUIRED) or 0

    def read(self, key: Key, kind: type, default: Any, n: int = 0) -> Any:
        """Read one value, or an array of `n` for which one may stand; without a sound one, the default or None."""
        value = self.metadata.get(self.full_name(key))
        if n and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            if len(value) != n:
                self.fault(key, f"{n} values" if key.count else f"one value or {n} (block_count)", value)
                return None
            if kind is bool:  # some writers have no bools
                value = [bool(v) if type(v) is int else v for v in value]
            return tuple(value) if all(self._fits(key, kind, v) for v in value) else None
        if value is None and default is REQUIRED:
            self.faults.append(f"{self.full_name(key)}: the key is missing")
        if value is None or not self._fits(key, kind, value):
            value = None if default is REQUIRED else default
        return value if not n or value is None or isinstance(value, tuple) else (value,) * n

    def _fits(self, key: Key, kind: type, value: Any) -> bool:
        if type(value) is not kind:  # not isinstance: a bool is no integer here
            self.fault(key, {int: "an integer", float: "a float", str: "a string", bool: "a bool"}[kind], value)
        elif key.choices and value not in key.choices:
            self.fault(key, "one of " + ", ".join(key.choices), value)
        elif isinstance(value, (int, float)) and not (key.low <= value <= key.high or (value == 0 and key.zero_is_off)):
            limit = f"at most {kind(key.high)}" if value > key.high else f"at least {kind(key.low)}"
            self.fault(key, limit, value)
        else:
            return True
        return False


def _show(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"an array of {len(value)}"
    return f"{value!r:.60}" + ("" if not isinstance(value, str) else " (a string)")


def _derive(values: dict[str, Any], reader: _Reader, swa_pattern: tuple[int | None, bool]) -> None:
    """Fill in what follows from other keys, in llama.cpp's way, and check what must agree."""
    values["n_head_kv"] = values["n_head_kv"] or values["n_head"]
    values["n_ctx_orig_yarn"] = values["n_ctx_orig_yarn"] or values["n_ctx_train"]
    if values["rope_scaling_factor"] == 0.0:  # the key's older name
        values["rope_scaling_factor"] = reader.read(Key("rope.scale_linear", **SCALE), float, 0.0)
    n_head, n_embd = values["n_head"], values["n_embd"]
    if n_head and not n_head[0]:
        reader.fault("attention.head_count", "at least 1", 0)
    elif n_head and n_embd:
        for name, key in (("n_embd_head_k", "key_length"), ("n_embd_head_v", "value_length")):
            if values[name] is None:
                if n_embd % n_head[0]:
                    reader.fault("embedding_length", f"a multiple of {n_head[0]} heads (no attention.{key})", n_embd)
                values[name] = n_embd // n_head[0] or 1
        if values["n_rot"] is None:
            values["n_rot"] = values["n_embd_head_k"]
        if values["n_rot"] % 2 or values["n_rot"] > values["n_embd_head_k"]:
            reader.fault("rope.dimension_count", f"even and at most {values['n_embd_head_k']}", values["n_rot"])
        _check_windowed_heads(values, reader)
        if values["n_head_kv"] and any(kv and q % kv for q, kv in zip(n_head, values["n_head_kv"], strict=True)):
            reader.fault("attention.head_count_kv", f"a divisor of head_count ({n_head[0]})", values["n_head_kv"][0])
    if values["n_expert"] and not 0 < values["n_expert_used"] <= values["n_expert"]:
        reader.fault("expert_used_count", f"1 to {values['n_expert']} (expert_count)", values["n_expert_used"])
    if not values["n_expert"] and values["n_expert_used"]:
        reader.fault("expert_used_count", "0, as there is no expert_count", values["n_expert_used"])
    _check_groups(values, reader)
    values["is_swa"] = _window_layers(values, reader, *swa_pattern)
    labels = reader.metadata.get(reader.full_name("classifier.output_labels"))
    if isinstance(labels, Sequence) and len(labels):
        values["n_labels"] = len(labels)


def _check_windowed_heads(values: dict[str, Any], reader: _Reader) -> None:
    """Check that windowed layers, where they have a width or rotation of their own, rotate no more than a head has."""
    width, n_rot = values.get("n_embd_head_k_swa"), values.get("n_rot_swa")
    if width or n_rot:
        width, n_rot = width or values["n_embd_head_k"], n_rot or values["n_rot"]
        if n_rot % 2 or n_rot > width:
            reader.fault("rope.dimension_count_swa", f"even and at most {width}", n_rot)


def _check_groups(values: dict[str, Any], reader: _Reader) -> None:
    """Check that the experts fall into equal groups of at least two, of which a token uses some but not all."""
    n, n_expert, n_used = values["n_expert_groups"], values["n_expert"], values["n_group_used"]
    if n > 1 and (n_expert % n or n_expert < 2 * n):
        reader.fault("expert_group_count", f"groups of equal size of {n_expert} experts, two at least in each", n)
    elif n > 1 and not 0 < n_used < n:
        reader.fault("expert_group_used_count", f"1 to {n - 1}", n_used)


def _leave_out_nextn(values: dict[str, Any], reader: _Reader) -> None:
    """Forget the last blocks, which serve to guess further tokens."""
    n_nextn = values["n_layer_nextn"]
    if n_nextn:
        values["n_layer"] -= n_nextn
        if values["n_layer"] < 1:
            reader.fault("nextn_predict_layers", "less than block_count", n_nextn)
        for f in fields(Config):
            if getattr(f.metadata.get("key"), "per_layer", False) and values.get(f.name):
                values[f.name] = values[f.name][:-n_nextn]
        values["is_swa"] = values["is_swa"][:-n_nextn]


def _window_layers(values: dict[str, Any], reader: _Reader, period: int | None, dense_first: bool) -> tuple[bool, ...]:
    """Say which layers see only a window: an array in the file, or a period of which one layer sees everything."""
    n_layer: int = values["n_layer"]
    if not values.get("n_swa"):
        return (False,) * n_layer
    name = "attention.sliding_window_pattern"
    pattern: Any = reader.metadata.get(f"{reader.architecture}.{name}", period)
    if type(pattern) is int and 0 <= pattern <= INT_MAX and period is not None:
        full = 0 if dense_first else pattern - 1
        return tuple(bool(pattern == 0 or il % pattern != full) for il in range(n_layer))
    if isinstance(pattern, Sequence) and len(pattern) == n_layer and all(type(v) in (bool, int) for v in pattern):
        return tuple(bool(v) for v in pattern)
    if pattern is None:
        reader.faults.append(f"{reader.architecture}.{name}: the key is missing")
    else:
        reader.fault(name, f"{'' if period is None else 'an integer or '}{n_layer} bools", pattern)
    return (False,) * n_layer
