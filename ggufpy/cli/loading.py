"""What several commands do first: find the model, load it, and turn options into what the library takes."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufpy.cli.parser import LOAD, SESSION, UsageError, given
from ggufpy.cli.terminal import Status
from ggufpy.errors import GgufpyError, SamplingError

if TYPE_CHECKING:
    from ggufpy.model import Model
    from ggufpy.session import Session
    from ggufpy.speculation import Drafting

__all__ = ["drafting", "find", "load", "open_session", "read_text", "refusals_are_wrong_usage"]


def find(name_or_path: str) -> Path:
    """Return the path of a model, fetching a named one while saying how far that is."""
    from ggufpy.hub import resolve

    with Status(f"fetching {name_or_path}", plain=True) as status:
        return resolve(name_or_path, progress=status.report)


def read_text(path: str | None) -> str:
    """Return the text of a file, or of standard input for None and "-"."""
    if path in (None, "-"):
        raw, where = sys.stdin.buffer.read(), "standard input"
    else:
        raw, where = Path(str(path)).read_bytes(), str(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: expected UTF-8, found another byte at {error.start}") from error


def load(path: Path, args: Namespace) -> Model:
    """Load a model as the options say."""
    from ggufpy.model import Model

    with refusals_are_wrong_usage(), Status("loading the model") as status:
        return Model.load(path, progress=status.report, **given(args, LOAD))


def open_session(model: Model, args: Namespace, **defaults: Any) -> Session:
    """Open a session as the options say, or else the defaults."""
    with refusals_are_wrong_usage():
        return model.session(**{**defaults, **given(args, SESSION)})


@contextlib.contextmanager
def drafting(args: Namespace) -> Iterator[Drafting | None]:
    """Give the way of guessing ahead that the options ask for, if they do."""
    if args.draft is None and not args.prompt_lookup:
        yield None
        return
    from ggufpy.speculation import DraftModel, PromptLookup

    if args.draft is None:
        yield PromptLookup()
        return
    with load(find(args.draft), args) as small:
        yield DraftModel(small, **given(args, ("n_threads", "n_threads_batch")))


@contextlib.contextmanager
def refusals_are_wrong_usage() -> Iterator[None]:
    """Tell a value out of range, a SamplingError or a plain ValueError, from what is wrong with a file or a text."""
    try:
        yield
    except SamplingError as error:
        raise UsageError(str(error)) from error
    except GgufpyError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
