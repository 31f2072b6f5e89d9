"""Types the compiled cffi module: its names come from decl/*.h, which a stub would only repeat."""

from typing import Any

ffi: Any
lib: Any
