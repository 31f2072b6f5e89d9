"""Latent attention: what its cache keeps, which cache types go together, and keys that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewrite import rewrite

from ggufpy import GGUFError, Model

Tiny = Callable[..., Path]
IDS = [3 + i * 7919 % 61 for i in range(40)]


def test_the_cache_keeps_compressed_keys_only(tiny: Tiny) -> None:
    """One vector of kv_lora_rank + rope.dimension_count per token and layer: F16 here, and values are a part of it."""
    with Model.load(tiny("deepseek2")) as model, model.session(n_ctx=256) as session:
        assert session.memory_nbytes == model.config.n_layer * 256 * (64 + 32) * 2


@pytest.mark.parametrize("options", [{}, {"n_seq_max": 2}, {"n_seq_max": 2, "kv_unified": True}], ids=str)
@pytest.mark.parametrize("type", ["q8_0", "q4_0", "bf16", "f32"])
def test_cache_types_give_llama_cpps_bits(type: str, options: dict[str, Any], tiny: Tiny) -> None:
    """Keys are not rotated before they are quantized, as they are elsewhere."""
    pytest.importorskip("llama_cpp")
    from reference.llama import ReferenceModel

    path, rows = tiny("deepseek2"), []
    batch = [(seq_id, IDS, "all") for seq_id in range(options.get("n_seq_max", 1))]
    for model in (ReferenceModel(path), Model.load(path)):
        with model, model.session(n_ctx=512, n_threads=1, type_k=type, type_v=type, **options) as session:
            rows.append(np.concatenate(session.decode_batch(batch)))
    assert np.array_equal(*rows)


def test_keys_and_values_have_one_type(tiny: Tiny) -> None:
    """As they are the same numbers."""
    with Model.load(tiny("deepseek2")) as model, pytest.raises(ValueError, match="type_k='q8_0' expected"):
        model.session(type_k="q8_0")


def test_forks_share_nothing(tiny: Tiny) -> None:
    """A copied sequence goes on as the original does."""
    with Model.load(tiny("deepseek2")) as model, model.session(n_ctx=512, n_seq_max=2, n_threads=1) as session:
        session.decode(IDS)
        session.fork(0, 1)
        rows = [session.decode([7], seq_id=seq_id) for seq_id in (0, 1)]
    assert np.array_equal(*rows)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "half a pair": ({"attention.value_length_mla": 0}, "both or neither"),
    "nothing unrotated": ({"rope.dimension_count": 48}, "less than a head's width, found 48"),
    "another key width": ({"attention.key_length": 128}, r"key_length: expected 96 \(kv_lora_rank"),
    "several key heads": ({"attention.head_count_kv": 2}, "head_count_kv: expected 1 with"),
    "temperature": ({"attention.temperature_scale": 0.5}, "temperature_length: expected at least 1"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_keys_that_do_not_go_together_are_refused(case: str, tiny: Tiny, tmp_path: Path) -> None:
    """By name, before any graph is built."""
    keys, message = FAULTS[case]
    changed = {f"deepseek2.{key}": value for key, value in keys.items()}
    with pytest.raises(GGUFError, match=message):
        Model.load(rewrite(tiny("deepseek2"), tmp_path / "x.gguf", changed, hollow=True))
