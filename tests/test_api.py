"""The public names: what `ggufpy` offers, where it comes from, and what an import costs. Renaming one breaks users."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ggufpy
from ggufpy import GGUFFile, Model, Session, Tokenizer, errors

NAMES = {
    "BackendError", "BuildError", "ClosedError", "Completion", "CompletionChunk", "ContextLengthError", "Device",
    "DownloadError", "DraftModel", "DumpError", "GGUFError", "GGUFFile", "GGUFWriter", "GgufpyError", "GraphError",
    "Model", "PromptLookup", "SamplingError", "SamplingParams", "Session", "SnapshotError", "StoppedError",
    "TemplateError", "Tokenizer", "TokenizerError", "UnsupportedArchitectureError", "__version__", "build_info",
    "devices",
}  # fmt: skip
MODULES = {"arch", "hub", "reference", "testing"}
PARAMETERS: dict[Callable[..., Any], str] = {
    Model.load: "path n_gpu_layers devices use_mmap repack progress",
    Model.from_pretrained: "name filename options",
    Model.generate: "prompt params session cancel max_num_seqs draft n_keep overrides",
    Model.stream_generate: "prompt params session cancel max_num_seqs draft n_keep overrides",
    Model.agenerate: "prompt params session max_num_seqs draft n_keep overrides",
    Model.astream: "prompt params session max_num_seqs draft n_keep overrides",
    Model.chat: "messages params tools chat_template chat_template_kwargs session cancel overrides",
    Model.stream_chat: "messages params tools chat_template chat_template_kwargs session cancel overrides",
    Model.achat: "messages params tools chat_template chat_template_kwargs session overrides",
    Model.astream_chat: "messages params tools chat_template chat_template_kwargs session overrides",
    Session.decode: "token_ids seq_id logits copy",
    Session.decode_batch: "batch copy",
    Session.embed: "token_ids seq_id pooling",
    Session.trim: "seq_id n",
    Session.fork: "src dst",
    Session.clear: "seq_id",
    Session.save: "path seq_id",
    Session.load: "path seq_id",
    Session.check_shift: "",
    Session.shift: "seq_id n_keep n_discard",
    Session.cancel: "",
    Tokenizer.encode: "text add_special parse_special",
    Tokenizer.decode: "ids skip_special_tokens",
    GGUFFile.data: "name",
    GGUFFile.dequantize: "name",
    ggufpy.arch.names: "",
    ggufpy.testing.write_tiny_model: "name path seed type variant",
}
OPTIONS = [
    "n_ctx", "n_seq_max", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "flash_attn", "type_k", "type_v",
    "kv_unified", "swa_full", "kv_cache_dir",
]  # fmt: skip


def test_the_public_names() -> None:
    """Every name is there, and none that is not listed here."""
    assert NAMES == set(ggufpy.__all__)
    assert NAMES | MODULES == set(dir(ggufpy))
    for name in NAMES | MODULES:
        assert getattr(ggufpy, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Llama'"):
        _ = ggufpy.Llama


def test_a_type_checker_sees_the_same_names() -> None:
    """What is looked up on first use is imported for type checkers, name by name, from the same home."""
    tree = ast.parse(Path(ggufpy.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in checked.body for alias in node.names}  # type: ignore[attr-defined]
    homes = {name: f"ggufpy.{home}" for name, home in ggufpy._HOME.items()} | dict.fromkeys(MODULES, "ggufpy")
    assert homes == seen


def test_every_error_is_public_and_of_one_kind() -> None:
    """Whoever catches GgufpyError catches all of ours; each is also the builtin that a caller would expect."""
    for name in errors.__all__:
        kind = getattr(ggufpy, name)
        assert issubclass(kind, ggufpy.GgufpyError)
        assert name == "GgufpyError" or issubclass(kind, (ValueError, RuntimeError, OSError, ImportError))


@pytest.mark.parametrize(("function", "names"), PARAMETERS.items(), ids=lambda x: getattr(x, "__qualname__", ""))
def test_parameters_keep_their_names(function: Callable[..., Any], names: str) -> None:
    """Parameters are part of the interface, and so is their order."""
    found = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    assert names.split() == found


def test_session_options_keep_their_names() -> None:
    """A session takes llama.cpp's options by name."""
    from ggufpy.session import SessionOptions

    assert OPTIONS == list(inspect.signature(SessionOptions).parameters)


def test_importing_costs_nothing() -> None:
    """`import ggufpy`, and looking into a file, need neither NumPy nor the compiled part."""
    code = "import sys, ggufpy; ggufpy.GGUFFile; print({'numpy', 'ggufpy._ffi', 'jinja2'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "set()\n" == done.stdout


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_public_things_say_what_they_do(name: str) -> None:
    """Every public class and function, and every public member of a class, has a docstring."""
    thing = getattr(ggufpy, name)
    assert thing.__doc__
    members = vars(thing).items() if inspect.isclass(thing) else ()
    bare = [
        key
        for key, member in members
        if not key.startswith("_")
        and (callable(member) or isinstance(member, (property, classmethod)))
        and not inspect.getdoc(getattr(thing, key) if not isinstance(member, property) else member)
    ]
    assert [] == bare
