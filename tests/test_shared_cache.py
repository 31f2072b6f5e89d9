"""Layers that look into the caches of others, and heads as wide as their layer wants: Gemma 3n and 4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewrite import DROP, Entry, rewrite

from ggufpy import GGUFError, Model
from ggufpy.testing import variants

Tiny = Callable[..., Path]
IDS = [3 + i * 7919 % 61 for i in range(150)]
GEMMA3N = ("gemma3n", "plain")
GEMMA4 = ("gemma4", "shared-cache")
WIDE = {"n_embd_head_k": 128, "n_embd_head_v": 128, "n_embd_head_k_swa": 64, "n_embd_head_v_swa": 64, "n_rot": 128}
F16 = 2


@pytest.fixture
def path(request: pytest.FixtureRequest, tiny: Tiny) -> Path:
    """A small model of a variant, given as (architecture, label)."""
    name, label = request.param
    return tiny(name, **variants(name)[label])


def test_only_own_keys_and_values_are_kept(tiny: Tiny) -> None:
    """Of 20 layers in Gemma 3n; in Gemma 4 two heads a layer, full layers' of twice the width."""
    with Model.load(tiny("gemma3n")) as model, model.session(n_ctx=256) as session:
        assert session.memory_nbytes == 20 * 256 * 2 * 2 * 16 * F16
    with Model.load(tiny(GEMMA4[0], **variants(GEMMA4[0])[GEMMA4[1]])) as model, model.session(n_ctx=256) as session:
        assert session.memory_nbytes == 256 * 2 * 2 * (32 + 64 + 32 + 64) * F16


SITUATIONS: list[dict[str, Any]] = [
    {"n_ubatch": 512},
    {"n_ubatch": 16, "swa_full": False},
    {"n_seq_max": 2, "swa_full": False, "flash_attn": False},
    {"n_seq_max": 2, "kv_unified": True},
    {"type_k": "q8_0", "type_v": "q4_0"},
    {"type_k": "q8_0", "flash_attn": False},
]


@pytest.mark.parametrize("options", SITUATIONS, ids=str)
@pytest.mark.parametrize(("name", "label"), [GEMMA3N, GEMMA4])
def test_the_bits_are_llama_cpps(name: str, label: str, options: dict[str, Any], tiny: Tiny) -> None:
    """Whatever the cache: a prompt of which one row is wanted, single tokens, and a second sequence."""
    pytest.importorskip("llama_cpp")
    from reference.llama import ReferenceModel

    wide = WIDE if name == "gemma4" else {"n_embd_head_k": 64, "n_embd_head_v": 64, "n_rot": 64}
    path, rows = tiny(name, **variants(name)[label] | wide), []
    for model in (ReferenceModel(path), Model.load(path)):
        with model, model.session(**{"n_ctx": 1024, "n_threads": 1, **options}) as session:
            found = [session.decode(IDS), *(session.decode([token]) for token in IDS[:3])]
            if options.get("n_seq_max"):
                found += session.decode_batch([(0, IDS[:2], "last"), (1, IDS[:40], "all")])
            rows.append(np.concatenate(found))
    assert np.array_equal(*rows)


@pytest.mark.parametrize("path", [GEMMA3N, GEMMA4], indirect=True)
def test_tokens_without_wanted_rows_are_kept_all_the_same(path: Path) -> None:
    """Though late layers are not computed for them."""
    with Model.load(path) as model, model.session(n_ctx=256, n_threads=1) as session:
        rows = []
        for wanted in ([], "all"):
            session.clear()
            session.decode(IDS[:20], logits=wanted)
            rows.append(session.decode(IDS[20:40], logits="all"))
    assert np.array_equal(*rows)


@pytest.mark.parametrize("path", [GEMMA3N, GEMMA4], indirect=True)
def test_forks_share_nothing(path: Path) -> None:
    """A copied sequence goes on as the original does, and after it was cut back, too."""
    with Model.load(path) as model, model.session(n_ctx=512, n_seq_max=2, n_threads=1) as session:
        session.decode(IDS[:40])
        session.fork(0, 1)
        rows = [session.decode([7], seq_id=seq_id) for seq_id in (0, 1)]
        session.trim(1, 40)
        rows.append(session.decode([7], seq_id=1))
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_what_shared_layers_do_not_need_may_be_missing(tiny: Tiny, tmp_path: Path) -> None:
    """Some files have keys' and values' matrices there, some do not."""

    def edit(tensors: dict[str, Entry]) -> None:
        for il in (4, 5, 6):
            for role in ("k", "v", "k_norm"):
                del tensors[f"blk.{il}.attn_{role}.weight"]

    path = tiny(GEMMA4[0], **variants(GEMMA4[0])[GEMMA4[1]])
    rows = []
    for file in (path, rewrite(path, tmp_path / "x.gguf", edit=edit)):
        with Model.load(file) as model, model.session(n_ctx=256, n_threads=1) as session:
            rows.append(session.decode(IDS[:40]))
    assert np.array_equal(*rows)


FAULTS: dict[str, tuple[tuple[str, str], dict[str, Any], str]] = {
    "all shared": (GEMMA4, {"attention.shared_kv_layers": 6}, "shared_kv_layers: expected at most 5, found 6"),
    "more than there are": (GEMMA4, {"attention.shared_kv_layers": 9}, "shared_kv_layers: expected at most 5, found 9"),
    "the wrong window": (GEMMA4, {"attention.shared_kv_layers": 2}, "layers 5 and 4 share a cache: expected the same"),
    "other heads": (GEMMA4, {"attention.head_count_kv": ([2] * 6 + [1], "arr[i32]")}, "layers 6 and 2 share a cache"),
    "no window": (GEMMA3N, {"attention.sliding_window": 0}, "sliding_window: expected a window"),
    "window missing": (GEMMA3N, {"attention.sliding_window": DROP}, "sliding_window: the key is missing"),
    "pattern": (GEMMA3N, {"attention.sliding_window_pattern": 3}, "layers 20 and 19 share a cache"),
    "halves": (GEMMA4, {"attention.value_length_swa": 16}, "key_length 32 and attention.value_length 16 must be equal"),
    "rotation": (GEMMA4, {"rope.dimension_count_swa": DROP}, "dimension_count_swa: expected even and at most 32"),
    "both ways": (GEMMA4, {"attention.causal": False}, "attention.causal: expected true"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_keys_that_do_not_go_together_are_refused(case: str, tiny: Tiny, tmp_path: Path) -> None:
    """By name, before any graph is built."""
    (name, label), keys, message = FAULTS[case]
    changed = {f"{name}.{key}": value for key, value in keys.items()}
    with pytest.raises(GGUFError, match=message):
        Model.load(rewrite(tiny(name, **variants(name)[label]), tmp_path / "x.gguf", changed, hollow=True))


def test_cache_types_have_to_fit_every_width(tiny: Tiny) -> None:
    """Blocks of 32 fit full layers' heads here, but not those with a window."""
    narrow = {"n_embd_head_k_swa": 16, "n_embd_head_v_swa": 16, "n_rot_swa": 16}
    with Model.load(tiny("gemma4", **narrow)) as model, pytest.raises(ValueError, match=r"do not divide .*of 16"):
        model.session(type_k="q8_0")
