"""Loads the compiled part of ggufpy, once, at import: the cffi module, ggml's base libraries, its backends.

It owns `ffi` and `C`, the way the libraries are opened, the check that this CPU can run them, ggml's log (to the logger
"ggufpy.ggml") and `build_info`. It knows no devices, tensors or graphs.

Our libraries are opened RTLD_LOCAL | RTLD_DEEPBIND: other packages load a ggml of their own with RTLD_GLOBAL, and
without DEEPBIND our calls would end up there.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import _cffi_backend  # noqa: F401  # first, so that it is not opened with the flags meant for our own libraries

from ggufpy._ffi.cpu import FEATURES, features_found
from ggufpy.errors import BackendError, BuildError

__all__ = ["C", "build_info", "check_status", "features_of", "ffi", "text_of"]

_LIB = Path(__file__).resolve().parent.parent / "lib"
_PREFIX = "libggufpy-ggml-"

_log = logging.getLogger("ggufpy.ggml")
_log.addHandler(logging.NullHandler())  # quiet unless the program asks


# --- the module ---


def _import_module() -> tuple[Any, Any]:
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0))
    try:
        from ggufpy._ffi import _ggml
    except ImportError as error:
        raise BuildError(
            f"the compiled part of ggufpy cannot be loaded ({error}). Install it again with `python -m pip install "
            "--force-reinstall --no-cache-dir ggufpy`, or, in a checkout, with `python -m pip install -e .`"
        ) from error
    finally:
        sys.setdlopenflags(flags)
    return _ggml.ffi, _ggml.lib


ffi, C = _import_module()

_record: dict[str, Any] = json.loads(ffi.string(C.ggufpy_build_record()))


def text_of(chars: Any) -> str:
    """Decode a C string; NULL is an empty one."""
    return str(ffi.string(chars).decode("utf-8", "replace")) if chars else ""


def _cpuid(leaf: int, subleaf: int) -> list[int]:
    registers = ffi.new("uint32_t[4]")
    C.ggufpy_cpuid(leaf, subleaf, registers)
    return list(registers)


def _check_build() -> None:
    """Refuse what would crash later: other libraries than the module was made with, or another CPU."""
    version = text_of(C.ggml_version())
    if version != _record["ggml_version"]:
        raise BuildError(f"ggml libraries: expected version {_record['ggml_version']}, loaded {version}; install again")
    needed = _record["cpu_features"]
    found = features_found(needed, _cpuid, C.ggufpy_xcr0)
    if missing := [name for name in needed if name not in found]:
        raise BuildError(
            f"this ggufpy was compiled for a CPU with {', '.join(missing)}, which this CPU lacks. Build it here with "
            "`python -m pip install --force-reinstall --no-cache-dir ggufpy`, or build it for every CPU with "
            "GGUFPY_PORTABLE=on"
        )


# --- ggml's log ---

_LEVELS = {
    C.GGML_LOG_LEVEL_NONE: logging.INFO,
    C.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
    C.GGML_LOG_LEVEL_INFO: logging.INFO,
    C.GGML_LOG_LEVEL_WARN: logging.WARNING,
    C.GGML_LOG_LEVEL_ERROR: logging.ERROR,
}


class _Fragments(threading.local):
    """Joins the pieces of a log line, for each thread its own."""

    level = logging.INFO
    text = ""

    def add(self, level: int, text: str) -> None:
        if level != C.GGML_LOG_LEVEL_CONT:
            self.flush()
            self.level = _LEVELS.get(level, logging.INFO)
        self.text += text
        if self.text.endswith("\n"):
            self.flush()

    def flush(self) -> None:
        text, self.text = self.text.rstrip(), ""
        if text:
            _log.log(self.level, "%s", text)


_fragments = _Fragments()


@ffi.def_extern(onerror=lambda *_: None)  # type: ignore[untyped-decorator]  # an exception has nowhere to go in C
def ggufpy_log(level: int, text: Any, _user_data: Any) -> None:
    _fragments.add(level, text_of(text))


# --- backends ---

_unavailable: dict[str, str] = {}  # backend libraries that this system cannot load, and why


def _load(path: Path) -> bool:
    """Open a backend library our way, then let ggml find it open and register it."""
    library = C.ggufpy_dlopen(os.fsencode(path)) or _load_with_cublas(path)
    if library and C.ggml_backend_load(os.fsencode(path)):
        return True
    name = path.stem.removeprefix(_PREFIX)
    _unavailable[name] = "does not start on this system" if library else text_of(C.ggufpy_dlerror())
    _log.info("backend %s: %s", name, _unavailable[name])
    return False


def _load_with_cublas(path: Path) -> Any:
    """Open a library that missed cuBLAS once more, after NVIDIA's wheel: beside an editable install it is elsewhere."""
    if "libcublas" in text_of(C.ggufpy_dlerror()):
        for entry in sys.path:
            for cublas in Path(entry).glob("nvidia/*/lib/libcublas.so.*"):
                C.ggufpy_dlopen(os.fsencode(cublas))
    return C.ggufpy_dlopen(os.fsencode(path))


def _best_cpu_library(paths: list[Path]) -> Path | None:
    """Return the variant that ggml scores highest on this CPU; one that stands alone needs no score."""
    if len(paths) < 2:
        return paths[0] if paths else None
    scores = {path: C.ggufpy_backend_score(os.fsencode(path)) for path in paths}
    best = max(paths, key=scores.__getitem__)
    return best if scores[best] > 0 else None


def _load_backends() -> None:
    # By absolute path only: ggml's own search would look in other folders and obey GGML_BACKEND_PATH.
    cpu = sorted(_LIB.glob(f"{_PREFIX}cpu*.so"))
    others = [path for path in sorted(_LIB.glob(f"{_PREFIX}*.so")) if path not in cpu and path.stem != f"{_PREFIX}base"]
    for path in others:  # before the CPU, as in llama.cpp
        _load(path)
    best = _best_cpu_library(cpu)
    if best is None or not _load(best):
        raise BuildError(f"no CPU backend of ggml in {_LIB} can run here {_unavailable}; install ggufpy again")


# --- what others use ---


def check_status(status: int, what: str) -> None:
    """Raise BackendError if `status` (an enum ggml_status) is not success; `what` says what was tried."""
    if status != C.GGML_STATUS_SUCCESS:
        raise BackendError(f"{what}: {text_of(C.ggml_status_to_string(status))}")


def features_of(reg: Any) -> dict[str, str]:
    """Return what a backend says about itself (`ggml_backend_get_features`): {"OPENMP": "1", …}."""
    features, feature = {}, C.ggufpy_reg_features(reg)
    while feature and feature.name:
        features[text_of(feature.name)] = text_of(feature.value)
        feature += 1
    return features


def _backends() -> dict[str, dict[str, Any]]:
    backends = {}
    for i in range(C.ggml_backend_reg_count()):
        reg = C.ggml_backend_reg_get(i)
        devices = [C.ggml_backend_reg_dev_get(reg, k) for k in range(C.ggml_backend_reg_dev_count(reg))]
        names = [text_of(C.ggml_backend_dev_name(device)) for device in devices]
        backends[text_of(C.ggml_backend_reg_name(reg))] = {"devices": names, "features": features_of(reg)}
    return backends


def build_info() -> dict[str, Any]:
    """Return how ggml was built and what it found here.

    Keys: ggml_version, ggml_commit (of llama.cpp, from the pin), options (CMake's, by name), compiler; native,
    portable, cuda (bools); cpu_features_needed, cpu_features_found (lists of compiler macro names: "AVX512VNNI");
    backends (name → devices, features), backends_unavailable (name → reason).
    """
    info = dict(_record)
    info["cpu_features_needed"] = info.pop("cpu_features")
    info["cpu_features_found"] = list(features_found(FEATURES, _cpuid, C.ggufpy_xcr0))
    info["backends"] = _backends()
    info["backends_unavailable"] = dict(_unavailable)
    return info


_check_build()
C.ggml_log_set(C.ggufpy_log, ffi.NULL)
atexit.register(C.ggml_log_set, ffi.addressof(C, "ggufpy_log_discard"), ffi.NULL)  # no Python once it shuts down
_load_backends()
