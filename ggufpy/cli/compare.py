"""`ggufpy compare`: our logits against those llama.cpp computed, with limits that decide the exit code."""

from __future__ import annotations

import dataclasses
import json
import math
from argparse import Namespace

from ggufpy.cli.loading import find, load
from ggufpy.cli.parser import SESSION, given
from ggufpy.cli.terminal import Status, say, table
from ggufpy.reference import Comparison, Limits, compare_model, read_dump

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Print how far the logits of `args.model` are from those in `args.dump`; 1 if that is outside a limit."""
    limits = Limits(args.identical, args.max_abs_diff, args.nmse, args.mean_kl, args.top1_agreement)
    dump = read_dump(args.dump)
    with load(find(args.model), args) as model, Status("computing the logits"):
        found = compare_model(model, dump, **given(args, SESSION))
    print(json.dumps(_finite(found), indent=2) if args.json else table(_rows(found)))
    faults = found.faults(limits)
    for fault in faults:
        say(f"ggufpy compare: {fault}")
    return 1 if faults else 0


def _rows(found: Comparison) -> list[tuple[str, str]]:
    rows = [("rows", str(found.n_rows))]
    if found.identical_rows is not None:
        rows.append(
            ("identical rows", f"{found.identical_rows}{' (all)' if found.identical_rows == found.n_rows else ''}")
        )
    if found.max_abs_diff is not None:
        rows.append(("largest difference", f"{found.max_abs_diff:.3g}"))
    if found.nmse is not None:
        rows.append(("NMSE", f"{found.nmse:.3g}"))
    rows.append(("mean KL divergence", f"{found.mean_kl:.3g} nats"))
    rows.append(("same likeliest token", f"{found.top1_agreement:.2%}"))
    if found.perplexity is not None and found.reference_perplexity is not None:
        rows.append(("perplexity", f"{found.perplexity:.5g} (reference {found.reference_perplexity:.5g})"))
    return rows


def _finite(found: Comparison) -> dict[str, object]:
    """Return the figures for JSON, which has no number for inf and nan."""
    values = dataclasses.asdict(found)
    return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}
