"""The options that stand for `SamplingParams`: one for each field, told from the dataclass, its docstring and defaults.

A new parameter is an option at once. Owns which options come first, and how a field becomes one; values are
checked by `SamplingParams` itself. Importing this imports NumPy, so only the commands that choose tokens do.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any

from ggufpy.cli.loading import refusals_are_wrong_usage
from ggufpy.cli.parser import given
from ggufpy.sampling import SamplingParams

__all__ = ["add_common_options", "add_other_options", "sampling_params"]

COMMON = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty"),
    *("seed", "stop", "ignore_eos"),
)
NO_OPTIONS = ("n", "logprobs", "prompt_logprobs", "logits_processors")
"""Text, one answer at a time, has no place for these."""

FIELDS = {field.name: field for field in dataclasses.fields(SamplingParams) if field.name not in NO_OPTIONS}


def add_common_options(parser: ArgumentParser) -> None:
    """Add the options that most people want."""
    _add(parser, "choosing tokens", COMMON)


def add_other_options(parser: ArgumentParser) -> None:
    """Add all the others."""
    _add(parser, "more ways to choose tokens", [name for name in FIELDS if name not in COMMON])


def sampling_params(args: Namespace) -> SamplingParams:
    """Return the parameters that the options stand for; a value out of range is wrong usage."""
    with refusals_are_wrong_usage():
        return SamplingParams(**given(args, tuple(FIELDS)))


def _add(parser: ArgumentParser, title: str, names: Iterable[str]) -> None:
    group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
    meanings = dict(re.findall(r"^ *(\w+)  +(.+)$", SamplingParams.__doc__ or "", re.MULTILINE))
    for name in names:
        how = _KINDS[FIELDS[name].type]
        repeated = how.get("action") == "append"
        text = meanings.get(name, "") + "; may be repeated" * repeated + _default(FIELDS[name].default)
        group.add_argument(_flag(name, repeated), dest=name, help=text, **how)


def _flag(name: str, repeated: bool) -> str:
    """Return the option of a field, in the singular where it gives one of several: `--stop-token-id`."""
    one = name.removesuffix("s") if repeated and not name.endswith("bias") else name
    return "--" + one.replace("_", "-")


def _default(value: object) -> str:
    """Return a default as it stands behind an option's meaning. What is absent, empty or False goes without saying."""
    if isinstance(value, tuple):
        value = " ".join(map(repr, value))
    if value in ("", None) or isinstance(value, bool):
        return ""
    return f" ({value:g})" if isinstance(value, float) else f" ({value})"


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=BIAS, such as 42=-1.5 or 42=-inf, got {text!r}") from None


_KINDS: dict[Any, dict[str, Any]] = {
    "float": {"type": float, "metavar": "X"},
    "int": {"type": int, "metavar": "N"},
    "int | None": {"type": int, "metavar": "N"},
    "bool": {"action": "store_true"},
    "str | Sequence[str]": {"action": "append", "metavar": "TEXT"},
    "Sequence[int]": {"action": "append", "type": int, "metavar": "ID"},
    "Mapping[int, float] | Sequence[tuple[int, float]]": {"action": "append", "type": _bias, "metavar": "ID=BIAS"},
}
"""How a field of each type is read from the command line; types are written as in the dataclass."""
