"""Devices, buffers and the scheduler: the only file that knows where data lies and who computes.

It owns ggml's devices, backends, buffer types, buffers and schedulers, each behind a small class that frees what it
made. It does not know what the tensors mean. What can be wrong with a request is checked here, because ggml would
abort the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ggufpy._ffi.lib import C, check_status, features_of, ffi, text_of
from ggufpy.errors import BackendError, ClosedError, GraphError

if TYPE_CHECKING:
    from ggufpy.graph import Graph, Tensor

__all__ = [
    "Backend",
    "Buffer",
    "BufferType",
    "Device",
    "Lifetime",
    "Owner",
    "Scheduler",
    "cpu_device",
    "devices",
    "extra_buffer_types",
    "physical_cores",
    "weight_buffer_type",
]

MAX_THREADS = 512  # GGML_MAX_N_THREADS
SUCCESS = int(C.GGML_STATUS_SUCCESS)
MAX_BACKENDS = 16  # GGML_SCHED_MAX_BACKENDS
MAX_NODES = 2**17  # ggml reserves 23 kB of address space for each
MAX_NBYTES = 2**46
_KINDS = {
    C.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    C.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    C.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    C.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
    C.GGML_BACKEND_DEVICE_TYPE_META: "meta",
}


class Lifetime:
    """C memory and what it refers to, for as long as anybody holds this.

    Owners (`Context`, `Buffer`, `Scheduler`) are closed when their user says so; the memory behind them stays until
    the last tensor, graph or array that points into it is gone.
    """

    # CPython clears slots in alphabetical order: what `pointer` needs while it is freed must come after it.
    __slots__ = ("pointer", "refs")

    def __init__(self, pointer: Any, *refs: Any) -> None:
        self.pointer = pointer
        self.refs = list(refs)

    def add(self, other: Any) -> None:
        """Keep `other` alive too."""
        if other not in self.refs:
            self.refs.append(other)


AnyOwner = TypeVar("AnyOwner", bound="Owner")


class Owner:
    """Something that is closed once, by hand, by `with`, or when nobody refers to it."""

    _ptr: Any
    _life: Lifetime

    @property
    def closed(self) -> bool:
        """Say whether `close` was called."""
        return self._ptr is None

    def close(self) -> None:
        """Give it up; its memory is freed when nothing points into it any more. A second call does nothing."""
        self._ptr = None
        self._life = Lifetime(None)

    def _open(self) -> Any:
        if self._ptr is None:
            raise ClosedError(f"this {type(self).__name__} is closed")
        return self._ptr

    def __enter__(self: AnyOwner) -> AnyOwner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- devices ---


class _Handle:
    """A pointer to something that ggml keeps for the life of the process; equal if it is the same thing."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: Any) -> None:
        self.ptr = ptr

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)


class Device(_Handle):
    """A device that ggml can compute on."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Device {self.name}: {self.description} ({self.type})>"

    @property
    def name(self) -> str:
        """Give ggml's short name, such as `CPU` or `CUDA0`."""
        return text_of(C.ggml_backend_dev_name(self.ptr))

    @property
    def description(self) -> str:
        """Give the name of the hardware."""
        return text_of(C.ggml_backend_dev_description(self.ptr))

    @property
    def type(self) -> str:
        """Give the kind: `cpu`, `gpu`, `igpu` (shares the host's memory) or `accel` (works for the CPU)."""
        return _KINDS.get(C.ggml_backend_dev_type(self.ptr), "unknown")

    def memory(self) -> tuple[int, int]:
        """Return the free and the total memory in bytes."""
        sizes = ffi.new("size_t[2]")
        C.ggml_backend_dev_memory(self.ptr, sizes, sizes + 1)
        return int(sizes[0]), int(sizes[1])

    @property
    def buffer_type(self) -> BufferType:
        """Give the device's plain kind of memory."""
        return BufferType(C.ggml_backend_dev_buffer_type(self.ptr))

    @property
    def can_wrap_host_memory(self) -> bool:
        """Say whether the device can compute in memory that it did not allocate."""
        props = ffi.new("struct ggml_backend_dev_props *")
        C.ggml_backend_dev_get_props(self.ptr, props)
        return bool(props.caps.buffer_from_host_ptr)


def devices() -> list[Device]:
    """List all devices, in ggml's order."""
    return [Device(C.ggml_backend_dev_get(i)) for i in range(C.ggml_backend_dev_count())]


def cpu_device() -> Device:
    """Return the CPU."""
    return Device(C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU))


def physical_cores() -> int:
    """Count the physical cores this process may use: its affinity without siblings, within its container's quota."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota(), MAX_THREADS))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return MAX_THREADS


# --- memory ---


class BufferType(_Handle):
    """A kind of memory: a device's own, or one that rearranges weights for its kernels (an extra buffer type)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<BufferType {self.name}>"

    @property
    def name(self) -> str:
        """Give ggml's name of it, such as `CPU`, `CPU_REPACK` or `AMX`."""
        return text_of(C.ggml_backend_buft_name(self.ptr))

    @property
    def device(self) -> Device:
        """Return the device it belongs to."""
        return Device(C.ggml_backend_buft_get_device(self.ptr) or cpu_device().ptr)

    @property
    def is_host(self) -> bool:
        """Say whether the CPU can read it in place."""
        return bool(C.ggml_backend_buft_is_host(self.ptr))

    @property
    def is_packed(self) -> bool:
        """Say whether weights are rearranged in it: written whole, never read back, and good for products only."""
        return self in extra_buffer_types(self.device)

    @property
    def alignment(self) -> int:
        """Give the alignment of each tensor in bytes."""
        return int(C.ggml_backend_buft_get_alignment(self.ptr))


def extra_buffer_types(device: Device) -> list[BufferType]:
    """List a device's special kinds of memory in the order in which llama.cpp tries them (AMX before CPU_REPACK)."""
    found = []
    at = C.ggufpy_dev_extra_bufts(device.ptr)
    while at and at[0]:
        found.append(BufferType(at[0]))
        at += 1
    return found


def weight_buffer_type(device: Device, tensor: Tensor, *, experts: bool = False) -> BufferType:
    """Choose the memory for a weight that is only multiplied with, as llama.cpp does: the first kind that takes it.

    Each kind is asked about a product of this weight and 512 rows; `experts` means `mul_mat_id`.
    """
    for kind in extra_buffer_types(device):
        if _takes(kind, device, tensor, experts):
            return kind
    return device.buffer_type


def _takes(kind: BufferType, device: Device, tensor: Tensor, experts: bool) -> bool:
    ne = tensor.ne
    if ne[3] != 1 or (ne[2] != 1 and not experts):
        return False
    params = ffi.new("struct ggml_init_params *", {"mem_size": 8 * C.ggml_tensor_overhead(), "no_alloc": True})
    context = ffi.gc(C.ggml_init(params[0]), C.ggml_free)
    weight = C.ggml_new_tensor_4d(context, tensor.type, *ne)
    f32, i32 = C.GGML_TYPE_F32, C.GGML_TYPE_I32
    if experts:
        rows = C.ggml_new_tensor_3d(context, f32, ne[0], 1, 512)
        op = C.ggml_mul_mat_id(context, weight, rows, C.ggml_new_tensor_2d(context, i32, 1, 512))
    else:
        op = C.ggml_mul_mat(context, weight, C.ggml_new_tensor_2d(context, f32, ne[0], 512))
    # ggml tells the kind of memory from the weight's buffer; an empty one will do.
    buffer = ffi.gc(C.ggml_backend_buft_alloc_buffer(kind.ptr, 0), C.ggml_backend_buffer_free)
    weight.buffer = buffer
    return bool(buffer) and bool(C.ggml_backend_dev_supports_op(device.ptr, op))


class Buffer(Owner):
    """Memory that tensors are bound to: allocated by ggml, or the host's own, such as a mapped file.

    `base` is its address (an int), `size` its bytes, `type` its kind. `is_mapped` says that it is memory which a caller
    gave, `readonly` that nobody may write to it, `packed` that weights are rearranged in it.
    """

    def __init__(self, ptr: Any, *, refs: Sequence[Any] = (), readonly: bool = False, is_mapped: bool = False) -> None:
        self._ptr = ffi.gc(ptr, C.ggml_backend_buffer_free)
        self._life = Lifetime(self._ptr, *refs)
        self.readonly = readonly
        self.is_mapped = is_mapped
        self.type = BufferType(C.ggml_backend_buffer_get_type(ptr))
        self.packed = self.type.is_packed
        self.base = int(ffi.cast("uintptr_t", C.ggml_backend_buffer_get_base(ptr)))
        self.size = int(C.ggml_backend_buffer_get_size(ptr))

    def __repr__(self) -> str:
        return f"<Buffer {self.type.name}: {self.size} bytes>"

    @classmethod
    def alloc(cls, type: BufferType, nbytes: int) -> Buffer:
        """Allocate memory; its content is undefined."""
        if not 0 < nbytes <= MAX_NBYTES:
            raise BackendError(f"no buffer has {nbytes} bytes")
        ptr = C.ggml_backend_buft_alloc_buffer(type.ptr, nbytes)
        if not ptr:
            raise BackendError(f"{type.name}: {nbytes} bytes could not be allocated")
        return cls(ptr)

    @classmethod
    def from_host(cls, device: Device, memory: Any) -> Buffer:
        """Wrap an object with the buffer protocol (a mapping, a bytearray) without a copy, and keep it alive."""
        view = memoryview(memory)
        if not device.can_wrap_host_memory:
            raise BackendError(f"{device.name} cannot compute in host memory")
        if not view.nbytes:
            raise BackendError("there is no buffer of 0 bytes")
        held = ffi.from_buffer(memory)
        address = int(ffi.cast("uintptr_t", held))
        if address % device.buffer_type.alignment:
            raise BackendError(
                f"the memory starts at {address:#x}, not at a multiple of {device.buffer_type.alignment}"
            )
        ptr = C.ggml_backend_dev_buffer_from_host_ptr(device.ptr, held, view.nbytes, view.nbytes)
        if not ptr:
            raise BackendError(f"{device.name} could not wrap {view.nbytes} bytes of host memory")
        return cls(ptr, refs=(held, memory), readonly=view.readonly, is_mapped=True)

    @classmethod
    def for_tensors(cls, type: BufferType, tensors: Sequence[Tensor]) -> Buffer:
        """Allocate one buffer and place the tensors in it, one after the other."""
        offsets, size = _places(type, tensors)
        return cls.alloc(type, size)._holding(tensors, offsets)

    @classmethod
    def zeros(cls, device: Device, tensors: Sequence[Tensor], folder: str | None = None) -> Buffer:
        """Place the tensors in one buffer of zeros; on the CPU, pages nobody has written to cost no memory.

        With a `folder` (CPU only) it is a file there without a name, to which the system may move pages.
        """
        type = device.buffer_type
        if not (type.is_host and device.can_wrap_host_memory):
            if folder is not None:
                raise BackendError(f"{device.name} cannot have its memory in a file: only the CPU can")
            buffer = cls.for_tensors(type, tensors)
            buffer.clear()
            return buffer
        offsets, size = _places(type, tensors)
        if size > MAX_NBYTES:
            raise BackendError(f"no buffer has {size} bytes")
        buffer = cls.from_host(device, _anonymous(type, size) if folder is None else _mapped_file(folder, size))
        buffer.is_mapped = False
        return buffer._holding(tensors, offsets)

    def _holding(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> Buffer:
        for tensor, offset in zip(tensors, offsets, strict=True):
            self.bind(tensor, self.base + offset)
        return self

    @property
    def is_host(self) -> bool:
        """Say whether the CPU can read it in place."""
        return self.type.is_host

    def bind(self, tensor: Tensor, address: int) -> None:
        """Let a leaf have its data at `address` within this buffer (`ggml_backend_tensor_alloc`)."""
        ptr = self._open()
        if self.packed and not any(_takes(self.type, self.type.device, tensor, experts) for experts in (False, True)):
            raise GraphError(f"{tensor!r}: {self.type.name} does not take such a weight")
        if address % self.type.alignment:
            raise GraphError(f"{tensor!r}: address {address:#x} is not a multiple of {self.type.alignment}")
        size = int(C.ggml_backend_buffer_get_alloc_size(ptr, tensor.ptr))
        if not self.base <= address <= address + size <= self.base + self.size:
            raise GraphError(
                f"{tensor!r}: {size} bytes at offset {address - self.base} do not lie in a buffer of {self.size} bytes"
            )
        tensor.ctx._bindable(tensor, self)
        check_status(C.ggml_backend_tensor_alloc(ptr, tensor.ptr, ffi.cast("void *", address)), f"binding {tensor!r}")
        tensor.buffer = self
        tensor.ctx._life.add(self._life)

    def clear(self, value: int = 0) -> None:
        """Set every byte."""
        ptr = self._open()
        if self.readonly or self.packed:
            raise BackendError(f"{self!r} cannot be overwritten")
        C.ggml_backend_buffer_clear(ptr, value & 0xFF)

    def set_usage_weights(self) -> None:
        """Say that it holds weights: operations then run where the weights are."""
        C.ggml_backend_buffer_set_usage(self._open(), C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)

    def _lend(self, data: Any, nbytes: int) -> Any:
        """Make a Python buffer of memory in here that keeps it alive."""
        life = self._life
        return ffi.buffer(ffi.gc(ffi.cast("char *", data), lambda _, life=life: None), nbytes)


def _anonymous(type: BufferType, size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise BackendError(f"{type.name}: {size} bytes could not be allocated ({error.strerror})") from error


def _mapped_file(folder: str, size: int) -> mmap.mmap:
    """Map a new file that has no name and goes when the mapping goes. OSError where the folder is none to write to.

    Its blocks are reserved: writing to a page for which the disk has no room would end the process (SIGBUS), and room
    that is there now may be another's then. No block is written by that, and none before its page has changed.
    """
    import shutil
    import tempfile

    with tempfile.TemporaryFile(dir=folder, prefix="ggufpy-") as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            elif size <= shutil.disk_usage(folder).free:  # macOS
                file.truncate(size)
            else:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise BackendError(
                f"{folder}: expected room for a file of {size} bytes, {free} are free ({error.strerror})"
            ) from error
        return mmap.mmap(file.fileno(), size)


def _places(type: BufferType, tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each tensor goes in a buffer of its own, and the size of that buffer."""
    offsets, end, alignment = [], 0, type.alignment
    for tensor in tensors:
        offsets.append(end)
        end += int(C.ggml_backend_buft_get_alloc_size(type.ptr, tensor.ptr))
        end += -end % alignment
    return offsets, max(end, alignment)


# --- computing ---


class _Threads:
    """What became of the threads that compute: OpenMP, or a pool, would wait for ever for those a fork left behind."""

    started = left_behind = False

    def forked(self) -> None:
        self.left_behind = self.started


_threads = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.forked)


class Backend(Owner):
    """A device ready to compute."""

    def __init__(self, device: Device) -> None:
        ptr = C.ggml_backend_dev_init(device.ptr, ffi.NULL)
        if not ptr:
            raise BackendError(f"{device.name} could not be initialized")
        self.device = device
        self._ptr = ffi.gc(ptr, C.ggml_backend_free)
        self._life = Lifetime(self._ptr)
        self._n_threads: int | None = None  # ggml's default
        self._stop = ffi.new("int *")
        self._life.add(self._stop)
        C.ggufpy_backend_set_abort_callback(self._ptr, ffi.addressof(C, "ggufpy_stop"), self._stop)

    def __repr__(self) -> str:
        return f"<Backend {self.device.name}>"

    def set_n_threads(self, n: int) -> None:
        """Let the next computations use `n` threads; devices without threads ignore it.

        In a process forked from one that has computed with several it is always one: the others stayed behind.
        """
        if _threads.left_behind:
            n = 1
        if n == self._n_threads:
            return
        if not 1 <= n <= MAX_THREADS:
            raise BackendError(f"1 to {MAX_THREADS} threads can be used, not {n}")
        C.ggufpy_backend_set_n_threads(self._open(), n)
        if not _HAS_OPENMP and self.device.type == "cpu" and not _threads.left_behind:
            self._set_pool(n)
        self._n_threads = n
        _threads.started |= n > 1

    def argmax(self, rows: tuple[NDArray[np.float32], ...]) -> list[int]:
        """Return the place of each row's largest value, or first NaN, as NumPy does; a CPU's threads share the rows.

        `rows`: float32 [n] each, contiguous, all of one size. Raises ValueError for others.
        """
        for i, row in enumerate(rows):
            if not isinstance(row, np.ndarray) or row.dtype != np.float32 or row.ndim != 1 or not row.size:
                raise ValueError(f"rows[{i}]: expected float32 [n], got {row!r:.60}")
            if row.size != rows[0].size or not (row.flags.c_contiguous and row.flags.aligned):
                found = f"{row.size} with strides {row.strides}"
                raise ValueError(f"rows[{i}]: expected a contiguous row of {rows[0].size}, got {found}")
        if self.device.type != "cpu":
            raise BackendError(f"argmax: a CPU's threads search rows, not {self.device.name}")
        if not rows:
            return []
        held = [ffi.from_buffer("float[]", row) for row in rows]
        places = ffi.new("int64_t[]", len(rows))
        if C.ggufpy_argmax(self._open(), ffi.new("float *[]", held), len(rows), rows[0].size, places):
            return list(places)
        return [int(row.argmax()) for row in rows]  # out of memory, or cancelled

    def _set_pool(self, n: int) -> None:
        """Keep the threads between graphs; without OpenMP, ggml would start and join them for each."""
        params = ffi.new("struct ggml_threadpool_params *")
        C.ggml_threadpool_params_init(params, n)
        device = self.device.ptr
        pool = C.ggufpy_threadpool_new(device, params)
        if pool:
            pool = ffi.gc(pool, lambda p: _threads.left_behind or C.ggufpy_threadpool_free(device, p))
            C.ggufpy_backend_set_threadpool(self._ptr, pool)
            self._life.refs = [self._stop, pool]

    def set_use_ref(self, use_ref: bool) -> None:
        """Let the CPU use its plain reference kernels (slow; for tests)."""
        C.ggufpy_backend_set_use_ref(self._open(), use_ref)


_HAS_OPENMP = features_of(C.ggml_backend_dev_backend_reg(cpu_device().ptr)).get("OPENMP") == "1"


class Scheduler(Owner):
    """Gives the tensors of a graph memory and computes it, splitting it among backends (`ggml_backend_sched`)."""

    def __init__(self, backends: Sequence[Backend], n_nodes: int, *, op_offload: bool = True) -> None:
        """Make a scheduler for graphs of up to `n_nodes` nodes and leaves. The last backend has to be a CPU."""
        if not 1 <= len(backends) <= MAX_BACKENDS or backends[-1].device.type != "cpu":
            raise BackendError(f"1 to {MAX_BACKENDS} backends expected, the last one a CPU, not {list(backends)}")
        if not 0 < n_nodes <= MAX_NODES:
            raise BackendError(f"1 to {MAX_NODES} nodes expected, not {n_nodes}")
        self.backends = tuple(backends)
        self.n_nodes = n_nodes
        self._op_offload = op_offload
        self._array = ffi.new("ggml_backend_t[]", [backend._open() for backend in backends])
        self._generation = 0
        self._lent = 0  # arrays that look into the current memory
        self._graph: weakref.ref[Graph] | None = None  # weak: its context refers to this scheduler
        self._rows: tuple[Any, Any, int] = (None, None, 0)
        self._bad = ffi.new("int64_t *")
        self._make()

    def _make(self) -> None:
        ptr = C.ggml_backend_sched_new(self._array, ffi.NULL, len(self.backends), self.n_nodes, False, self._op_offload)
        if not ptr:
            raise BackendError("the scheduler could not be made")
        self._ptr = ffi.gc(ptr, C.ggml_backend_sched_free)
        self._life = Lifetime(self._ptr, self._array, *(backend._life for backend in self.backends))
        self._lent = 0

    def close(self) -> None:
        """Give it up; its memory is freed when no array looks into it any more. A second call does nothing."""
        super().close()
        self._graph = None
        self._generation += 1

    def reset(self) -> None:
        """Take the memory back from the graph that has it. Arrays that look into it keep it; tensors lose it."""
        self._open()
        self._graph = None
        self._generation += 1
        if self._lent:
            self._make()
        else:
            C.ggml_backend_sched_reset(self._ptr)

    def alloc(self, graph: Graph) -> None:
        """Give the tensors of a graph memory; it takes it from the graph that had it before.

        Raises GraphError for a graph that no backend can compute, BackendError where memory runs out.
        """
        self.reset()
        graph._allocatable(self.n_nodes)
        bad = C.ggufpy_graph_first_unsupported(graph.ptr, self._array, len(self.backends))
        if bad:
            raise GraphError(_unsupported(bad, self.backends))
        if not C.ggml_backend_sched_alloc_graph(self._ptr, graph.ptr):
            C.ggml_backend_sched_reset(self._ptr)
            graph._freeze(self, -1)  # ggml may have changed it
            raise BackendError(f"there is no memory for a graph of {len(graph)} nodes")
        rows = graph._freeze(self, self._generation)
        self._rows = (
            ffi.new("struct ggml_tensor *[]", list(rows)) if rows else ffi.NULL,
            ffi.new("int64_t[]", list(rows.values())) if rows else ffi.NULL,
            len(rows),
        )
        self._graph = weakref.ref(graph)

    def compute(self, graph: Graph) -> bool:
        """Compute the graph that has the memory, without the GIL; return False if `cancel` stopped it.

        Raises GraphError for a row number out of range, BackendError for what the device reports.
        """
        ptr = self._open()
        if graph.ctx._ptr is None:
            raise ClosedError("compute: the graph's context is closed")
        if self._graph is None or self._graph() is not graph:
            raise GraphError("compute: the graph has no memory; allocate it first (alloc)")
        tensors, limits, n = self._rows
        if n:
            found = C.ggufpy_first_bad_row(tensors, limits, n, self._bad)
            if found != -1:
                raise self._bad_row(tensors, limits, found)
        held = graph.ctx._life  # another thread may close the context meanwhile
        status = C.ggml_backend_sched_graph_compute(ptr, graph.ptr)
        del held
        if status == SUCCESS:
            return True
        if status == C.GGML_STATUS_ABORTED:
            self._set_stop(0)
            return False
        check_status(status, "computing a graph")
        return True

    def _bad_row(self, tensors: Any, limits: Any, found: int) -> GraphError:
        if found < 0:
            return GraphError("compute: no memory to check the row numbers with")
        name = text_of(tensors[found].name)
        return GraphError(
            f"compute: {name!r} has the row number {self._bad[0]}, the rows are 0 to {limits[found] - 1} "
            "(inputs have to be set before each compute)"
        )

    def cancel(self) -> None:
        """Stop the computation that runs in another thread, or else the next one, at its next node (CPU only)."""
        self._set_stop(1)

    def resume(self) -> None:
        """Forget a `cancel` that has stopped nothing yet."""
        self._set_stop(0)

    def _set_stop(self, value: int) -> None:
        for backend in self.backends:
            backend._stop[0] = value

    def synchronize(self) -> None:
        """Wait until everything is computed."""
        C.ggml_backend_sched_synchronize(self._open())

    @property
    def n_splits(self) -> int:
        """Count the pieces that the current graph was cut into."""
        return int(C.ggml_backend_sched_get_n_splits(self._open()))

    @property
    def nbytes(self) -> int:
        """Give the bytes of memory that graphs are computed in, on all backends."""
        ptr = self._open()
        return sum(int(C.ggml_backend_sched_get_buffer_size(ptr, backend._open())) for backend in self.backends)

    def _lend(self, data: Any, nbytes: int) -> Any:
        """Make a Python buffer of a tensor's memory that keeps it alive."""
        life = self._life
        self._lent += 1

        def give_back(_: Any, life: Lifetime = life) -> None:
            if self._life is life:
                self._lent -= 1

        return ffi.buffer(ffi.gc(ffi.cast("char *", data), give_back), nbytes)


def _unsupported(node: Any, backends: Sequence[Backend]) -> str:
    operands = []
    for i in range(10):  # GGML_MAX_SRC
        source = node.src[i]
        if source:
            kind = text_of(C.ggml_type_name(source.type))
            operands.append(f"{text_of(source.name)!r} {kind} {list(source.ne)}")
    names = ", ".join(backend.device.name for backend in backends)
    return (
        f"alloc: no device of {names} can compute {text_of(C.ggml_op_desc(node))} into {text_of(node.name)!r} "
        f"{text_of(C.ggml_type_name(node.type))} {list(node.ne)} from {', '.join(operands) or 'nothing'}"
    )
