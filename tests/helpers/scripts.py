"""Scripts for a process of its own: what may crash or hang, and what is judged by how a process ends."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["IN_THREADS", "run"]

IN_THREADS = """
import sys, threading
from ggufpy import *
def in_threads(*jobs):
    errors = []
    def guarded(job):
        try:
            job()
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert not any(t.is_alive() for t in threads), "hangs"
    return errors
model = Model.load(sys.argv[1])
"""
"""The beginning of a script: loads a model, and `in_threads` runs jobs at once and returns what they raised."""


def run(script: str, *args: object) -> str:
    """Run a script in a process of its own, which may crash; its output, once it ended well and quietly."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout
