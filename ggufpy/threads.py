"""Generators in worker threads: what asynchronous calls are made of.

This file owns how an event loop waits for a thread, and what a cancelled task does to it. What is computed there is
engine.py's. Knows no sessions and no models.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

from ggufpy.engine import Stop

__all__ = ["in_threads"]

T = TypeVar("T")
INTERVAL = 0.005
"""After so long a step that goes on is stopped again: it may just have begun."""


async def in_threads(make: Callable[[Stop], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
    """Make a generator, advance it and close it in worker threads, so that the event loop goes on meanwhile.

    Cancelled in a step, it stops the step, waits for its end and closes the generator: when the CancelledError arrives
    nothing computes any more.
    """
    in_thread, stop = functools.partial(asyncio.get_running_loop().run_in_executor, None), Stop()
    end: Any = object()
    generator = await in_thread(make, stop)
    try:
        while (found := await _ended(in_thread(next, generator, end), stop)) is not end:
            yield found
    finally:
        await _ended(in_thread(generator.close), stop)


async def _ended(running: asyncio.Future[T], stop: Stop) -> T:
    """Wait for a thread and return its result. Cancelled meanwhile, stop it, and pass that on when it has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running], timeout=INTERVAL if cancelled else None)
        except asyncio.CancelledError as error:
            cancelled = error
        if cancelled:
            stop.set()
    if cancelled:
        running.exception()  # nobody wants it, and asyncio would report that
        raise cancelled
    return running.result()
