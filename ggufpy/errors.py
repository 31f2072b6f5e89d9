"""The exceptions ggufpy raises. Each is also the builtin a caller would expect to catch."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "BackendError",
    "BuildError",
    "ClosedError",
    "ContextLengthError",
    "DownloadError",
    "DumpError",
    "GGUFError",
    "GgufpyError",
    "GraphError",
    "SamplingError",
    "SnapshotError",
    "StoppedError",
    "TemplateError",
    "TokenizerError",
    "UnsupportedArchitectureError",
]


class GgufpyError(Exception):
    """The base of every error that ggufpy raises on purpose."""


class BuildError(GgufpyError, ImportError):
    """The compiled part is missing, or was built for another machine."""


class GGUFError(GgufpyError, ValueError):
    """A GGUF file is not what the format, or the model it claims to be, asks for.

    Where a file is at fault, `path` is the file and `reason` the message without it.
    """

    path: Path | None = None
    reason: str = ""


class UnsupportedArchitectureError(GGUFError):
    """The file's `general.architecture` is not one that ggufpy can build."""


class TokenizerError(GgufpyError, ValueError):
    """A vocabulary or a text cannot be tokenized."""


class TemplateError(GgufpyError, ValueError):
    """A chat template is missing, is broken, or refused the messages."""


class GraphError(GgufpyError, ValueError):
    """An operation was asked for with shapes or types that ggml would not take."""


class BackendError(GgufpyError, RuntimeError):
    """A device is missing, refused a request, or ran out of memory."""


class StoppedError(BackendError):
    """A computation was stopped by `Session.cancel`. The session goes on from what was computed before."""


class ContextLengthError(GgufpyError, ValueError):
    """More tokens were given than the context has room for."""


class SamplingError(GgufpyError, ValueError):
    """A sampling parameter is out of range, or no token can be chosen from the logits (NaN in them, nothing left)."""


class SnapshotError(GgufpyError, ValueError):
    """A saved session is damaged, or belongs to another model, to another kind of session or to another version.

    `path` is the file.
    """

    path: Path | None = None


class ClosedError(GgufpyError, ValueError):
    """Something was used after it had been closed."""


class DownloadError(GgufpyError, OSError):
    """A named model is unknown, or could not be fetched, checked or kept."""


class DumpError(GgufpyError, ValueError):
    """A file of reference logits is damaged, or does not belong to the model it is compared with."""
