"""The `ggufpy` command: runs one command and turns whatever happens into one line and an exit code.

What each command does is in the module of its name, imported only when it is asked for; the options are in `parser`.
Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 141 when nobody reads the output any more.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from ggufpy.cli.parser import UsageError, parse
from ggufpy.cli.terminal import one_line, say
from ggufpy.errors import GgufpyError

__all__ = ["main"]

FAILED, MISUSED, INTERRUPTED, UNREAD = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own when None) and return the exit code; nothing is raised."""
    _open_closed_streams()
    try:
        args = parse(argv)
    except SystemExit as exit:  # argparse has printed what there is to say
        return exit.code if isinstance(exit.code, int) else FAILED
    with _reporting(args.verbose):
        return _run(args)


def _open_closed_streams() -> None:
    """Give a standard stream that was closed (`>&-`) to nobody, before a file of ours gets its number."""
    streams = {"stdin": "r", "stdout": "w", "stderr": "w"}
    if all(getattr(sys, name) for name in streams):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) < len(streams):
        pass
    os.close(number)
    for name, mode in streams.items():
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (until the process ends)


def _run(args: Namespace) -> int:
    name = "ggufpy" if args.command == "version" else f"ggufpy {args.command}"
    try:
        command = importlib.import_module(f"ggufpy.cli.{args.command}")
        code: int = command.run(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        say(f"{name}: error: {one_line(str(error))} (see `{name} --help`)")
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return UNREAD
    except Exception as error:
        if args.verbose:
            import traceback

            traceback.print_exc()
        say(f"{name}: error: {_describe(error)}")
        return FAILED


def _describe(error: Exception) -> str:
    """Put an error into one line that a terminal can show."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return one_line(f"{os.fsdecode(error.filename)}: {error.strerror}")
    if isinstance(error, (GgufpyError, OSError)):
        return one_line(str(error))
    if isinstance(error, MemoryError):
        return "out of memory"
    return one_line(f"internal: {type(error).__name__}: {error} (a bug; --verbose shows where)")


def _abandon_stdout() -> None:
    """Keep the interpreter from complaining, when it flushes at exit, that nobody reads."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Say(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"ggufpy: {one_line(record.getMessage())}")


@contextlib.contextmanager
def _reporting(verbose: bool) -> Iterator[None]:
    """Show the package's warnings and log as single lines on standard error while a command runs."""
    logger, handler = logging.getLogger("ggufpy"), _Say(logging.NOTSET if verbose else logging.WARNING)
    level = logger.level
    logger.addHandler(handler)
    if verbose:
        logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"ggufpy: warning: {one_line(str(message))}")
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
