"""Mixtures of experts and what came with them: routers without numbers, groups, chunked windows, gates, scores without
flash attention. Bits are compared elsewhere; here is what no comparison of small models shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewrite import Entry, rewrite

from ggufpy import GGUFError, Model
from ggufpy.gguf import GGMLType

Tiny = Callable[..., Path]

ROUTERS = """
import sys
import numpy as np
from ggufpy import Model

with Model.load(sys.argv[1], use_mmap=False) as model, model.session(n_threads=1) as session:
    router = model.weights["blk.1.ffn_gate_inp.weight"]
    kept, rng = router.get(), np.random.default_rng(0)
    for share in (0.02, 0.5, 1.0):
        for bad in (np.nan, np.inf, -np.inf):
            values = kept.copy()
            values[rng.random(len(values)) < share] = bad
            router.set(values)
            session.clear()
            rows = session.decode(rng.integers(2, 64, 40), logits="all")
            assert rows.shape == (40, 64)
    router.set(kept)
    session.clear()
    assert np.isfinite(session.decode([1, 2, 3])).all()
"""


@pytest.mark.parametrize("groups", [{}, {"n_expert_groups": 4, "n_group_used": 2}], ids=["", "groups"])
def test_routers_that_give_no_numbers_do_no_harm(groups: dict[str, int], tiny: Tiny) -> None:
    """Experts are chosen by sorting, which has no order for NaN: the choice is arbitrary then, but one of experts."""
    path = tiny("qwen3moe", n_expert=96, n_expert_used=8, n_ff_exp=32, n_layer=2, **groups)
    subprocess.run([sys.executable, "-c", ROUTERS, path], check=True)


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no experts": ("qwen3moe", {"expert_count": 0, "expert_used_count": 0}, "expert_count: the key is missing or 0"),
    "no gating": ("dots1", {"expert_gating_func": 0}, "expert_gating_func: the key is missing or 0"),
    "groups too small": ("glm4moe", {"expert_group_count": 8, "expert_group_used_count": 2}, "two at least in each"),
    "unequal groups": ("glm4moe", {"expert_group_count": 3, "expert_group_used_count": 2}, "groups of equal size"),
    "all groups": ("glm4moe", {"expert_group_count": 4, "expert_group_used_count": 4}, "expected at most 3|1 to 3"),
    "adjoint groups": ("grovemoe", {"experts_per_group": 8}, "fewer groups than expert_used_count"),
    "pattern as a period": ("maple", {"attention.sliding_window_pattern": 2}, "3 bools"),
    "gaps between dense layers": ("ernie4_5-moe", {"interleave_moe_layer_step": 2}, "expected 1, found 2"),
    "no window in Llama 4": ("llama4", {"attention.sliding_window": 0}, "sliding_window: 0"),
    "no norm in Cohere 2": ("cohere2moe", {"attention.layer_norm_epsilon": 0.0}, "layer_norm_rms_epsilon: the key is"),
    "unbounded Grok": ("grok", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: expected more than 0"),
    "uneven rotation": ("step35", {"rope.dimension_count": 30}, "a multiple of 4, found 30"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_hyper_parameters_that_do_not_go_together_are_refused(case: str, tiny: Tiny, tmp_path: Path) -> None:
    """By name, before any graph is built."""
    name, keys, message = FAULTS[case]
    changed = {f"{name}.{key}": value for key, value in keys.items()}
    with pytest.raises(GGUFError, match=message):
        Model.load(rewrite(tiny(name), tmp_path / "x.gguf", changed, hollow=True))


def test_a_gate_may_have_one_of_two_widths(tiny: Tiny, tmp_path: Path) -> None:
    """Laguna's is read as the file has it; another width names both."""

    def narrow(tensors: dict[str, Any]) -> None:
        tensors["blk.1.attn_gate.weight"] = Entry((8, 128), GGMLType.F32, bytes(8 * 128 * 4))

    with pytest.raises(GGUFError, match=r"blk.1.attn_gate.weight: expected \[128, 128\] or \[128, 4\], file has"):
        Model.load(rewrite(tiny("laguna"), tmp_path / "x.gguf", edit=narrow, hollow=True))


def test_layers_have_experts_where_the_file_has_some(tiny: Tiny) -> None:
    """For architectures that have no key for it."""
    for name in ("mimo2", "step35", "hy_v3"):
        with Model.load(tiny(name)) as model:
            dense = [f"blk.{il}.ffn_up.weight" in model.weights for il in range(3)]
            experts = [f"blk.{il}.ffn_up_exps.weight" in model.weights for il in range(3)]
        assert ([True, False, False], [False, True, True]) == (dense, experts)


def test_scores_that_no_kernel_bounds_go_without_flash_attention(tiny: Tiny) -> None:
    """Asked for or not, as in llama.cpp, and with what follows from that for the cache."""
    with Model.load(tiny("grok")) as model:
        rows = []
        for flash in (True, False):
            with model.session(n_threads=1, flash_attn=flash) as session:
                assert not session.options.flash_attn
                rows.append(session.decode([1, 2, 3], logits="all"))
        assert np.array_equal(*rows)
        with pytest.raises(ValueError, match="type_v='q8_0' needs flash_attn=True"):
            model.session(type_v="q8_0")


LONG = {
    "llama4": (8192, {}, {"swa_full": False}),
    "smallthinker": (4096, {"n_swa": 1, "n_layer": 5}, {"flash_attn": False}),
}
"""Architectures whose windows have one size, whatever a file says."""


@pytest.mark.parametrize("name", LONG)
def test_large_windows_give_the_same_bits(name: str, tiny: Tiny) -> None:
    """Before, at and behind the edge of a window, where Llama 4 begins a new chunk and its temperature rises."""
    pytest.importorskip("llama_cpp")
    from reference.cases import random_ids
    from reference.llama import ReferenceModel

    n, variant, options = LONG[name]
    path = tiny(name, n_ctx_train=16384, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_ff_exp=32, **variant)
    ids, rows = random_ids(n + 32, 64), []
    for model in (ReferenceModel(path), Model.load(path)):
        with model, model.session(n_ctx=n + 512, n_threads=2, **options) as session:
            for start in range(0, n - 8, 2048):
                session.decode(ids[start : min(start + 2048, n - 8)])
            found = [session.decode(ids[n - 8 : n + 16], logits="all"), *(session.decode([i]) for i in ids[n + 16 :])]
            rows.append(np.concatenate(found))
    assert np.array_equal(*rows)
