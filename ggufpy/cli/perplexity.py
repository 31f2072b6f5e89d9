"""`ggufpy perplexity`: how well a model foresees a text, with llama-perplexity's windows and in its format."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from ggufpy.cli.generate import write
from ggufpy.cli.loading import find, load, read_text, refusals_are_wrong_usage
from ggufpy.cli.parser import SESSION, given
from ggufpy.cli.terminal import Status

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Print the perplexity after each window of `args.file`, and at the end its final estimate."""
    text = read_text(args.file).removesuffix("\n")  # as the tool does
    path: Path = find(args.model)
    with load(path, args) as model, Status("computing the first windows") as status:

        def show(done: int, total: int, value: float) -> None:
            status.close()
            if not args.json:
                write(f"[{done}]{value:.4f}," + "\n" * (done == total))

        sizes = {name: value for name, value in given(args, (*SESSION, "n_chunks")).items() if name != "swa_full"}
        with refusals_are_wrong_usage():
            found = model.perplexity(text, progress=show, **sizes)
    if args.json:
        report = {
            "model": str(path),
            "perplexity": found.value,
            "error": found.error,
            "n_ctx": sizes.get("n_ctx", 512),
            "n_chunks": len(found.running),
            "n_tokens": found.n_tokens,
            "running": found.running,
        }
        print(json.dumps(report, indent=2))
    else:
        error = "" if found.error is None else f" +/- {found.error:.5f}"
        print(f"Final estimate: PPL = {found.value:.4f}{error}")
    return 0
