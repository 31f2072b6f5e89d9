"""A session: one context over a model, with its own memory, its own graphs and a lock.

This file owns which graph runs a micro-batch, what is written before and read after it, and what a sequence holds. It
knows token ids only; text is generate.py's, cutting is batch.py's, cells are memory.py's, the model's layers are
arch's. Arrays are in NumPy order.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from ggufpy.arch import Config, Decoder
from ggufpy.arch.decoder import FromPositions, GraphInputs, Rope
from ggufpy.backend import MAX_THREADS, Backend, Scheduler, physical_cores
from ggufpy.batch import (
    FloatArray,
    IntArray,
    MicroBatch,
    Part,
    Piece,
    Wanted,
    integers,
    micro_batch,
    split,
    wanted_rows,
)
from ggufpy.errors import ClosedError, ContextLengthError, StoppedError, UnsupportedArchitectureError
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Graph, Inputs, Tensor
from ggufpy.memory import CacheInputs, CacheOptions, KVCache, Memory, NoMemory, Place
from ggufpy.states import StateCache, StateInputs
from ggufpy.weights import Layout, Weights

if TYPE_CHECKING:  # sessions on disk are imported when there is one
    from ggufpy.snapshots import Subject

__all__ = ["MAX_CELLS", "MAX_SEQUENCES", "Pooling", "Session", "SessionOptions", "integer", "pad"]

Pooling = Literal["mean", "last", "cls", "rank"]
"""How tokens' embeddings become one: their mean, the last token's, the first token's, or scores, [n_labels], that a
classifier makes of one of these (of which is the model's own)."""

Output = Literal["logits", "rows"] | Pooling

POOLINGS = get_args(Pooling)
MEAN = 1  # enum llama_pooling_type
CACHE_TYPES = ("f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
INT_MAX = 2**31 - 1
MAX_CELLS = 2**24
"""More than any model's context; each cell costs a few bytes even while its keys and values cost nothing."""
MAX_SEQUENCES = 256
SECONDS_TO_STOP = 5
N_CTX_PAD = 256
NODES_PER_TENSOR = 8
MIN_NODES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a context is made of. Meanings and defaults are llama.cpp's (llama_context_params).

    n_ctx            tokens that all sequences together have room for, rounded up to 256 for each; None: as many as the
                     model was trained on
    n_seq_max        how many sequences
    n_batch          the most tokens that one slice of a call has; slices are cut into micro-batches
    n_ubatch         the most tokens computed together
    n_threads        threads to decode one token with; None: the physical cores this process may use
    n_threads_batch  threads for more tokens than one; None: n_threads
    flash_attn       attend by ggml's fused kernel; taken as False where an architecture's scores have none
    type_k, type_v   the type that keys and values are cached as: f16, f32, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl
    kv_unified       True: one cache of n_ctx cells that sequences share; False: n_ctx / n_seq_max cells for each
    kv_cache_dir     a folder: keys and values are a file there, without a name, whose pages the system may move to the
                     disk where memory is short (CPU only); None: they stay in memory
    swa_full         True: layers with a window cache the whole context too, so a sequence can be trimmed anywhere;
                     False: only the window and a micro-batch

    Raises ValueError, which names the option, for a value of the wrong type or out of range.
    """

    n_ctx: int | None = None
    n_seq_max: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    kv_unified: bool = False
    swa_full: bool = True
    kv_cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        limits = {"n_ctx": MAX_CELLS, "n_seq_max": MAX_SEQUENCES, "n_batch": INT_MAX, "n_ubatch": INT_MAX}
        for name, high in (limits | {"n_threads": MAX_THREADS, "n_threads_batch": MAX_THREADS}).items():
            value = getattr(self, name)
            if value is not None or name in ("n_seq_max", "n_batch", "n_ubatch"):
                object.__setattr__(self, name, integer(name, value, 1, high))
        for name in ("flash_attn", "kv_unified", "swa_full"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                raise ValueError(f"{name}: expected one of {', '.join(CACHE_TYPES)}, got {getattr(self, name)!r}")
        if self.kv_cache_dir is not None:
            if not isinstance(self.kv_cache_dir, (str, os.PathLike)):
                raise ValueError(f"kv_cache_dir: expected a folder's path or None, got {self.kv_cache_dir!r:.60}")
            object.__setattr__(self, "kv_cache_dir", os.fspath(self.kv_cache_dir))
        if not self.flash_attn and GGMLType[self.type_v.upper()].is_quantized:
            raise ValueError(f"type_v={self.type_v!r} needs flash_attn=True: without it V is stored transposed")


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return Python's or NumPy's integer as Python's; ValueError for anything else and out of range."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and low <= value <= high:
        return int(value)
    raise ValueError(f"{name}: expected an integer from {low} to {high}, got {value!r:.60}")


def _check_blocks(name: str, type: str, n_embd_head: int) -> None:
    block = GGMLType[type.upper()].block_size
    if n_embd_head % block:
        raise ValueError(f"{name}={type!r}: its blocks of {block} do not divide this model's heads of {n_embd_head}")


@dataclass(slots=True)
class _Run:
    """A built graph and the inputs to write before each computation."""

    key: tuple[object, ...]
    scheduler: Scheduler
    context: Context
    graph: Graph
    inputs: Inputs
    tokens: npt.NDArray[Any]
    positions: npt.NDArray[Any]
    out_ids: npt.NDArray[Any] | None
    derived: list[tuple[npt.NDArray[Any], FromPositions]]
    pool: npt.NDArray[Any] | None
    caches: Sequence[CacheInputs]
    output: Tensor | None
    in_place: FloatArray | None  # the output's memory, where the host can see it

    def result(self) -> FloatArray:
        """Return the logits or embeddings, [n_outputs, width], valid until the next computation."""
        if self.in_place is not None:
            return self.in_place
        assert self.output is not None
        rows: FloatArray = self.output.get().reshape(-1, self.output.ne[0])
        return rows


@dataclass(slots=True)
class _Step:
    """How to give each sequence of the last computation one more token, with its graph, at little cost."""

    runs: list[tuple[int, int]]
    positions: IntArray
    out_ids: IntArray
    followers: list[Callable[[], None]]
    left: int  # how many times

    def tokens_of(self, items: Sequence[Any], n_vocab: int) -> list[int] | None:
        """Return the tokens of a batch if it is one for each of these sequences, with its logits; otherwise None."""
        if not self.left or len(items) != len(self.runs):
            return None
        tokens = []
        for item, (expected, _) in zip(items, self.runs, strict=True):
            if type(item) is not tuple or len(item) != 3:
                return None
            seq_id, ids, wanted = item
            single = len(ids) == 1 if type(ids) is list else type(ids) is np.ndarray and ids.shape == (1,)
            if (
                not single
                or type(seq_id) is not int
                or seq_id != expected
                or type(wanted) is not str
                or wanted != "last"
            ):
                return None
            token = ids[0]
            if type(token) not in (int, np.int32, np.int64) or not 0 <= token < n_vocab:
                return None
            tokens.append(int(token))
        return tokens


class Session:
    """Decodes token ids with a model. Made by `Model.session`; safe to share between threads, which then queue.

    Several sequences (`seq_id` 0 to n_seq_max - 1) live side by side. Bits are llama.cpp's for the same micro-batches.
    """

    def __init__(
        self,
        arch: type[Decoder],
        config: Config,
        weights: Weights,
        layout: Layout,
        options: SessionOptions,
        fingerprint: Callable[[], str] = str,
    ) -> None:
        if options.flash_attn and not arch.flash_attn:
            options = replace(options, flash_attn=False)
        self._arch, self._config, self._weights = arch, config, weights
        self.options = options
        self._lock = threading.RLock()  # a signal's handler may come while its thread has it
        n_ctx = options.n_ctx or config.n_ctx_train
        self.n_batch = min(options.n_batch, n_ctx) if config.causal_attn else options.n_batch
        self.n_ubatch = min(options.n_ubatch, self.n_batch)
        self.n_ctx_seq = pad(n_ctx if options.kv_unified else pad(n_ctx) // options.n_seq_max)
        self.n_ctx = self.n_ctx_seq if options.kv_unified else self.n_ctx_seq * options.n_seq_max
        if self.n_ctx > MAX_CELLS:
            raise ContextLengthError(
                f"the model's context_length is {n_ctx}, a session holds at most {MAX_CELLS} tokens: give n_ctx"
            )
        if self.n_ctx_seq > pad(config.n_ctx_train):
            warnings.warn(
                f"n_ctx gives each sequence {self.n_ctx_seq} tokens, the model was trained on {config.n_ctx_train}",
                stacklevel=3,
            )
        if config.is_mla and options.type_k != options.type_v:
            raise ValueError(f"type_v={options.type_v!r}: as type_k={options.type_k!r} expected, V is a part of K here")
        for d_k, d_v in {config.head_widths(il) for il in range(config.n_layer)}:
            _check_blocks("type_k", options.type_k, d_k)
            _check_blocks("type_v", options.type_v, d_v)
        cores = physical_cores()
        self.n_threads = options.n_threads or cores
        self.n_threads_batch = options.n_threads_batch or options.n_threads or cores
        self._rope, self._n_planes = Rope.of(config), arch(config).n_planes()
        self._memory = self._make_memory(layout)
        self._n_positions = config.n_ctx_train if "position_embd.weight" in weights else self.n_ctx_seq
        self._backends = [Backend(device) for device in layout.devices]
        self._n_nodes = max(MIN_NODES, NODES_PER_TENSOR * len(weights) * config.n_loops)
        self._scheduler = Scheduler(self._backends, self._n_nodes)
        self._stepper: Scheduler | None = None  # for graphs of one token a sequence, beside the last prompt's graph
        self._streams = self._memory.caches[0].n_stream > 1
        self._evenly = self._streams or isinstance(self._memory.caches[-1], StateCache)
        self._alone = arch.cacheless or not config.causal_attn  # a call's tokens have to be computed together
        self._tokens: list[list[int]] = [[] for _ in range(options.n_seq_max)]
        self._runs: dict[bool, _Run] = {}  # the last graph, and the last of one token a sequence
        self._step: _Step | None = None
        self._fingerprint = fingerprint
        self._closed = self._cancelled = False
        _open_sessions.add(self)

    def _make_memory(self, layout: Layout) -> Memory | NoMemory:
        options, config = self.options, self._config
        cache_options = CacheOptions(
            options.n_seq_max,
            options.kv_unified or options.n_seq_max == 1,
            GGMLType[options.type_k.upper()],
            GGMLType[options.type_v.upper()],
            options.flash_attn,
            self._arch(config).max_alibi_bias() > 0,
            config.causal_attn,
            cast("str | None", options.kv_cache_dir),
        )
        if self._arch.cacheless:
            return NoMemory(config, cache_options)
        return Memory(
            config,
            cache_options,
            size=self.n_ctx_seq,
            n_ubatch=self.n_ubatch,
            swa_full=options.swa_full,
            states=self._arch(config).states(),
            device_of=lambda il: layout.layers[il],
        )

    # ---------------------------------------------------------------------------------------------------- decoding

    def decode(
        self, token_ids: Sequence[int] | IntArray, *, seq_id: int = 0, logits: Wanted = "last", copy: bool = True
    ) -> FloatArray:
        """Append tokens to a sequence and return the logits of the wanted ones, float32 [n_outputs, n_vocab].

        `logits` may be "last", "all", or indices into `token_ids`. The array is the caller's, or, with copy=False, may
        be the session's own: read-only, and overwritten by its next computation. Raises ContextLengthError, with
        nothing changed, where the tokens do not fit, and ValueError for ids out of range.
        """
        with self._lock:
            step = None if self._cancelled else self._step
            if step is not None and (tokens := step.tokens_of(((seq_id, token_ids, logits),), self._config.n_vocab)):
                rows = self._follow(step, tokens)
                return rows.copy() if copy else rows
        return self.decode_batch(((seq_id, token_ids, logits),), copy=copy)[0]

    def decode_batch(
        self, batch: Iterable[tuple[int, Sequence[int] | IntArray, Wanted]], *, copy: bool = True
    ) -> list[FloatArray]:
        """Append tokens to several sequences at once; returns each one's logits as `decode` does, in this order.

        Micro-batches are cut as llama.cpp cuts them. Raises as `decode` does, and UnsupportedArchitectureError for
        models without logits. A failure in the middle (BackendError) leaves micro-batches already computed in place;
        `n_past` says how far each sequence is, 0 where recurrent layers have lost their state.
        """
        items = tuple(batch)  # before the lock: the caller's iterator may ask this session
        with self._lock:
            self._begin()
            if not self._arch.logits:
                raise UnsupportedArchitectureError(
                    f"{self._config.architecture} models give no logits, see Session.embed"
                )
            if self._step is not None and (tokens := self._step.tokens_of(items, self._config.n_vocab)):
                rows = self._follow(self._step, tokens)
                each = [rows[i : i + 1] for i in range(len(tokens))]
                return [row.copy() for row in each] if copy else each
            for i, item in enumerate(items):
                if not isinstance(item, (tuple, list)) or len(item) != 3:
                    raise ValueError(f"batch[{i}]: expected (seq_id, token_ids, logits), got {item!r:.60}")
            parts = [self._part(*item) for item in items]
            self._check_different(parts)
            self._decode(parts, "logits", copy)
            return [part.result() for part in parts]

    def argmax(self, rows: Sequence[FloatArray]) -> list[int]:
        """Return the place of the largest value of each row, as NumPy's argmax does; the session's threads share them.

        `rows`: float32 [n] each, contiguous, all of one size. For a batch of logits of a large vocabulary. Raises
        ValueError for other rows.
        """
        rows = tuple(rows)
        with self._lock:
            self._check_open()
            self._backends[-1].set_n_threads(self.n_threads_batch)
            return self._backends[-1].argmax(rows)

    def embed(
        self, token_ids: Sequence[int] | IntArray, *, seq_id: int = 0, pooling: Pooling | None = None
    ) -> FloatArray:
        """Compute the embeddings of tokens that stand alone: float32 [n_tokens, n_embd], or pooled, [n_embd].

        They are llama.cpp's (llama_get_embeddings, llama_get_embeddings_seq): what the last norm gives, not scaled to
        a length of one. The sequence has to be empty and stays so. The array is the caller's. Raises
        ContextLengthError where the tokens do not fit; pooled ones have to fit one micro-batch (n_ubatch).
        UnsupportedArchitectureError for pooling="rank" where the model has no classifier.
        """
        return self.embed_batch(((seq_id, token_ids),), pooling=pooling)[0]

    def embed_batch(
        self, batch: Iterable[tuple[int, Sequence[int] | IntArray]], *, pooling: Pooling | None = None
    ) -> list[FloatArray]:
        """Compute the embeddings of several texts, (seq_id, token_ids) each, as `embed` does; returns them in order.

        Pooled ones are computed together and have to fit one micro-batch; where sequences have caches of their own
        (kv_unified=False) or states, they are computed one after another.
        """
        if pooling is not None and pooling not in POOLINGS:
            names = ", ".join(f'"{name}"' for name in POOLINGS)
            raise ValueError(f"pooling: expected None, {names}, got {pooling!r:.60}")
        items = tuple(batch)
        with self._lock:
            self._begin()
            if pooling == "rank" and not any(name in self._weights for name in ("cls.weight", "cls.output.weight")):
                raise UnsupportedArchitectureError('pooling="rank": the model has no classifier, so it is no reranker')
            parts = [self._part(seq_id, token_ids, "all") for seq_id, token_ids in items]
            self._check_different(parts)
            for part in parts:
                if part.n_past:
                    raise ValueError(f"seq_id: expected an empty sequence, {part.seq_id} has {part.n_past} tokens")
            try:
                if pooling is None:
                    self._decode(parts, "rows")
                    return [part.result() for part in parts]
                groups = [[part] for part in parts] if self._evenly else [parts]
                return [row for group in groups for row in self._pooled(group, pooling)]
            finally:
                for part in parts:
                    self._memory.trim(part.seq_id, 0)
                    self._tokens[part.seq_id].clear()

    def _pooled(self, parts: list[Part], pooling: Pooling) -> list[FloatArray]:
        """Compute one micro-batch and return a row for each part."""
        self._check_one_micro_batch(parts)
        ubatch = micro_batch(parts, [Piece(i, 0, len(part.ids)) for i, part in enumerate(parts)])
        placements = self._memory.place(ubatch)
        if placements is None:
            raise self._no_room(parts)
        return [row.copy() for row in self._run_micro_batch(ubatch, placements, pooling)]

    def _decode(self, parts: list[Part], output: Output, copy: bool = True) -> None:
        """Compute a batch, micro-batch by micro-batch."""
        if self._alone:
            self._check_one_micro_batch(parts)
        plan = split(parts, n_batch=self.n_batch, n_ubatch=self.n_ubatch, evenly=self._evenly, neighbours=self._streams)
        if len(plan) > 1 and not self._memory.fits([micro_batch(parts, pieces) for pieces in plan]):
            raise self._no_room(parts)
        for pieces in plan:
            try:
                self._advance(parts, pieces, output, copy or len(plan) > 1)
            except BaseException:
                self._forget_unfinished([part.seq_id for part in parts])
                raise

    def _follow(self, step: _Step, tokens: list[int]) -> FloatArray:
        """Give each sequence of the last computation one more token; returns their rows in place."""
        run = self._runs[True]
        step.left -= 1
        for i, (seq_id, _) in enumerate(step.runs):
            step.positions[i] = len(self._tokens[seq_id])
        try:
            self._write(run, tokens, step.positions, step.out_ids)
            for follow in step.followers:
                follow()
            self._compute(run)
            for (seq_id, _), token in zip(step.runs, tokens, strict=True):
                self._tokens[seq_id].append(token)
        except BaseException:
            self._forget_unfinished([seq_id for seq_id, _ in step.runs])
            raise
        return run.result()

    def _advance(self, parts: list[Part], pieces: list[Piece], output: Output, copy: bool) -> None:
        """Place one micro-batch, compute it, and note its tokens and rows."""
        ubatch = micro_batch(parts, pieces)
        placements = self._memory.place(ubatch)
        if placements is None:
            raise self._no_room(parts)
        rows, start = self._run_micro_batch(ubatch, placements, output), 0
        for i, first, last in pieces:
            part = parts[i]
            if not self._arch.cacheless:
                self._tokens[part.seq_id] += part.ids[first:last].tolist()
            stop = start + len(part.wanted_in(first, last))
            part.add(rows[start:stop], copy=copy)
            start = stop
        if output == "logits" and len(ubatch.tokens) == len(pieces) == start:
            self._remember(ubatch, placements)

    def _remember(self, ubatch: MicroBatch, placements: list[Place]) -> None:
        """Prepare for one more token of each sequence of a micro-batch of one token each."""
        caches, runs, positions = self._runs[True].caches, ubatch.runs, ubatch.positions
        left = min(self.n_ctx_seq, self._n_positions) - 1 - int(positions.max())
        left = min(left, self._memory.room_behind(placements))
        if left > 0:
            followers = [cache.follower(runs, positions) for cache in caches]
            self._step = _Step(runs, positions, ubatch.out_ids, followers, left)

    def _forget_unfinished(self, seq_ids: list[int]) -> None:
        """Give back the cells of tokens that were placed but not computed, whatever stopped that.

        A sequence whose state these tokens may have touched is left empty.
        """
        self._step = None
        self._runs.clear()
        self._memory.settle()
        for seq_id in seq_ids:
            try:
                self._memory.trim(seq_id, len(self._tokens[seq_id]))
            except ContextLengthError:  # there is no way back to its last state
                self._drop(seq_id)

    def _drop(self, seq_id: int) -> None:
        self._memory.trim(seq_id, 0)
        self._tokens[seq_id].clear()

    @contextlib.contextmanager
    def _changing(self, seq_ids: Iterable[int]) -> Iterator[None]:
        """Leave sequences empty where their change is cut short, be it by Ctrl-C; one that is refused changes nothing.

        Else tokens and cells could disagree, and nothing later would tell.
        """
        self._step = None
        try:
            yield
        except ContextLengthError:
            raise
        except BaseException:
            self._memory.settle()
            for seq_id in seq_ids:
                self._drop(seq_id)
            raise

    def _part(self, seq_id: int, token_ids: Sequence[int] | IntArray, wanted: Wanted) -> Part:
        seq_id = self._seq(seq_id)
        expected = "token_ids: expected a non-empty sequence of integers"
        ids = integers(token_ids, expected)
        if not len(ids):
            raise ValueError(f"{expected}, got {token_ids!r:.60}")
        n_vocab = self._config.n_vocab
        if not 0 <= ids.item(ids.argmin()) <= ids.item(ids.argmax()) < n_vocab:
            i = int(np.flatnonzero((ids < 0) | (ids >= n_vocab))[0])
            raise ValueError(f"token_ids[{i}]: expected an id from 0 to {n_vocab - 1}, got {ids[i]}")
        n_past = len(self._tokens[seq_id])
        n_ctx = min(self.n_ctx_seq, self._n_positions)
        if n_past + len(ids) > n_ctx:
            raise ContextLengthError(
                f"sequence {seq_id} has {n_past} tokens; {len(ids)} more do not fit its context of {n_ctx}"
            )
        rows, order = wanted_rows(wanted, len(ids))
        if self._arch.cacheless:  # every row is computed, as in llama.cpp
            rows, order = range(len(ids)), np.asarray(rows) if order is None else np.asarray(rows)[order]
        return Part(seq_id, ids.astype(np.int32), n_past, rows, order)

    def _check_different(self, parts: list[Part]) -> None:
        if len(parts) > 1 and len({part.seq_id for part in parts}) < len(parts):
            raise ValueError(f"each sequence may appear once in a batch, got seq_ids {[part.seq_id for part in parts]}")

    def _check_one_micro_batch(self, parts: list[Part]) -> None:
        n = sum(len(part.ids) for part in parts)
        if n > self.n_ubatch:
            raise ContextLengthError(
                f"{n} tokens have to be computed together and do not fit a micro-batch of {self.n_ubatch} (n_ubatch)"
            )

    def _no_room(self, parts: list[Part]) -> ContextLengthError:
        n = sum(len(part.ids) for part in parts)
        return ContextLengthError(f"no room for {n} more tokens in the cache of {self.n_ctx} cells")

    # ----------------------------------------------------------------------------------------------- one computation

    def _run_micro_batch(self, ubatch: MicroBatch, placements: list[Place], output: Output) -> FloatArray:
        """Run one micro-batch that has its cells; returns its rows in place, valid until the next computation."""
        n_tokens, n_outputs = len(ubatch.tokens), len(ubatch.out_ids)
        key = (output, n_tokens, n_outputs, *((p.n_kv, min(p.streams), len(p.streams)) for p in placements))
        self._step = None
        stepping = n_tokens == len(ubatch.runs)
        if output not in ("logits", "rows"):
            key = (len(ubatch.runs), *key)
        if stepping not in self._runs or self._runs[stepping].key != key:
            self._build(stepping, key, output, ubatch, placements)
        run = self._runs[stepping]
        self._write(run, ubatch.tokens, ubatch.positions, ubatch.out_ids)
        if run.pool is not None:
            run.pool[:] = _pool(self._pooled_by(output), ubatch.runs)
        for cache, placement in zip(run.caches, placements, strict=True):
            cache.set(ubatch, placement)  # type: ignore[arg-type]  # each its own
        self._compute(run)
        return np.empty((0, self._config.n_vocab), np.float32) if run.output is None else run.result()

    def _pooled_by(self, output: Output) -> Output:
        """Return how rows become one for a pooling; a classifier takes them as its model says."""
        if output != "rank":
            return output
        if self._config.classifier_pooling == MEAN:
            return "mean"
        return "last" if self._config.causal_attn else "cls"

    def _write(self, run: _Run, tokens: Sequence[int] | IntArray, positions: IntArray, out_ids: IntArray) -> None:
        """Write the inputs of a graph that do not concern its caches."""
        run.tokens[:] = tokens
        run.positions[:] = _planes(positions, self._n_planes)
        for array, values in run.derived:
            array[:] = values(positions)
        if run.out_ids is not None:
            run.out_ids[:] = out_ids

    def _compute(self, run: _Run) -> None:
        """Compute a graph whose inputs are written."""
        if run.inputs.far:
            run.inputs.send()
        self._backends[-1].set_n_threads(self.n_threads if len(run.tokens) == 1 else self.n_threads_batch)
        self._compute_graph(run.scheduler, run.graph)

    def _compute_graph(self, scheduler: Scheduler, graph: Graph) -> None:
        if self._cancelled or not scheduler.compute(graph):
            if _exiting.is_set():  # this thread goes no further, as it would only report the stop
                with contextlib.suppress(RuntimeError):  # once it is free: it may be held more than once
                    while True:
                        self._lock.release()
                threading.Event().wait()
            raise StoppedError("the computation was stopped")

    def _build(
        self, stepping: bool, key: tuple[object, ...], output: Output, ubatch: MicroBatch, placements: list[Place]
    ) -> None:
        """Assemble the graph for micro-batches of a shape and give its tensors memory."""
        n_tokens, n_outputs = len(ubatch.tokens), len(ubatch.out_ids)
        self._runs.pop(stepping, None)  # and with it the arrays that look into this memory
        if stepping and self._stepper is None:
            self._stepper = Scheduler(self._backends, self._n_nodes)
        scheduler = self._stepper if stepping and self._stepper else self._scheduler
        scheduler.reset()
        g = Context(2 * self._n_nodes)
        graph = g.new_graph(self._n_nodes)
        tokens = g.input(GGMLType.I32, n_tokens, name="inp_tokens")
        positions = g.input(GGMLType.I32, n_tokens * self._n_planes, name="inp_pos")
        out_ids = g.input(GGMLType.I32, n_outputs, name="out_ids") if n_outputs else None
        pool, pooled_by = None, self._pooled_by(output)
        if pooled_by == "mean":
            pool = g.input(GGMLType.F32, n_tokens, len(ubatch.runs), name="mean")
        elif pooled_by in ("last", "cls"):
            pool = g.input(GGMLType.I32, len(ubatch.runs), name="cls")
        caches = self._memory.inputs(g, placements, n_tokens)
        inputs = self._graph_inputs(g, graph, tokens, positions, out_ids, caches, output, pool)
        result = self._arch(self._config, inputs).build()
        unused = (tensor for cache in caches for tensor in cache.tensors)
        for tensor in (positions, *unused, *(tensor for tensor, _ in inputs.derived)):
            graph.expand(tensor)  # so that it has memory even where no node uses it
        if result is not None:
            g.output(result)
        scheduler.alloc(graph)
        in_place = None
        if result is not None and len(self._backends) == 1:
            in_place = result.numpy_view().reshape(-1, result.ne[0])
        arrays = Inputs()
        for cache in caches:
            cache.attach(arrays)
        self._runs[stepping] = _Run(
            key, scheduler, g, graph, arrays, arrays.array(tokens), arrays.array(positions),
            None if out_ids is None else arrays.array(out_ids),
            [(arrays.array(tensor), values) for tensor, values in inputs.derived],
            None if pool is None else arrays.array(pool),
            caches, result, in_place,
        )  # fmt: skip

    def _graph_inputs(
        self,
        g: Context,
        graph: Graph,
        tokens: Tensor,
        positions: Tensor,
        out_ids: Tensor | None,
        caches: Sequence[CacheInputs],
        output: Output = "logits",
        pool: Tensor | None = None,
    ) -> GraphInputs:
        return GraphInputs(
            g=g,
            graph=graph,
            weights=self._weights,
            rope=self._rope,
            flash_attn=self.options.flash_attn,
            use_long_factors=self.n_ctx_seq > self._rope.n_ctx_orig,
            tokens=tokens,
            positions=positions,
            out_ids=out_ids,
            attention=lambda il: caches[self._memory.cache_of_layer[il]],  # type: ignore[arg-type,return-value]
            states=next((cache for cache in caches if isinstance(cache, StateInputs)), None),
            embeddings=output != "logits",
            pool=pool,
            classify=output == "rank",
        )

    # ------------------------------------------------------------------------------------------------------- memory

    def n_past(self, seq_id: int = 0) -> int:
        """Return how many tokens a sequence has."""
        with self._lock:
            self._check_open()
            return len(self._tokens[self._seq(seq_id)])

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return the token ids that a sequence holds, in order."""
        with self._lock:
            self._check_open()
            return self._tokens[self._seq(seq_id)].copy()

    def trim(self, seq_id: int, n: int) -> None:
        """Keep the first n tokens of a sequence.

        Raises ContextLengthError, with nothing changed, where a window's cache has lost what they need, or where layers
        are recurrent, unless n is 0 or all.
        """
        with self._lock:
            self._check_open()
            seq_id, n = self._seq(seq_id), integer("n", n, 0, INT_MAX)
            with self._changing((seq_id,)):
                self._memory.trim(seq_id, n)
                del self._tokens[seq_id][n:]

    def fork(self, src: int, dst: int) -> None:
        """Make sequence dst a copy of sequence src; what dst had is dropped."""
        with self._lock:
            self._check_open()
            src, dst = self._seq(src), self._seq(dst)
            with self._changing((dst,)):
                if src != dst:
                    self._memory.fork(src, dst)
                    self._tokens[dst] = self._tokens[src].copy()

    def clear(self, seq_id: int | None = None) -> None:
        """Forget a sequence, or all of them; the latter is as good as a new session, to the last bit."""
        with self._lock:
            self._check_open()
            seq_ids = range(self.n_seq_max) if seq_id is None else (self._seq(seq_id),)
            with self._changing(seq_ids):
                if seq_id is None:
                    self._memory.clear()
                else:
                    self._memory.trim(seq_ids[0], 0)
                for each in seq_ids:
                    self._tokens[each].clear()

    def check_shift(self) -> None:
        """Check that sequences can be shifted, whatever they come to hold.

        UnsupportedArchitectureError where positions are not to be changed (see `shift`), and ContextLengthError where
        windowed layers lose positions that they would see again (swa_full=False) or quantized heads rotate in part of a
        block.
        """
        with self._lock:
            self._check_open()
            if any(cache.window for cache in self._shiftable()) and not self.options.swa_full:
                raise ContextLengthError("windowed layers lose what a shift would show them again: use swa_full=True")

    def shift(self, seq_id: int, n_keep: int, n_discard: int) -> None:
        """Drop n_discard tokens behind the first n_keep of a sequence, and let those behind them move up.

        Keys are rotated to their new positions; what tokens have seen of the dropped ones stays in them, as in
        llama.cpp (llama_memory_seq_rm, llama_memory_seq_add), whose bits these are. Never done unless asked for.
        Raises, with nothing changed, ContextLengthError where a fork shares cells, a window has lost some, or quantized
        heads rotate in part of a block, and UnsupportedArchitectureError where positions are not to be changed:
        recurrent layers, several positions for a token, learned ones. A failure in the middle (BackendError, `cancel`)
        leaves the sequence empty.
        """
        with self._lock:
            self._begin()
            seq_id = self._seq(seq_id)
            tokens = self._tokens[seq_id]
            n_keep = integer("n_keep", n_keep, 0, len(tokens))
            n_discard = integer("n_discard", n_discard, 0, len(tokens) - n_keep)
            if not n_discard:
                return
            caches = self._shiftable()
            if n_keep + n_discard == len(tokens):
                self.trim(seq_id, n_keep)
                return
            for cache in caches:
                cache.check_shift(seq_id, n_keep, n_discard)
            turn = self._build_shift(caches, seq_id)
            with self._changing((seq_id,)):
                added = [cache.shift(seq_id, n_keep, n_discard) for cache in caches]
                if turn is not None:
                    turn(added)
                del tokens[n_keep : n_keep + n_discard]

    def _shiftable(self) -> list[KVCache]:
        """Return the caches, sure that their keys can be given other positions; raises as `shift` does for all others.

        What sequences hold is not looked at.
        """
        caches, decoder = [c for c in self._memory.caches if isinstance(c, KVCache)], self._arch(self._config)
        if len(caches) < len(self._memory.caches):
            why = "nothing stays of a call" if self._arch.cacheless else "recurrent layers do not know positions"
        elif self._n_planes > 1:
            why = "a token has several positions"
        elif "position_embd.weight" in self._weights:
            why = "positions are a part of what it stores"
        else:
            for cache in caches:
                for il in filter(decoder.rotates, cache.k):
                    cache.check_rotation(il, decoder.n_rot(il))
            return caches
        raise UnsupportedArchitectureError(f"{self._config.architecture}: sequences cannot be shifted: {why}")

    def _build_shift(self, caches: list[KVCache], seq_id: int) -> Callable[[list[npt.NDArray[np.int32]]], None] | None:
        """Build what rotates the keys of a sequence's stream, by cells' differences (llama.cpp's build_graph_shift).

        None where no layer rotates them.
        """
        g = Context(2 * self._n_nodes)
        graph = g.new_graph(self._n_nodes)
        by, rotations = [], []
        for cache in caches:
            stream, _ = cache.stream_row(seq_id)
            n = cache.cells[stream].end
            by.append(g.input(GGMLType.I32, n, name="k_shift"))
            rot = None if cache.k_rot is None else g.input(GGMLType.F32, *cache.k_rot.shape, name="k_rot")
            rotations += [] if rot is None else [(rot, cache.k_rot)]
            decoder = self._arch(self._config, self._graph_inputs(g, graph, by[-1], by[-1], None, ()))
            for il in filter(decoder.rotates, cache.k):
                graph.expand(decoder.turned(cache.rotating_keys(g, il, decoder.n_rot(il), stream, n), rot, il))
        if not len(graph):
            return None
        for tensor in (*by, *(rot for rot, _ in rotations)):
            graph.expand(tensor)
        scheduler = Scheduler(self._backends, self._n_nodes)
        scheduler.alloc(graph)

        def turn(added: list[npt.NDArray[np.int32]]) -> None:
            inputs = Inputs()
            for tensor, values in zip(by, added, strict=True):
                array = inputs.array(tensor)
                array[: len(values)], array[len(values) :] = values, 0  # cells behind are no longer used
            for rot, matrix in rotations:
                inputs.array(rot)[:] = matrix
            inputs.send()
            self._backends[-1].set_n_threads(self.n_threads_batch)
            self._compute_graph(scheduler, graph)

        return turn

    # --------------------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str], seq_id: int | None = None) -> None:
        """Write what all sequences hold, or one, to a file, from which `load` goes on as if nothing had happened.

        The file has the cells in use only, and the model's fingerprint in place of the model. It takes the path's place
        once it is whole and on the disk; only its owner may read it. OSError where it cannot be written.
        """
        from ggufpy import snapshots

        with self._lock:
            self._check_open()
            snapshots.save(path, self._subject(), None if seq_id is None else self._seq(seq_id))

    def load(self, path: str | os.PathLike[str], seq_id: int | None = None) -> None:
        """Let the session, or one of its sequences, hold what `save` wrote, in the place of what it held.

        A whole session comes back in one of the same options, to the last bit; `n_ctx` may be another, if it fits. One
        sequence may become any, of any session with the same types of caches, to the last bit if each has a stream.
        SnapshotError for a file that is damaged or another model's, ContextLengthError where it does not fit, OSError
        where it cannot be read; nothing has changed then.
        """
        from ggufpy import snapshots

        with self._lock:
            self._check_open()
            self._step = None
            snapshots.load(path, self._subject(), None if seq_id is None else self._seq(seq_id))

    def _subject(self) -> Subject:
        from ggufpy.snapshots import Subject

        if isinstance(self._memory, NoMemory):
            raise UnsupportedArchitectureError(
                f"{self._config.architecture}: nothing stays of a call, so there is nothing to save or load"
            )
        options, caches = self.options, [cache for cache in self._memory.caches if isinstance(cache, KVCache)]
        windowed = any(cache.window for cache in caches)
        return Subject(
            self._memory,
            self._tokens,
            {"architecture": self._config.architecture, "fingerprint": self._fingerprint()},
            {
                "byteorder": sys.byteorder,
                "type_k": options.type_k,
                "type_v": options.type_v,
                "flash_attn": options.flash_attn,
                "swa_full": options.swa_full if windowed else None,
                "n_seq_max": options.n_seq_max,
                "n_stream": caches[0].n_stream if caches else None,
            },
            min(self.n_ctx_seq, self._n_positions),
            self._config.n_vocab,
        )

    # ----------------------------------------------------------------------------------------------------- lifetime

    def cancel(self) -> None:
        """Stop what another thread computes with this session, in the middle of a graph (CPU) or of a prompt.

        The call there raises StoppedError; what it had computed stays (`n_past` says how much), and the session can be
        used as before. Where nothing computes nothing happens: a call that begins later, or waits, is not stopped.
        """
        self._scheduler.cancel()
        self._cancelled = True  # last: whoever begins and sees it takes back both

    def _begin(self) -> None:
        """Begin a computation: check that it can be, and forget a `cancel` that was meant for an earlier one."""
        self._check_open()
        if self._cancelled:
            self._cancelled = False
            self._scheduler.resume()
            if _exiting.is_set():
                self._scheduler.cancel()

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Held, several calls are one to other threads: `with session.lock: ...`; they wait. It may be nested."""
        return self._lock

    @property
    def n_seq_max(self) -> int:
        """The number of sequences."""
        return self.options.n_seq_max

    @property
    def n_vocab(self) -> int:
        """The number of logits in a row."""
        return self._config.n_vocab

    @property
    def memory_nbytes(self) -> int:
        """The size of the KV cache and of states in bytes, touched or not."""
        return sum(cache.nbytes for cache in self._memory.caches)

    def close(self) -> None:
        """Free the memory and the graphs. A second call does nothing; any other use raises ClosedError."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._step = None
                self._runs.clear()
                for scheduler in filter(None, (self._scheduler, self._stepper)):
                    scheduler.close()
                for backend in self._backends:
                    backend.close()
                self._memory.close()

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.options.n_seq_max} x {self.n_ctx_seq} tokens"
        return f"<Session {self._config.architecture}: {state}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the session is closed")

    def _seq(self, seq_id: int) -> int:
        """Return a sequence's number as a plain int; ValueError where there is no such sequence."""
        if type(seq_id) is int and 0 <= seq_id < self.options.n_seq_max:
            return seq_id
        return integer("seq_id", seq_id, 0, self.options.n_seq_max - 1)


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_exiting = threading.Event()


@atexit.register
def _stop_at_exit() -> None:
    """Stop for good what daemon threads still compute: libraries are about to be torn down under them."""
    _exiting.set()
    for session in list(_open_sessions):
        if not session._lock.acquire(blocking=False):
            session._scheduler.cancel()
            session._lock.acquire(timeout=SECONDS_TO_STOP)


def _pool(pooling: Output, runs: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
    """Return what makes one embedding of each run of tokens: the weights of all tokens, or the number of one."""
    counts = np.array([n for _, n in runs])
    stops = counts.cumsum()
    if pooling == "mean":
        weights = np.zeros((len(runs), stops[-1]), np.float32)
        for row, n, stop in zip(weights, counts, stops, strict=True):
            row[stop - n : stop] = np.float32(1) / np.float32(n)
        return weights
    return (stops - 1 if pooling == "last" else stops - counts).astype(np.int32)


def _planes(positions: IntArray, n: int) -> IntArray:
    """Return text's positions as the graph takes them: one for each token, or four planes of which the last is 0."""
    return positions if n == 1 else np.concatenate([positions] * 3 + [np.zeros_like(positions)])


def pad(n: int) -> int:
    """Round a number of cells up to what a sequence gets."""
    return -(-n // N_CTX_PAD) * N_CTX_PAD
