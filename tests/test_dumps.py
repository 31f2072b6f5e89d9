"""The committed dumps of llama.cpp's logits: bit-identical on the CPU they were made on, close on any other."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from reference.cases import machine
from reference.tiny import VARIANTS, write

from ggufpy import Model
from ggufpy.reference import Dump, Limits, compare_model, read_dump

DUMPS = Path(__file__).parent / "reference" / "dumps"
REAL, TINY = sorted(DUMPS.glob("real/*.npz")), sorted(DUMPS.glob("tiny/*.npz"))

# What llama.cpp itself is apart from its own AVX2 build, doubled. Activations are rounded to 8 bits for quantized
# weights, and one last bit decides a rounding: only whole (f32) arithmetic stays within 1e-6 on other instructions.
WHOLE = Limits(nmse=1e-6, top1_agreement=1.0)
ROUNDED = Limits(nmse=1e-2, mean_kl=0.1, top1_agreement=0.75)


def limits(dump: Dump, rounded: bool) -> Limits:
    """Choose what a dump may ask for on this machine."""
    if machine() == dump.meta["machine"]:
        return Limits(identical=True)
    return ROUNDED if rounded else WHOLE


def check(path: Path, model_path: Path, rounded: bool) -> None:
    """Replay one dump through its model."""
    dump = read_dump(path)
    assert isinstance(dump, Dump)
    assert dump.meta["model"]["sha256"] == hashlib.sha256(model_path.read_bytes()).hexdigest()
    with Model.load(model_path, repack=dump.meta["model"]["repack"]) as model:
        found = compare_model(model, dump)
    assert found.faults(limits(dump, rounded)) == []


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_models_have_llama_cpps_logits(path: Path, request: pytest.FixtureRequest) -> None:
    """SmolLM2 and Gemma 3: prompt rows and 32 greedy steps, flash attention on and off."""
    check(path, request.getfixturevalue(path.stem.partition("-")[0] + "_path"), rounded=True)


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_tiny_models_have_llama_cpps_logits(path: Path, tmp_path: Path) -> None:
    """Every option of the architectures: prompt rows and 32 greedy steps, flash attention on and off."""
    name = path.stem.rpartition("-fa")[0]
    check(path, write(name, tmp_path), rounded="type" in VARIANTS[name][1])


def test_every_model_has_its_dumps() -> None:
    """No dump is missing, and none is of a model that is made no more."""
    assert {path.stem for path in TINY} == {f"{name}-fa{flash}" for name in VARIANTS for flash in (0, 1)}
    assert {path.stem for path in REAL} == {
        *("smollm2-fa0", "smollm2-fa1"),
        *("gemma3-fa0-swa1", "gemma3-fa1-swa0", "gemma3-fa1-swa1"),
    }


def test_dumps_stay_small() -> None:
    """No committed file exceeds 500 kB."""
    assert [path.name for path in REAL + TINY if path.stat().st_size > 500_000] == []
