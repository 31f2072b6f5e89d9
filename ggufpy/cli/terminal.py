"""How things look in a terminal: tables, sizes, text made harmless, and a status line for what takes long."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

__all__ = ["Status", "count", "one_line", "say", "size", "table", "tolerant", "visible"]

ERASE_LINE = "\r\x1b[K"

# Control characters, marks that turn the direction of writing, and what is left of bytes that were not UTF-8.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, *, keep: str = "") -> str:
    """Return `text` with everything a terminal might obey written as an escape, but for the characters of `keep`."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(text: str) -> str:
    """Return `text` as one harmless line."""
    return visible(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def say(line: str) -> None:
    """Write a line to standard error, in place of a status line that stands there."""
    erase = ERASE_LINE if Status.drawn else ""
    print(erase + line, file=tolerant(sys.stderr), flush=True)


def tolerant(stream: TextIO) -> TextIO:
    """Make a stream replace what its encoding cannot express, in place of failing; return it."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return stream


def size(n: float) -> str:
    """Write a number of bytes for people: `98.4 MB`. Decimal, as disks and downloads count."""
    return _scaled(n, ("B", "kB", "MB", "GB", "TB"))


def count(n: float) -> str:
    """Write a number of things for people: `134.5 M`."""
    return _scaled(n, ("", "k", "M", "G", "T")).rstrip()


def _scaled(n: float, units: Sequence[str]) -> str:
    step = 0
    while n >= 999.5 and step < len(units) - 1:
        n, step = n / 1000, step + 1
    return f"{n:.{1 if step else 0}f} {units[step]}"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "") -> str:
    """Lay out rows in columns two spaces apart; the columns in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


class Status:
    """Say on standard error what is going on, once it has taken longer than a second.

    On a terminal this is one line that is redrawn and vanishes at the end. Elsewhere there is nothing, or, with `plain`
    (for downloads), a line now and then about what was reported.
    """

    DELAY = 1.0
    PLAIN_EVERY = 5.0
    drawn = False

    def __init__(self, what: str, *, plain: bool = False) -> None:
        self.what = what
        self._plain = plain
        self._done, self._total = 0, 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._next_plain = self._started + self.DELAY

    def __enter__(self) -> Status:
        if self._terminal:
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def report(self, done: int, total: int) -> None:
        """Take note of how far things are, in bytes."""
        self._done, self._total = done, total
        now = time.monotonic()
        if self._plain and not self._terminal and now >= self._next_plain:
            self._next_plain = now + self.PLAIN_EVERY
            say(f"{self.what}: {_share(done, total)}")

    def close(self) -> None:
        """Erase the line. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _draw(self) -> None:
        wait = self.DELAY
        while not self._stop.wait(wait):
            wait = 0.2
            done, total = self._done, self._total
            counted = f"  {_bar(done, total)}  {_share(done, total)}" if total else ""
            line = f"{self.what}{counted}  {time.monotonic() - self._started:.0f} s"
            print(ERASE_LINE + line[: _columns() - 1], end="", file=sys.stderr, flush=True)
            Status.drawn = True
        if Status.drawn:
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)
            Status.drawn = False


def _share(done: int, total: int) -> str:
    return f"{done * 100 // max(total, 1):3}%  {size(done)} of {size(total)}"


def _bar(done: int, total: int, width: int = 10) -> str:
    full = min(done * width // total, width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80
