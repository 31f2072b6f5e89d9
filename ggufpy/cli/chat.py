"""`ggufpy chat`: a conversation, line by line, in one session that keeps what was said."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from ggufpy.cli.generate import show, statistics, write
from ggufpy.cli.loading import drafting, find, load, open_session, read_text, refusals_are_wrong_usage
from ggufpy.cli.sampling import sampling_params
from ggufpy.cli.terminal import say
from ggufpy.errors import ContextLengthError

__all__ = ["run"]

HELP = "Enter sends, Ctrl-C stops an answer, /clear starts anew, /help says this, /exit or Ctrl-D ends."


def run(args: Namespace) -> int:
    """Answer each line of standard input until it ends."""
    params = sampling_params(args)
    template = None if args.chat_template is None else read_text(args.chat_template)
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    with load(find(args.model), args) as model, drafting(args) as draft, open_session(model, args) as session:
        options: dict[str, Any] = {"chat_template": template, "session": session, "draft": draft, "n_keep": args.n_keep}
        messages = list(start)
        for line in _lines():
            if line == "/clear":
                messages = list(start)
                continue
            if line == "/help":
                say(HELP)
                continue
            messages.append({"role": "user", "content": line})
            try:
                with _interruptible() as cancel:
                    with refusals_are_wrong_usage():
                        chunks = model.stream_chat(messages, params, cancel=cancel, **options)
                    answer = show(chunks, "thinking")
            except ContextLengthError as error:
                if not _is_interactive():
                    raise
                messages.pop()
                say(f"{error} (/clear starts anew)")
                continue
            messages.append({"role": "assistant", "content": answer.text})
            if args.verbose:
                say(statistics(answer))
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C sets, so that an answer ends between two tokens; a second Ctrl-C raises as usual."""
    cancel = threading.Event()

    def note(number: int, frame: object) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Read messages; empty lines are none. Ctrl-C takes a line back, and twice in a row ends the program."""
    interactive, interrupted = _is_interactive(), False
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # whatever the locale
    if interactive:
        say(HELP)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` editing and history)
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            say("(once more, or Ctrl-D, to end)")
            continue
        interrupted = False
        if (not interactive and not line) or line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
