"""Tiny models: the same bytes each time, every tensor counts, and other readers take them for what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufpy import GGUFError, GGUFFile, Model, Session, UnsupportedArchitectureError, arch
from ggufpy.testing import variants, write_tiny_model

Tiny = Callable[..., Path]
IDS = [5, 9, 2, 33, 17, 60, 41]
TYPES = {"f16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_nl", "mxfp4"}
VARIANTS = [pytest.param(name, label, id=f"{name}-{label}") for name in ("llama", "gemma3") for label in variants(name)]
CHANGING = [
    *(pytest.param(name, "plain", id=f"{name}-plain") for name in arch.names()),
    *(case for case in VARIANTS if case.values[1] not in {"plain", *TYPES}),
]
IGNORED = {"plain", "ignored-keys", "no-scaling", "fused"}
"""Variants that compute what the plain model computes."""


def logits(model: Model, ids: list[int] = IDS, **options: Any) -> np.ndarray:
    with model.session(**{"n_ctx": 256, "n_threads": 1, **options}) as session:
        return session.decode(ids, logits="all")


@pytest.mark.parametrize("options", [{}, {"type": "q4_0"}, {"n_expert": 4, "n_expert_used": 2}], ids=str)
def test_the_same_call_writes_the_same_bytes(options: dict[str, Any], tmp_path: Path) -> None:
    """And another seed others."""
    paths = [write_tiny_model("llama", tmp_path / f"{i}.gguf", seed=i // 2, **options) for i in range(4)]
    raws = [path.read_bytes() for path in paths]
    assert raws[0] == raws[1] != raws[2] == raws[3]
    assert len(raws[0]) < 5_000_000


@pytest.mark.parametrize(("name", "label"), VARIANTS)
def test_every_variant_gives_sound_logits(name: str, label: str, tiny: Tiny) -> None:
    """Finite, not saturated, and other than the plain model's, unless the variant is one that is to be ignored."""
    with Model.load(tiny(name, **variants(name)[label])) as model, Model.load(tiny(name)) as plain:
        ids = np.random.default_rng(0).integers(2, 64, 80).tolist()
        found, expected = logits(model, ids), logits(plain, ids)
    assert np.isfinite(found).all()
    assert 0.1 < np.abs(found).max() < 1000
    assert len(np.unique(found.argmax(axis=1))) > 4
    assert np.array_equal(found, expected) == (label in IGNORED)


@pytest.mark.parametrize(("name", "label"), CHANGING)
def test_every_tensor_moves_the_logits(name: str, label: str, tiny: Tiny) -> None:
    """Or embeddings. Turned over, one after another: a graph that forgot one could not agree with llama.cpp."""
    ids = np.random.default_rng(0).integers(2, 64, 42).tolist()  # longer than the windows

    def rows(session: Session) -> np.ndarray:
        return session.decode(ids, logits="all") if arch.find(name).logits else session.embed(ids)

    unused = {"longrope": "rope_factors_long.weight", "longrope-long": "rope_factors_short.weight"}.get(label)
    with (
        Model.load(tiny(name, **variants(name)[label]), use_mmap=False) as model,
        model.session(n_ctx=256, n_threads=1) as session,
    ):
        expected = rows(session)
        for tensor_name, tensor in model.weights.items():
            kept = tensor.get()
            tensor.set(-1.5 * kept)
            session.clear()
            change = (rows(session) - expected)[expected > -1e30]  # else the token is ruled out
            moved = np.square(change).sum() / np.square(expected[expected > -1e30]).sum()
            tensor.set(kept)
            assert (moved > 1e-5) == (tensor_name != unused), tensor_name
        session.clear()
        assert np.array_equal(expected, rows(session))


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    """Of variants, types and architectures; and values that do not go together, as in any file."""
    path = tmp_path / "x.gguf"
    with pytest.raises(ValueError, match="unknown variants: n_heads, tide"):
        write_tiny_model("llama", path, n_heads=4, tide=False)
    with pytest.raises(ValueError, match="unknown type 'q9_0'"):
        write_tiny_model("llama", path, type="q9_0")
    with pytest.raises(UnsupportedArchitectureError, match="nope"):
        write_tiny_model("nope", path)
    with pytest.raises(GGUFError, match="embedding_length: expected a multiple of 3 heads"):
        write_tiny_model("llama", path, n_head=3)
    assert not path.exists()


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("gemma3", {"n_swa": 16}), ("llama", {"type": "q4_0"})])
def test_the_gguf_package_reads_them(name: str, options: dict[str, Any], tiny: Tiny) -> None:
    """The same keys, shapes, types and bytes."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(tiny(name, **options))
    with GGUFFile(tiny(name, **options)) as file:
        keys = {key for key in reader.fields if not key.startswith("GGUF.")}
        assert set(file.metadata) == keys
        assert name == reader.fields["general.architecture"].contents()
        assert file.metadata["tokenizer.ggml.tokens"].tolist() == reader.fields["tokenizer.ggml.tokens"].contents()
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.shape[::-1] == tuple(tensor.shape)
            assert int(info.type) == int(tensor.tensor_type)
            assert file.data(tensor.name).tobytes() == tensor.data.tobytes()


def test_their_vocabulary_works(tiny: Tiny) -> None:
    """Text becomes tokens and comes back; both control tokens end an answer or begin one."""
    with Model.load(tiny("llama")) as model:
        tokenizer = model.tokenizer
        assert 64 == tokenizer.n_vocab == model.config.n_vocab
        text = "the rain on the sea, and 7 more"
        ids = tokenizer.encode(text)
        assert len(ids) < len(text)
        assert text == tokenizer.decode(ids)
        assert 1 in tokenizer.eog_token_ids
