"""Drives llama.cpp through llama-cpp-python's low-level calls, with the names ggufpy uses, so one script runs on both.

Owns the reference side of every comparison: model, session, timing loop, node capture. Knows nothing of ggufpy, and
uses none of llama-cpp-python's high-level classes, which hide the switch for repacked weights and set their own
defaults. Arrays are in NumPy order.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

__all__ = ["VERSION", "ReferenceModel", "ReferenceSession", "commit", "system_info"]

VERSION: str = llama_cpp.__version__
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
POOLING = {None: 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
WARNING = 3  # enum ggml_log_level
_errors: list[str] = []


@llama_cpp.llama_log_callback
def _keep_warnings(level: int, text: bytes, _: Any) -> None:
    if level == WARNING or level == WARNING + 1:
        _errors.append(text.decode("utf-8", "replace").strip())
        del _errors[:-8]


llama_cpp.llama_log_set(_keep_warnings, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def _base_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))


def commit() -> str:
    """Return the llama.cpp commit that the library was built from, as ggml reports it."""
    function = _base_library().ggml_commit
    function.restype = ctypes.c_char_p
    return str(function().decode())


def system_info() -> str:
    """Return llama.cpp's line about the CPU features and options it was built with."""
    return str(llama_cpp.llama_print_system_info().decode())


class ReferenceModel:
    """Loads a GGUF file as llama.cpp does: `repack` is `use_extra_bufts`, off unless asked for."""

    def __init__(self, path: str | Path, *, repack: bool = False, use_mmap: bool = True) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        _errors.clear()
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise RuntimeError(f"llama.cpp cannot load {path}: {' / '.join(_errors)}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))

    def session(self, **options: Any) -> ReferenceSession:
        """Make a context; the options are those of ggufpy's `Model.session`."""
        return ReferenceSession(self, **options)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return llama.cpp's token ids of a text."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        if n < 0:
            raise RuntimeError(f"llama.cpp needs {-n} tokens for {len(data)} bytes")
        return list(ids[:n])

    def close(self) -> None:
        """Free the model."""
        if self.pointer:
            llama_cpp.llama_model_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> ReferenceModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReferenceSession:
    """A llama_context with the methods of ggufpy's `Session`."""

    def __init__(
        self,
        model: ReferenceModel,
        *,
        n_ctx: int = 512,
        n_seq_max: int = 1,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int = 2,
        n_threads_batch: int | None = None,
        flash_attn: bool = True,
        type_k: str = "f16",
        type_v: str = "f16",
        kv_unified: bool = False,
        swa_full: bool = True,
        embeddings: bool = False,
        pooling: str | None = None,
        on_node: Callable[[Any], None] | None = None,
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = n_ctx, n_seq_max, n_batch, n_ubatch
        params.n_threads, params.n_threads_batch = n_threads, n_threads_batch or n_threads
        params.flash_attn_type = int(flash_attn)
        params.type_k, params.type_v = TYPES[type_k], TYPES[type_v]
        params.kv_unified, params.swa_full, params.no_perf = kv_unified, swa_full, True
        params.embeddings, params.pooling_type = embeddings, POOLING[pooling]
        if on_node is not None:
            self._callback = llama_cpp.ggml_backend_sched_eval_callback(_node_callback(on_node))
            params.cb_eval = self._callback
        self.model = model  # llama.cpp's context points into it
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise RuntimeError(f"llama.cpp cannot make a context: {' / '.join(_errors)}")
        self.memory = llama_cpp.llama_get_memory(self.pointer)
        self.n_ctx = int(llama_cpp.llama_n_ctx(self.pointer))
        self.n_vocab, self.pooling = model.n_vocab, pooling

    def embed(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the embeddings of tokens that stand alone, [n_tokens, n_embd] or pooled; needs `embeddings=True`."""
        ids = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        self.clear()
        self._check(llama_cpp.llama_decode(self.pointer, llama_cpp.llama_batch_get_one(ids, len(ids))))
        if self.pooling is not None:
            return self._pooled(0)
        rows, n_embd = llama_cpp.llama_get_embeddings(self.pointer), llama_cpp.llama_model_n_embd(self.model.pointer)
        return np.ctypeslib.as_array(rows, (len(token_ids), n_embd)).copy()

    def embed_batch(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the pooled embeddings of texts computed in one llama_decode call, or their ranks, [n_labels]."""
        self.clear()
        self._decode([(seq_id, list(ids), set(range(len(ids)))) for seq_id, ids in enumerate(texts)])
        return [self._pooled(seq_id) for seq_id in range(len(texts))]

    def _pooled(self, seq_id: int) -> np.ndarray:
        size = llama_cpp.llama_model_n_cls_out if self.pooling == "rank" else llama_cpp.llama_model_n_embd
        row = llama_cpp.llama_get_embeddings_seq(self.pointer, seq_id)
        return np.ctypeslib.as_array(row, (size(self.model.pointer),)).copy()

    def decode(self, token_ids: Sequence[int], *, seq_id: int = 0, logits: Any = "last") -> np.ndarray:
        """Decode one sequence's tokens and return the rows asked for, float32 [n_outputs, n_vocab]."""
        return self.decode_batch([(seq_id, token_ids, logits)])[0]

    def decode_batch(self, items: Iterable[tuple[int, Sequence[int], Any]]) -> list[np.ndarray]:
        """Decode several sequences' tokens in one llama_decode call; `logits` is "last", "all" or indices."""
        items = [(seq_id, list(ids), _rows(logits, len(ids))) for seq_id, ids, logits in items]
        self._decode(items)
        counts = [len(rows) for _, _, rows in items]
        return np.split(self._logits(sum(counts)), np.cumsum(counts)[:-1])

    def _decode(self, items: Sequence[tuple[int, list[int], set[int]]]) -> None:
        batch = llama_cpp.llama_batch_init(sum(len(ids) for _, ids, _ in items), 0, 1)
        for seq_id, ids, rows in items:
            n_past = self.n_past(seq_id)
            for index, token in enumerate(ids):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, n_past + index
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, seq_id
                batch.logits[at] = index in rows
                batch.n_tokens += 1
        try:
            self._check(llama_cpp.llama_decode(self.pointer, batch))
        finally:
            llama_cpp.llama_batch_free(batch)

    def n_past(self, seq_id: int = 0) -> int:
        """Return how many positions of a sequence are in the cache."""
        return int(llama_cpp.llama_memory_seq_pos_max(self.memory, seq_id)) + 1

    def trim(self, seq_id: int, n: int) -> None:
        """Keep the first n positions of a sequence."""
        if not llama_cpp.llama_memory_seq_rm(self.memory, seq_id, n, -1):
            raise RuntimeError(f"llama.cpp cannot trim sequence {seq_id} to {n}")

    def fork(self, src: int, dst: int) -> None:
        """Make sequence dst a copy of sequence src."""
        self.trim(dst, 0)
        llama_cpp.llama_memory_seq_cp(self.memory, src, dst, -1, -1)

    def keep(self, seq_id: int) -> None:
        """Forget every sequence but one."""
        llama_cpp.llama_memory_seq_keep(self.memory, seq_id)

    def clear(self, seq_id: int | None = None) -> None:
        """Forget one sequence, or everything."""
        if seq_id is None:
            llama_cpp.llama_memory_clear(self.memory, True)
        else:
            self.trim(seq_id, 0)

    def prefill(self, token_ids: Sequence[int]) -> tuple[int, float]:
        """Decode a prompt into an empty cache; return the greedy next token and the seconds taken."""
        self.clear()
        ids = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        start = time.perf_counter()
        self._check(llama_cpp.llama_decode(self.pointer, llama_cpp.llama_batch_get_one(ids, len(ids))))
        token = int(self._last_row().argmax())
        return token, time.perf_counter() - start

    def greedy(self, token: int, n: int) -> tuple[list[int], float]:
        """Decode n tokens, each the argmax of the row before; return them and the seconds taken."""
        ids = (llama_cpp.llama_token * 1)(token)
        batch, made = llama_cpp.llama_batch_get_one(ids, 1), []
        start = time.perf_counter()
        for _ in range(n):
            self._check(llama_cpp.llama_decode(self.pointer, batch))
            ids[0] = int(self._last_row().argmax())
            made.append(ids[0])
        return made, time.perf_counter() - start

    def close(self) -> None:
        """Free the context."""
        if self.pointer:
            llama_cpp.llama_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> ReferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}: {' / '.join(_errors)}")

    def _logits(self, n_rows: int) -> np.ndarray:
        if n_rows == 0:
            llama_cpp.llama_synchronize(self.pointer)
            return np.empty((0, self.n_vocab), np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.pointer), (n_rows, self.n_vocab)).copy()

    def _last_row(self) -> np.ndarray:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.pointer, -1), (self.n_vocab,))


def _rows(logits: Any, n: int) -> set[int]:
    if isinstance(logits, str):
        return {"all": set(range(n)), "last": {n - 1}}[logits]
    return {int(index) % n for index in logits}


class _Tensor(ctypes.Structure):
    """The head of struct ggml_tensor (ggml.h): enough to read a node's type, shape and strides."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


def _node_callback(on_node: Callable[[tuple[str, np.ndarray]], None]) -> Callable[..., bool]:
    base = _base_library()
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    base.ggml_nbytes.restype, base.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def callback(pointer: int, ask: bool, _: Any) -> bool:
        tensor = _Tensor.from_address(pointer)
        if ask or tensor.type != TYPES["f32"]:
            return True
        data = np.empty(base.ggml_nbytes(pointer), np.uint8)
        base.ggml_backend_tensor_get(pointer, data.ctypes.data, 0, data.nbytes)
        view = np.lib.stride_tricks.as_strided(data.view(np.float32), tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1])
        on_node((base.ggml_get_name(pointer).decode(), view.copy()))
        return True

    return callback
