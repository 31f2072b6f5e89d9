"""Makes the committed dumps of llama.cpp's logits.

    python tests/reference/make_dumps.py [--smollm2 FILE] [--gemma3 FILE] [--no-tiny]

Needs llama-cpp-python 0.3.36, built from source on the machine whose bits are to be kept, and ggufpy (for the file
format and the tiny models, which it writes afresh). Weights are mapped, not repacked.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference.cases import Case, Recorder, cases_of, machine, prompt, random_ids
from reference.llama import VERSION, ReferenceModel, commit, system_info
from reference.tiny import VARIANTS, write

from ggufpy.reference import Dump

FOLDER = Path(__file__).parent / "dumps"
REAL = ("smollm2", "gemma3")


def make(case: Case, name: str, path: Path, model: ReferenceModel, ids: list[int]) -> None:
    """Run one case on llama.cpp and write its dump."""
    with model.session(**case.options) as session:
        run = Recorder(session)
        case.script(run, ids)
        options = {"n_ctx": session.n_ctx, "n_batch": 2048, "n_ubatch": 512, **case.options}
    options["n_threads_batch"] = options["n_threads"]
    meta: dict[str, Any] = {
        "model": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "repack": False},
        "made_by": {"llama_cpp_python": VERSION, "llama_cpp_commit": commit(), "system_info": system_info()},
        "machine": machine(),
    }
    steps = [(step, *arguments) for step, *arguments in run.steps]
    target = FOLDER / ("real" if name in REAL else "tiny") / f"{name}-{case.name.removeprefix('dump-')}.npz"
    target.parent.mkdir(parents=True, exist_ok=True)
    Dump.record(target, _plain(steps), np.concatenate(run.rows), options=options, meta=meta).save()
    print(f"{target.name}: {target.stat().st_size} bytes")


def _plain(value: Any) -> Any:
    """Return steps in what JSON has: ranges become lists."""
    if isinstance(value, (str, int, type(None))):
        return value
    return [_plain(item) for item in value]


def main() -> None:
    """Make the dumps of every model at hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in REAL:
        parser.add_argument(f"--{name}", type=Path, help="the model file; left out, its dumps stay as they are")
    parser.add_argument("--no-tiny", action="store_true", help="leave the tiny models' dumps as they are")
    arguments = vars(parser.parse_args())
    for name in REAL:
        if arguments[name]:
            make_all(name, arguments[name])
    with tempfile.TemporaryDirectory() as folder:
        for name in [] if arguments["no_tiny"] else VARIANTS:
            make_all(name, write(name, Path(folder)))


def make_all(name: str, path: Path) -> None:
    """Make the dumps of one model."""
    with ReferenceModel(path) as model:
        for case in cases_of(name):
            if case.dump:
                real = name in REAL
                ids = prompt(model.tokenize, case.n_tokens) if real else random_ids(case.n_tokens, model.n_vocab)
                make(case, name, path, model, ids)


if __name__ == "__main__":
    main()
