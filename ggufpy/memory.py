"""The KV cache: where each token's keys and values lie, and the graph inputs that say so. Or none, for encoders.

This file owns the tensors of keys and values, streams, sequences, and what layers with a window keep; which cell a
token gets is cells.py's, what recurrent layers keep is states.py's. It does not know models, tokens' meaning or who
runs the graph. Shapes in comments are in ggml order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggufpy.arch import Config
from ggufpy.backend import Buffer, Device
from ggufpy.batch import IntArray, MicroBatch
from ggufpy.cells import Cells, Window
from ggufpy.errors import ContextLengthError
from ggufpy.gguf import GGMLType
from ggufpy.graph import NO_LIMIT, Context, Graph, Inputs, Tensor, mask_writer
from ggufpy.states import Rows, StateCache, StateInputs

__all__ = ["CacheInputs", "CacheOptions", "KVCache", "KVInputs", "Memory", "NoMemory", "Place", "Placement"]

N_KV_PAD = 256
"""The visible part of a cache grows in steps of this many cells, so that graphs can be reused."""
N_ROT_V = 64


@dataclass(slots=True)
class Placement:
    """Where one cache puts the tokens of a micro-batch."""

    streams: list[int]
    cells: list[npt.NDArray[np.int64]]  # a stream's cells, in the order of its tokens
    n_kv: int = 0  # cells the graph has to look at


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a session chooses about its caches."""

    n_seq_max: int
    unified: bool
    type_k: GGMLType
    type_v: GGMLType
    flash_attn: bool
    alibi: bool = False  # the mask carries distances, which the kernel multiplies by each head's slope
    causal: bool = True  # tokens do not see those behind them
    folder: str | None = None  # where keys and values are a file


class KVCache:
    """The keys and values of some layers, for all sequences of a session (llama.cpp's llama_kv_cache)."""

    def __init__(
        self,
        config: Config,
        layers: Sequence[int],
        options: CacheOptions,
        *,
        size: int,
        window: Window | None,
        device_of: Callable[[int], Device],
    ) -> None:
        self.config, self.options, self.size, self.window = config, options, size, window
        self.transposed_v = not options.flash_attn
        self.n_stream = 1 if options.unified else options.n_seq_max
        rows = options.n_seq_max if options.unified else 1
        self.cells = [Cells(size, rows) for _ in range(self.n_stream)]
        d_k, d_v = config.head_widths(layers[0])  # of all here
        self.k_only = config.is_mla
        rotated = [
            t.is_quantized and not self.k_only and d % 64 == first % 64 == 0
            for t, d, first in zip((options.type_k, options.type_v), (d_k, d_v), config.head_widths(0), strict=True)
        ]
        self.k_rot = _hadamard(_largest_rotation(d_k)) if rotated[0] else None
        self.v_rot = _hadamard(N_ROT_V) if rotated[1] else None
        self.v_width = max(config.head_widths(il)[1] * n for il, n in enumerate(config.n_head_kv))
        self._context = Context(2 * len(layers))
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        for il in layers:
            shape_k = (d_k * config.n_head_kv[il], size, self.n_stream)
            self.k[il] = self._context.new_tensor(options.type_k, *shape_k, name=f"cache_k_l{il}")
            if not self.k_only:
                width = self.v_width if self.transposed_v else d_v * config.n_head_kv[il]
                self.v[il] = self._context.new_tensor(options.type_v, width, size, self.n_stream, name=f"cache_v_l{il}")
        by_device: dict[Device, list[Tensor]] = {}
        for il in layers:
            by_device.setdefault(device_of(il), []).extend(kept[il] for kept in (self.k, self.v) if il in kept)
        self._buffers = [Buffer.zeros(device, tensors, options.folder) for device, tensors in by_device.items()]

    @property
    def nbytes(self) -> int:
        """Return the size of all keys and values in bytes."""
        return sum(buffer.size for buffer in self._buffers)

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._buffers:
            buffer.close()

    def stream_row(self, seq_id: int) -> tuple[int, int]:
        """Return the stream that holds a sequence, and the sequence's row in it."""
        return (0, seq_id) if self.n_stream == 1 else (seq_id, 0)

    def find(self, ubatch: MicroBatch) -> Placement | None:
        """Find cells for the tokens of a micro-batch; None where there is no room."""
        streams = [0] if self.n_stream == 1 else [seq_id for seq_id, _ in ubatch.runs]
        per_stream = len(ubatch.tokens) // len(streams)
        found = [self.cells[stream].find(per_stream, self.window) for stream in streams]
        cells = [c for c in found if c is not None]
        return Placement(streams, cells) if len(cells) == len(found) else None

    def take(self, ubatch: MicroBatch, placement: Placement) -> None:
        """Put the tokens into the cells found for them, and see how far the graph has to look."""
        start = end = 0
        for stream, found in zip(placement.streams, placement.cells, strict=True):
            cells, n = self.cells[stream], len(found)
            runs = ubatch.runs if self.n_stream == 1 else [(0, n)]
            cells.place(found, ubatch.positions[start : start + n], runs)
            end, start = max(end, cells.end), start + n
        placement.n_kv = min(self.size, max(N_KV_PAD, -(-end // N_KV_PAD) * N_KV_PAD))

    def room_behind(self, placement: Placement) -> int:
        """Return how often a placement can be repeated in the cells behind it without a graph that looks further."""
        if self.transposed_v:
            return 0
        used = zip(placement.streams, placement.cells, strict=True)
        return min(self.cells[stream].room_behind(len(cells), placement.n_kv) for stream, cells in used)

    def snapshot(self) -> list[Cells]:
        """Return who has which cell, to `restore` it."""
        return [cells.copy() for cells in self.cells]

    def restore(self, before: list[Cells]) -> None:
        """Go back to what `snapshot` returned, if nothing was computed since."""
        self.cells = before

    def inputs(self, g: Context, placement: Placement, n_tokens: int) -> KVInputs:
        """Make the inputs of a graph for micro-batches of a shape."""
        return KVInputs(g, self, placement, n_tokens, "_swa" if self.window else "")

    def check_trim(self, seq_id: int, n: int) -> None:
        """Raise ContextLengthError where the first n positions' continuation would look at cells that are lost."""
        stream, row = self.stream_row(seq_id)
        cells = self.cells[stream]
        needed = max(0, self.window.first(n)) if self.window else 0
        if 0 < n <= cells.max_pos(row) and cells.min_pos(row) > needed:
            raise ContextLengthError(
                f"cannot trim sequence {seq_id} to {n} tokens: its windowed layers need the positions from "
                f"{needed} on but keep only those from {cells.min_pos(row)} on; use swa_full=True"
            )

    def trim(self, seq_id: int, n: int) -> None:
        """Keep a sequence's first n positions."""
        stream, row = self.stream_row(seq_id)
        self.cells[stream].remove(row, n, 2**31 - 1)

    def check_shift(self, seq_id: int, n_keep: int, n_discard: int) -> None:
        """Raise ContextLengthError where a sequence cannot lose the positions n_keep to n_keep + n_discard - 1."""
        stream, row = self.stream_row(seq_id)
        cells = self.cells[stream]
        has, pos = cells.has[:, : cells.end], cells.pos[: cells.end]
        if (has[row] & (has.sum(axis=0) > 1)).any():
            raise ContextLengthError(f"cannot shift sequence {seq_id}: a fork shares its cells (see kv_unified)")
        kept = pos[has[row] & ((pos < n_keep) | (pos >= n_keep + n_discard))]
        after = np.where(kept < n_keep, kept, kept - n_discard)
        n = cells.max_pos(row) + 1 - n_discard
        needed = max(0, self.window.first(n)) if self.window else 0
        if (after >= needed).sum() < n - needed:
            raise ContextLengthError(
                f"cannot shift sequence {seq_id}: its windowed layers have lost positions before {n_keep} that they "
                "would see again; use swa_full=True"
            )

    def shift(self, seq_id: int, n_keep: int, n_discard: int) -> IntArray:
        """Take positions from a sequence and close the gap; returns what each cell's position gained.

        The keys are still those of the old positions.
        """
        stream, row = self.stream_row(seq_id)
        self.cells[stream].remove(row, n_keep, n_keep + n_discard)
        return self.cells[stream].move(row, n_keep + n_discard, -n_discard)

    def check_rotation(self, il: int, n_rot: int) -> None:
        """Raise ContextLengthError where what rotates of a head cannot be unpacked without the rest of it."""
        k, d = self.k[il], self.config.head_widths(il)[0]
        block, turned = k.type.block_size, 1 if self.k_rot is None else len(self.k_rot)
        if n_rot % block or self._first_rotating(il, n_rot) % block or n_rot % turned:
            raise ContextLengthError(
                f"cannot shift: {n_rot} rotating values of a head of {d} are no whole blocks of {k.type.label}"
            )

    def rotating_keys(self, g: Context, il: int, n_rot: int, stream: int, n: int) -> Tensor:
        """View what rotates of the first n cells of a stream: [n_rot, n_head_kv, n]."""
        k, config = self.k[il], self.config
        d, first, row = config.head_widths(il)[0], self._first_rotating(il, n_rot), k.type.row_nbytes
        stride = row(k.ne[0])
        return g.view_3d(k, n_rot, config.n_head_kv[il], n, row(d), stride, stream * self.size * stride + row(first))

    def _first_rotating(self, il: int, n_rot: int) -> int:
        """Return where in a head the values begin that rotate: at its start, or with latent keys at its end."""
        return self.config.head_widths(il)[0] - n_rot if self.config.n_lora_kv else 0

    def settle(self) -> None:
        """Make the cells agree with each other again, after a change that something cut short."""
        for cells in self.cells:
            cells.settle()

    def clear(self) -> None:
        """Forget all sequences."""
        for cells in self.cells:
            cells.clear()

    def fork(self, src: int, dst: int) -> None:
        """Let two sequences share cells in a unified cache; otherwise copy the data."""
        (s0, r0), (s1, r1) = self.stream_row(src), self.stream_row(dst)
        if s0 != s1:
            self.copy_stream(s0, s1)
        else:
            self.cells[s1].remove(r1, 0, 2**31 - 1)
            self.cells[s1].has[r1] = self.cells[s0].has[r0]

    def copy_stream(self, src: int, dst: int) -> None:
        """Copy one stream's cells and data to another."""
        self.cells[dst] = self.cells[src].copy()
        used = slice(self.cells[src].end)  # the pages behind may never have been touched
        for tensors, transposed in ((self.k, False), (self.v, self.transposed_v)):
            for tensor in tensors.values():
                in_place = tensor.buffer is not None and tensor.buffer.is_host
                data = tensor.numpy_view(writable=True) if in_place else tensor.get()
                if transposed:
                    by_cell = data.reshape(self.n_stream, -1, self.size)
                    by_cell[dst, :, used] = by_cell[src, :, used]
                else:
                    data[dst, used] = data[src, used]
                if not in_place:
                    tensor.set(data)


class KVInputs:
    """The inputs of one graph that concern one cache, and the views of the cache that the graph reads."""

    __slots__ = ("_arrays", "_rotations", "_shape", "cache", "g", "k_idxs", "k_rot", "mask", "n_kv", "v_idxs", "v_rot")

    def __init__(self, g: Context, cache: KVCache, placement: Placement, n_tokens: int, name: str) -> None:
        self.g, self.cache, self.n_kv = g, cache, placement.n_kv
        self._shape = (min(placement.streams), len(placement.streams))
        n_stream = len(placement.streams)
        self.k_idxs = g.input(GGMLType.I64, n_tokens, name=f"attn_inp_k_idxs{name}")
        n_v = n_tokens * cache.v_width if cache.transposed_v else n_tokens
        self.v_idxs = None if cache.k_only else g.input(GGMLType.I64, n_v, name=f"attn_inp_v_idxs{name}")
        mask_type = GGMLType.F16 if cache.options.flash_attn else GGMLType.F32
        self.mask = g.input(mask_type, self.n_kv, n_tokens // n_stream, 1, n_stream, name=f"attn_inp_kq_mask{name}")
        self.k_rot = self._rotation(cache.k_rot, f"attn_inp_k_rot{name}")
        self.v_rot = self._rotation(cache.v_rot, f"attn_inp_v_rot{name}")

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The inputs that need memory even where no node uses them."""
        return (self.mask,)

    def _rotation(self, matrix: npt.NDArray[np.float32] | None, name: str) -> Tensor | None:
        return None if matrix is None else self.g.input(GGMLType.F32, *matrix.shape, name=name)

    def store(self, graph: Graph, k: Tensor, v: Tensor, il: int) -> None:
        """Add the nodes that write this micro-batch's keys and values ([n_embd_head, n_head_kv, n_tokens])."""
        g, cache = self.g, self.cache
        graph.expand(g.set_rows(self._rows(cache.k[il]), self._flat(k), self.k_idxs))
        if self.v_idxs is None:
            return
        if not cache.transposed_v:
            graph.expand(g.set_rows(self._rows(cache.v[il]), self._flat(v), self.v_idxs))
            return
        width, n_tokens = v.ne[0] * v.ne[1], v.ne[2]
        v = g.reshape_2d(v, width, n_tokens) if v.is_contiguous else g.cont_2d(v, width, n_tokens)
        if width < cache.v_width:
            v = g.pad(v, cache.v_width - width, 0, 0, 0)
        target = cache.v[il]
        graph.expand(
            g.set_rows(g.reshape_2d(target, 1, target.n_elements), g.reshape_2d(v, 1, v.n_elements), self.v_idxs)
        )

    def _flat(self, x: Tensor) -> Tensor:
        return self.g.view_2d(x, x.ne[0] * x.ne[1], x.ne[2], x.nb[2], 0)

    def _rows(self, cached: Tensor) -> Tensor:
        return self.g.reshape_2d(cached, cached.ne[0], cached.ne[1] * cached.ne[2]) if cached.ne[2] > 1 else cached

    def keys(self, il: int) -> Tensor:
        """View the cells to look at: [n_embd_head_k, n_head_kv, n_kv, n_stream]."""
        config = self.cache.config
        return self._view(self.cache.k[config.kv_layer(il)], config.head_widths(il)[0], il)

    def values(self, il: int) -> Tensor:
        """View the values; [n_kv, n_head_kv, n_embd_head_v, n_stream] permuted to the same where V is transposed."""
        d = self.cache.config.head_widths(il)[1]
        if self.cache.k_only:  # they are the first part of the keys
            k = self.keys(il)
            v = self.g.view_4d(k, d, *k.ne[1:], *k.nb[1:], 0)
            return _transposed(self.g, v) if self.cache.transposed_v else v
        v = self.cache.v[self.cache.config.kv_layer(il)]
        if not self.cache.transposed_v:
            return self._view(v, d, il)
        (s0, n_stream), size, row = self._shape, self.cache.size, v.type.row_nbytes
        return self.g.view_4d(
            v, self.n_kv, self.cache.config.n_head_kv[il], d, n_stream,
            row(size * d), row(size), row(size * v.ne[0]), row(size * v.ne[0]) * s0,
        )  # fmt: skip

    def _view(self, cached: Tensor, d: int, il: int) -> Tensor:
        (s0, n_stream), row = self._shape, cached.type.row_nbytes
        per_stream = row(cached.ne[0] * self.cache.size)
        return self.g.view_4d(
            cached, d, self.cache.config.n_head_kv[il], self.n_kv, n_stream,
            row(d), row(cached.ne[0]), per_stream, per_stream * s0,
        )  # fmt: skip

    def attach(self, inputs: Inputs) -> None:
        """Find the arrays to write the inputs through, once they have memory."""
        k_idxs, mask = inputs.array(self.k_idxs), inputs.array(self.mask).reshape(-1, self.n_kv)
        self._arrays = k_idxs, None if self.v_idxs is None else inputs.array(self.v_idxs), mask
        matrices = (self.k_rot, self.cache.k_rot), (self.v_rot, self.cache.v_rot)
        self._rotations = [(inputs.array(x), matrix) for x, matrix in matrices if x is not None]

    def set(self, ubatch: MicroBatch, placement: Placement) -> None:
        """Write the inputs for a micro-batch of the shape this graph was built for."""
        cache, (k_idxs, v_idxs, _) = self.cache, self._arrays
        start = 0
        for stream, cells in zip(placement.streams, placement.cells, strict=True):
            k_idxs[start : start + len(cells)] = cells + stream * cache.size if stream else cells
            start += len(cells)
        if v_idxs is None:
            pass
        elif cache.transposed_v:
            steps = np.arange(cache.v_width) * cache.size
            first = [cells + stream * cache.size * cache.v_width
                     for stream, cells in zip(placement.streams, placement.cells, strict=True)]  # fmt: skip
            v_idxs[:] = (np.concatenate(first)[:, None] + steps).reshape(-1)
        else:
            v_idxs[:] = k_idxs
        for write_mask in self._masks(ubatch.runs, ubatch.positions):
            write_mask()
        for array, matrix in self._rotations:
            array[:] = matrix

    def follower(self, runs: Sequence[tuple[int, int]], positions: IntArray) -> Callable[[], None]:
        """Return a function that places and writes one more token of each sequence, behind the last, at `positions`.

        It may be called as often as `room_behind` says, with other values in the same array.
        """
        (k_idxs, v_idxs, _), rotations, masks = self._arrays, self._rotations, self._masks(runs, positions)
        owners = []
        for i, (seq_id, _) in enumerate(runs):
            stream, row = self.cache.stream_row(seq_id)
            owners.append((i, self.cache.cells[stream], row, stream * self.cache.size))

        def follow() -> None:
            for i, cells, row, base in owners:
                k_idxs[i] = base + cells.append(row, positions[i])
            if v_idxs is not None:
                v_idxs[:] = k_idxs
            for write_mask in masks:
                write_mask()
            for array, matrix in rotations:
                array[:] = matrix

        return follow

    def _masks(self, runs: Sequence[tuple[int, int]], positions: IntArray) -> list[Callable[[], None]]:
        """Return what writes each sequence's part of the mask."""
        cache, mask, start, writers = self.cache, self._arrays[2], 0, []
        window, options = cache.window, cache.options
        before, chunk = (NO_LIMIT, 0) if window is None else (window.n - 1, window.n if window.chunked else 0)
        after = 0 if options.causal else NO_LIMIT
        for seq_id, n in runs:
            stream, row = cache.stream_row(seq_id)
            cells, part = cache.cells[stream], slice(start, start + n)
            limits = before, after, chunk, options.alibi
            writers.append(mask_writer(mask[part], cells.pos, cells.has[row], positions[part], *limits))
            start += n
        return writers


class Memory:
    """All that a session keeps: a cache for the layers that see everything, one for those with a window, states."""

    def __init__(
        self,
        config: Config,
        options: CacheOptions,
        *,
        size: int,
        n_ubatch: int,
        swa_full: bool,
        states: Mapping[int, Mapping[str, int]],
        device_of: Callable[[int], Device],
    ) -> None:
        full = [il for il, n in enumerate(config.n_head_kv) if n and not config.is_swa[il]]
        windowed = [il for il, n in enumerate(config.n_head_kv) if n and config.is_swa[il]]
        self.caches: list[KVCache | StateCache] = []
        self.cache_of_layer: dict[int, int] = {}
        size_swa = config.n_swa * (options.n_seq_max if options.unified else 1) + n_ubatch
        size_swa = size if swa_full else -(-min(size, size_swa) // N_KV_PAD) * N_KV_PAD
        window = Window(config.n_swa, config.swa_chunked) if windowed else None
        for layers, n, seen in ((full, size, None), (windowed, size_swa, window)):
            if layers:
                self.cache_of_layer |= dict.fromkeys(layers, len(self.caches))
                own = [il for il in layers if config.kv_layer(il) == il]
                self.caches.append(KVCache(config, own, options, size=n, window=seen, device_of=device_of))
        if states:
            n_stream = 1 if options.unified else options.n_seq_max
            self.caches.append(StateCache(states, n_seq_max=options.n_seq_max, n_stream=n_stream, device_of=device_of))

    def close(self) -> None:
        """Free all caches."""
        for cache in self.caches:
            cache.close()

    def place(self, ubatch: MicroBatch) -> list[Place] | None:
        """Place a micro-batch in every cache, or in none (None) where one of them has no room."""
        found = [cache.find(ubatch) for cache in self.caches]
        placements = [placement for placement in found if placement is not None]
        if len(placements) < len(found):
            return None
        for cache, placement in zip(self.caches, placements, strict=True):
            cache.take(ubatch, placement)  # type: ignore[arg-type]  # each found its own
        return placements

    def inputs(self, g: Context, placements: Sequence[Place], n_tokens: int) -> list[CacheInputs]:
        """Make the inputs of a graph for micro-batches of a shape."""
        pairs = zip(self.caches, placements, strict=True)
        return [cache.inputs(g, placement, n_tokens) for cache, placement in pairs]  # type: ignore[arg-type]

    def room_behind(self, placements: Sequence[Place]) -> int:
        """Return how often a micro-batch's placements can be repeated behind it with the graph they have."""
        pairs = zip(self.caches, placements, strict=True)
        return min(cache.room_behind(placement) for cache, placement in pairs)  # type: ignore[arg-type]  # each its own

    def fits(self, ubatches: Sequence[MicroBatch]) -> bool:
        """Try whether micro-batches can be placed one after another; changes nothing."""
        before = [cache.snapshot() for cache in self.caches]
        try:
            return all(self.place(ubatch) is not None for ubatch in ubatches)
        finally:
            for cache, then in zip(self.caches, before, strict=True):
                cache.restore(then)  # type: ignore[arg-type]

    def trim(self, seq_id: int, n: int) -> None:
        """Keep a sequence's first n positions. ContextLengthError, with nothing changed, where one cache cannot."""
        for cache in self.caches:
            cache.check_trim(seq_id, n)
        for cache in self.caches:
            cache.trim(seq_id, n)

    def settle(self) -> None:
        """Make what caches know agree again, after a change that something cut short; sequences are trimmed then."""
        for cache in self.caches:
            if isinstance(cache, KVCache):
                cache.settle()

    def clear(self) -> None:
        """Forget all sequences."""
        for cache in self.caches:
            cache.clear()

    def fork(self, src: int, dst: int) -> None:
        """Make sequence dst a copy of src."""
        for cache in self.caches:
            cache.fork(src, dst)


@dataclass(frozen=True, slots=True)
class NoCache:
    """Stands in a cache's place where nothing is kept: tokens see those of their own call (llama.cpp's no_cache)."""

    options: CacheOptions
    n_swa: int
    n_stream: int = 1
    nbytes: int = 0


class CallInputs:
    """The mask of one graph whose tokens see each other only, and each layer's keys and values on their way."""

    __slots__ = ("_array", "cache", "g", "k", "k_rot", "mask", "v", "v_rot")

    def __init__(self, g: Context, cache: NoCache, n_tokens: int) -> None:
        self.g, self.cache = g, cache
        mask_type = GGMLType.F16 if cache.options.flash_attn else GGMLType.F32
        name = f"self_kq_mask{'_swa' if cache.n_swa else ''}"
        self.mask = g.input(mask_type, n_tokens, n_tokens, 1, 1, name=name)
        self.k_rot: Tensor | None = None
        self.v_rot: Tensor | None = None
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The inputs that need memory even where no node uses them."""
        return (self.mask,)

    def store(self, graph: Graph, k: Tensor, v: Tensor, il: int) -> None:
        """Remember this micro-batch's keys and values ([n_embd_head, n_head_kv, n_tokens])."""
        self.k[il], self.v[il] = k, v

    def keys(self, il: int) -> Tensor:
        """Return the keys as they are."""
        return self.k[il]

    def values(self, il: int) -> Tensor:
        """Return the values; without flash attention transposed, in the place of [n_tokens, n_head_kv, n_embd_head]."""
        return self.v[il] if self.cache.options.flash_attn else _transposed(self.g, self.v[il])

    def attach(self, inputs: Inputs) -> None:
        """Find the array to write the mask through, once it has memory."""
        self._array = inputs.array(self.mask).reshape(self.mask.ne[1], -1)

    def follower(self, runs: Sequence[tuple[int, int]], positions: IntArray) -> Callable[[], None]:
        """Refuse: there is never room behind."""
        raise NotImplementedError

    def set(self, ubatch: MicroBatch, placement: Placement) -> None:
        """Write the mask: tokens see those of their sequence, within half a window to both sides where there is one."""
        options, n_swa, positions = self.cache.options, self.cache.n_swa, ubatch.positions
        before = n_swa // 2 if n_swa else NO_LIMIT
        after = 0 if options.causal else before
        start = 0
        for _, n in ubatch.runs:
            part, mine = slice(start, start + n), np.zeros(len(positions), np.bool_)
            mine[part] = True
            limits = before, after, 0, options.alibi
            mask_writer(self._array[part], positions, mine, positions[part], *limits)()
            start += n


CacheInputs = KVInputs | CallInputs | StateInputs
Place = Placement | Rows


class NoMemory:
    """What a session has in `Memory`'s place for models that keep nothing from call to call."""

    def __init__(self, config: Config, options: CacheOptions) -> None:
        windows = sorted({config.n_swa if windowed else 0 for windowed in config.is_swa})
        self.caches = [NoCache(options, n_swa) for n_swa in windows]
        self.cache_of_layer = {il: len(self.caches) - 1 if w else 0 for il, w in enumerate(config.is_swa)}

    def place(self, ubatch: MicroBatch) -> list[Place]:
        """Let a micro-batch look at itself."""
        n_tokens = len(ubatch.tokens)
        return [Placement([0], [np.arange(n_tokens)], n_tokens) for _ in self.caches]

    def inputs(self, g: Context, placements: Sequence[Place], n_tokens: int) -> list[CallInputs]:
        """Make the inputs of a graph for micro-batches of a shape."""
        return [CallInputs(g, cache, n_tokens) for cache in self.caches]

    def room_behind(self, placements: Sequence[Place]) -> int:
        """Have none, as nothing stays."""
        return 0

    def fits(self, ubatches: Sequence[MicroBatch]) -> bool:
        """Find room for anything."""
        return True

    def trim(self, seq_id: int, n: int) -> None:
        """Do nothing; neither do the others."""

    def fork(self, src: int, dst: int) -> None: ...
    def settle(self) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


def _transposed(g: Context, v: Tensor) -> Tensor:
    """Copy values [n_embd_head, n_head_kv, n, n_stream] to [n, n_head_kv, n_embd_head, n_stream]."""
    return g.permute(g.cont(g.transpose(g.permute(v, 0, 2, 1, 3))), 0, 2, 1, 3)


def _largest_rotation(n_embd_head: int) -> int:
    """Return the largest 64·2^k that divides the head's width."""
    n = 64
    while n_embd_head % (2 * n) == 0:
        n *= 2
    return n


def _hadamard(n: int) -> npt.NDArray[np.float32]:
    """Build the orthonormal Walsh-Hadamard matrix of order n (a power of two)."""
    h = np.array([[1.0 / float(np.sqrt(np.float32(n)))]], np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return np.ascontiguousarray(h)
