"""Live comparisons with llama.cpp: every situation of reference/cases.py must give the same bits on both sides.

Runs where llama-cpp-python can be imported and was built as ggufpy's ggml was; the committed dumps stand in elsewhere
(test_dumps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.cases import Case, Recorder, cases_of, prompt, random_ids
from reference.tiny import VARIANTS, write

from ggufpy import Model
from ggufpy.reference import replay

pytest.importorskip("llama_cpp")
from reference.llama import ReferenceModel

REAL = ("smollm2", "gemma3")
REPACKED = [case for case in cases_of("smollm2") if case.name.startswith(("fa1-ubatch512-threads2", "interleaved-sep"))]


def situations(names: Iterable[str]) -> list[Any]:
    """List the situations of some models; what is kept as a dump of a real one is compared there."""
    return [
        pytest.param(name, case, repack, id=f"{name}-{'repacked' if repack else 'mapped'}-{case.name}")
        for name in names
        for case, repack in [(c, False) for c in cases_of(name)] + [(c, True) for c in REPACKED if name in REAL]
        if not (case.dump and name in REAL)
    ]


class Models:
    """Opens a model on both sides, and keeps it until another one is asked for."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self.path_of = path_of
        self.name: tuple[str, bool] | None = None
        self.open: list[ReferenceModel | Model] = []

    def get(self, name: str, repack: bool) -> tuple[ReferenceModel, Model]:
        if self.name != (name, repack):
            self.close()
            path = self.path_of(name)
            self.open = [ReferenceModel(path, repack=repack), Model.load(path, repack=repack)]
            self.name = name, repack
        theirs, ours = self.open
        assert isinstance(theirs, ReferenceModel)
        assert isinstance(ours, Model)
        return theirs, ours

    def close(self) -> None:
        for model in self.open:
            model.close()
        self.open, self.name = [], None


@pytest.fixture(scope="module")
def real(smollm2_path: Path, gemma3_path: Path) -> Iterator[Models]:
    models = Models({"smollm2": smollm2_path, "gemma3": gemma3_path}.__getitem__)
    yield models
    models.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(lambda name: write(name, tmp_path_factory.mktemp(name)))
    yield models
    models.close()


def check(case: Case, theirs: ReferenceModel, ours: Model, ids: list[int]) -> None:
    """Record a case on llama.cpp, replay it on ggufpy, and hold the rows' bits against each other."""
    options: dict[str, Any] = {"n_threads": 2, "n_ctx": 512, **case.options}
    with theirs.session(**options) as session:
        run = Recorder(session)
        case.script(run, ids)
    with ours.session(**options) as session:
        for index, (found, expected) in enumerate(zip(replay(session, run.steps), run.rows, strict=True)):
            differ = np.flatnonzero((found.view(np.uint32) != expected.view(np.uint32)).any(axis=1))
            distance = np.abs(found - expected).max(initial=0)
            assert not differ.size, f"output {index} of {len(run.rows)}, rows {differ[:8]}: up to {distance:g} apart"


@pytest.mark.parametrize(("name", "case", "repack"), situations(REAL))
def test_real_models_give_the_same_bits(name: str, case: Case, repack: bool, real: Models) -> None:
    """SmolLM2 and Gemma 3, mapped and repacked."""
    theirs, ours = real.get(name, repack)
    check(case, theirs, ours, prompt(theirs.tokenize, case.n_tokens))


@pytest.mark.parametrize(("name", "case", "repack"), situations(VARIANTS))
def test_tiny_models_give_the_same_bits(name: str, case: Case, repack: bool, tiny: Models) -> None:
    """Every option of the architectures, in random models that take no time."""
    theirs, ours = tiny.get(name, repack)
    check(case, theirs, ours, random_ids(case.n_tokens, theirs.n_vocab))
