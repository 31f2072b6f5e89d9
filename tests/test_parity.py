"""Every architecture in every variant: llama.cpp's logits, bit for bit.

Live where llama-cpp-python can be imported; elsewhere against the committed rows, which are bit-identical on the kind
of machine they were made on and close on any other. The tests appear by themselves with each new declaration.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import parity
from reference.cases import machine

from ggufpy import Model, arch
from ggufpy.testing import write_tiny_model

reference: Any
try:
    from reference import llama as reference
except ImportError:
    reference = None

# What llama.cpp's own AVX2 build is apart from the committed rows, a few times over: the cache rounds to 16 bits, which
# up to 64 layers amplify; quantized weights round activations to 8 bits, and a router may then choose otherwise.
CLOSE, ROUGH = 5e-5, 0.1
VARIANTS = [pytest.param(name, label, id=f"{name}-{label}") for name, label in parity.VARIANTS]
CACHED = [
    pytest.param(name, label, id=f"{name}-{label}")
    for name, label in parity.VARIANTS
    if label in ("plain", "window") and not arch.find(name).cacheless
]


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Lend a path for one model, which is gone with the test: there are many."""
    path = tmp_path_factory.getbasetemp() / "parity.gguf"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(("name", "label"), VARIANTS)
def test_logits_are_llama_cpps(name: str, label: str, path: Path) -> None:
    """The prompt in small pieces, single tokens, two sequences side by side; with and without flash attention."""
    options = parity.VARIANTS[name, label]
    write_tiny_model(name, path, **options)
    with Model.load(path) as model:
        found = list(parity.outputs(name, model))
    assert np.ptp(found[0][found[0] > parity.RULED_OUT]) > 0.1  # else equality were worth little
    if reference:
        with reference.ReferenceModel(path) as model:
            distances = [parity.distance(*pair) for pair in zip(found, parity.outputs(name, model), strict=True)]
        assert [0.0] * len(found) == distances
    else:
        rows, meta = parity.read(name)
        assert meta["crc32"][label] == zlib.crc32(path.read_bytes()), "the rows belong to another file: make_parity.py"
        limit = ROUGH if "type" in options else CLOSE
        assert parity.distance(parity.sample(found), rows[label]) <= (0.0 if machine() == meta["machine"] else limit)


@pytest.mark.parametrize(("name", "label"), CACHED)
def test_cached_and_uncached_agree(name: str, label: str, path: Path) -> None:
    """A prompt whole, one by one, and cut back and continued in pieces: the same but for rounding."""
    write_tiny_model(name, path, **parity.VARIANTS[name, label])
    ids, options = parity.PROMPT, {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 1}
    with Model.load(path) as model, model.session(n_ctx=256, **options) as session:
        whole = session.decode(ids, logits="all")
        session.clear()
        single = np.concatenate([session.decode([token]) for token in ids])
        if arch.find(name)(model.config).states():  # from which there is no way back
            session.clear()
            session.decode(ids[:20])
        else:
            session.trim(0, 20)
        again = np.concatenate([session.decode(ids[20:33], logits="all"), session.decode(ids[33:], logits="all")])
    for rows, expected in ((single, whole), (again, whole[20:])):
        known = (rows > parity.RULED_OUT) & (expected > parity.RULED_OUT)
        assert parity.distance(rows[known], expected[known]) < 1e-6


@pytest.mark.parametrize("name", arch.names())
def test_rows_are_committed(name: str) -> None:
    """Of every variant that there is, and of no other."""
    rows, _ = parity.read(name)
    assert set(rows) == {label for other, label in parity.VARIANTS if other == name}, "make_parity.py is due"
