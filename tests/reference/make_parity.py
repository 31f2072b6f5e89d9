"""Compares every architecture in every variant with llama.cpp; writes the committed rows and docs/parity.md.

    python tests/reference/make_parity.py [ARCHITECTURE ...]

Needs llama-cpp-python 0.3.36, built from source on the machine whose bits are to be kept. With names, only their rows
are written, and not the table.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import parity
from reference.cases import ROOT, machine
from reference.llama import VERSION, ReferenceModel, commit

from ggufpy import Model, arch
from ggufpy.testing import write_tiny_model

HEAD = """\
# Parity with llama.cpp

Every architecture, in small random models of each variant that changes its graph, computed by ggufpy and by llama.cpp:
a prompt of 40 tokens in micro-batches of 16, single tokens, and two sequences side by side, each with and without
flash attention; of models without logits, the prompt's embeddings. "identical" means every number has the same bits;
elsewhere stands the mean squared error relative to llama.cpp's mean square. Written by
`tests/reference/make_parity.py`.

{date}; llama-cpp-python {version}, ggml {commit}; {machine}.

| architecture | variants | identical | other |
|---|---|---|---|
"""


def compare(name: str, folder: Path) -> dict[str, float]:
    """Compare an architecture's variants and write its rows; returns each one's distance."""
    rows, files, distances = {}, {}, {}
    for label, options in ((label, options) for (other, label), options in parity.VARIANTS.items() if other == name):
        path = write_tiny_model(name, folder / "model.gguf", **options)
        with ReferenceModel(path) as model:
            expected = list(parity.outputs(name, model))
        with Model.load(path) as model:
            found = list(parity.outputs(name, model))
        rows[label], files[label] = parity.sample(expected), path.read_bytes()
        distances[label] = max(parity.distance(*pair) for pair in zip(found, expected, strict=True))
    parity.write(name, rows, files, {"machine": machine(), "commit": commit()})
    return distances


def main() -> None:
    """Compare what is asked for."""
    asked = sys.argv[1:]
    table = HEAD.format(
        date=datetime.datetime.now(datetime.timezone.utc).date(),
        version=VERSION,
        commit=commit(),
        machine=", ".join(machine().values()),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in asked or arch.names():
            distances = compare(name, Path(folder))
            other = ", ".join(f"{label} {found:.1e}" for label, found in distances.items() if found)
            labels = ", ".join(label for label, found in distances.items() if not found)
            table += f"| {name} | {len(distances)} | {labels} | {other} |\n"
            print(name, len(distances), other or "identical", flush=True)
    if not asked:
        (ROOT / "docs" / "parity.md").write_text(table)


if __name__ == "__main__":
    main()
