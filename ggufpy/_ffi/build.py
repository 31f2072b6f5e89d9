"""Turns decl/*.h, shim.c, tokenizer.c and sampling.c into the C source of the cffi module `ggufpy._ffi._ggml`.

It owns the order of the declarations and what is compiled in. It does not compile: build_ggml.py does.
Nothing here is imported at run time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cffi import FFI

__all__ = ["MODULE", "TOPICS", "ffi_builder"]

MODULE = "ggufpy._ffi._ggml"
TOPICS = ("types", "misc", "tensor", "ops", "graph", "alloc", "backend", "sched", "shim", "tokenizer", "sampling")

_HERE = Path(__file__).parent
_SOURCES = ("shim.c", "tokenizer.c", "sampling.c")
_PREAMBLE = """
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
"""


def ffi_builder(record: Mapping[str, Any]) -> FFI:
    """Return the FFI of the module; `record` says how ggml was built and is kept in the module as JSON."""
    ffi = FFI()
    for topic in TOPICS:
        ffi.cdef((_HERE / "decl" / f"{topic}.h").read_text(encoding="utf-8"))
    text = json.dumps(json.dumps(dict(record), sort_keys=True))  # a JSON string of ASCII is also a C string
    define = f"#define GGUFPY_BUILD_RECORD {text}\n"
    sources = [(_HERE / name).read_text(encoding="utf-8") for name in _SOURCES]
    ffi.set_source(MODULE, "".join([_PREAMBLE, define, *sources]))
    return ffi
