"""Devices, buffers and the scheduler: what lies where, who keeps what alive, and what is refused before ggml aborts."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufpy import backend
from ggufpy.backend import (
    Backend,
    Buffer,
    BufferType,
    Scheduler,
    cpu_device,
    devices,
    extra_buffer_types,
    physical_cores,
    weight_buffer_type,
)
from ggufpy.errors import BackendError, ClosedError, GraphError
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Tensor
from ggufpy.types import dequantize, quantize

F32, Q4_0 = GGMLType.F32, GGMLType.Q4_0
CPU = cpu_device()
PAGE = mmap.PAGESIZE


def values(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


# --- devices ---


def test_the_cpu_is_a_device() -> None:
    """There is always a CPU, with a name, a kind and memory; handles to one device are equal."""
    assert CPU in devices()
    assert (CPU.name, CPU.type) == ("CPU", "cpu")
    assert CPU.description
    free, total = CPU.memory()
    assert 0 < free <= total
    assert {cpu_device(): 1}[CPU] == 1
    assert CPU.buffer_type.is_host
    assert not CPU.buffer_type.is_packed
    assert CPU.buffer_type.device == CPU


def test_physical_cores() -> None:
    """At most the CPUs of the process's affinity; one if it may use one only."""
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert physical_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_siblings_and_quota_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Threads of one core count once; a container's quota limits further."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(backend, "_siblings", lambda cpu: f"{cpu % 4},{cpu % 4 + 4}")
    monkeypatch.setattr(backend, "_quota", lambda: 512)
    assert physical_cores() == 4
    monkeypatch.setattr(backend, "_quota", lambda: 3)
    assert physical_cores() == 3


# --- buffers ---


def test_mapped_memory_is_used_in_place(tmp_path: Path) -> None:
    """A tensor bound into a mapping reads the file's bytes, cannot be written, and keeps the mapping alive."""
    path = tmp_path / "data"
    path.write_bytes(bytes(64) + values(3, 4).tobytes())
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    t = Context(1).new_tensor(F32, 4, 3, name="t")
    buffer = Buffer.from_host(CPU, mapping)
    buffer.bind(t, buffer.base + 64)
    assert (buffer.size, buffer.readonly, buffer.is_mapped, buffer.is_host) == (112, True, True, True)
    assert t.address == buffer.base + 64
    np.testing.assert_array_equal(t.get(), values(3, 4))
    writes = (partial(t.set, values(3, 4)), partial(t.numpy_view, writable=True), partial(t.set_bytes, bytes(48)))
    for write in writes:
        with pytest.raises(GraphError, match="cannot be written"):
            write()
    with pytest.raises(BackendError, match="cannot be overwritten"):
        buffer.clear()
    ctx = Context(4)
    x = ctx.input(F32, 4, 3)
    with pytest.raises(GraphError, match="cannot be written"):
        ctx.cpy(x, t)
    with pytest.raises(BufferError):
        mapping.close()
    view = t.numpy_view()
    gone = weakref.ref(mapping)
    del mapping, buffer, t, ctx, x, write, writes
    gc.collect()
    assert gone() is not None
    np.testing.assert_array_equal(view, values(3, 4))
    del view
    gc.collect()
    assert gone() is None


def test_memory_that_cannot_be_wrapped() -> None:
    """Memory off the alignment, or none, is refused; ggml would abort."""
    memory = bytearray(256)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    with pytest.raises(BackendError, match="not at a multiple of 32"):
        Buffer.from_host(CPU, memoryview(memory)[1 - start % 32 :])
    with pytest.raises(BackendError, match="0 bytes"):
        Buffer.from_host(CPU, bytearray())
    for nbytes in (0, -1, 2**60):
        with pytest.raises(BackendError, match="no buffer has"):
            Buffer.alloc(CPU.buffer_type, nbytes)
    with pytest.raises(BackendError, match="could not be allocated"):
        Buffer.alloc(CPU.buffer_type, 2**46)


def test_where_a_tensor_may_be_bound() -> None:
    """Within the buffer, on the alignment, once; leaves only; and the buffer has to be open."""
    ctx = Context(8)
    t = ctx.new_tensor(F32, 16, name="t")
    buffer = Buffer.alloc(CPU.buffer_type, 128)
    for offset, match in (
        (-32, "do not lie in"),
        (96, "64 bytes at offset 96"),
        (4, "not a multiple of 32"),
        (2**62, "lie"),
    ):
        with pytest.raises(GraphError, match=match):
            buffer.bind(t, buffer.base + offset)
    with pytest.raises(GraphError, match="only leaves"):
        buffer.bind(ctx.view_1d(t, 4, 0), buffer.base)
    with pytest.raises(GraphError, match="only leaves"):
        buffer.bind(ctx.neg(t), buffer.base)
    buffer.bind(t, buffer.base + 64)
    with pytest.raises(GraphError, match="bound already"):
        buffer.bind(t, buffer.base)
    buffer.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.bind(ctx.new_tensor(F32, 1), buffer.base)


def test_a_written_leaf_cannot_move_to_readonly_memory() -> None:
    """An operation that writes to a leaf keeps it out of read-only buffers."""
    ctx = Context(4)
    t = ctx.new_tensor(F32, 8)
    ctx.cpy(ctx.input(F32, 8), t)
    memory = mmap.mmap(-1, PAGE, prot=mmap.PROT_READ)
    buffer = Buffer.from_host(CPU, memory)
    with pytest.raises(GraphError, match="cannot be written"):
        buffer.bind(t, buffer.base)


def test_one_buffer_for_many_tensors() -> None:
    """Tensors follow each other on the alignment, and do not overlap."""
    ctx = Context(3)
    tensors = [ctx.new_tensor(F32, n) for n in (3, 9, 1)]
    buffer = Buffer.for_tensors(CPU.buffer_type, tensors)
    for k, t in enumerate(tensors):
        t.set(np.full(t.ne[0], k, np.float32))
    assert [t.address % 32 for t in tensors] == [0, 0, 0]
    assert [t.get().tolist() for t in tensors] == [[0.0] * 3, [1.0] * 9, [2.0]]
    assert all(buffer.base <= t.address and t.address + t.nbytes <= buffer.base + buffer.size for t in tensors)
    buffer.clear(0)
    assert not tensors[1].get().any()


def test_zeros_cost_no_memory_until_they_are_used() -> None:
    """Half a gigabyte of zeros takes a few pages; writing to one place takes that place."""
    before = resident()
    t = Context(1).new_tensor(F32, 2**17, 2**10)
    buffer = Buffer.zeros(CPU, [t])
    assert (buffer.size, buffer.is_mapped, buffer.readonly) == (2**29, False, False)
    ctx = Context(2)
    row = ctx.view_1d(t, 2**17, 2**28)
    assert not row.get().any()
    row.set(np.ones(2**17, np.float32))
    assert row.get().all()
    assert resident() - before < 2**25


def test_closing_a_buffer_does_not_pull_the_rug() -> None:
    """A graph over tensors of a closed buffer still computes; its memory goes with the last of them."""
    w = Context(1).new_tensor(F32, 4)
    buffer = Buffer.for_tensors(CPU.buffer_type, [w])
    w.set(values(4))
    ctx = Context(2)
    y = ctx.output(ctx.neg(w))
    life = weakref.ref(buffer)
    buffer.close()
    del buffer, w
    gc.collect()
    graph, scheduler = allocated(y)
    assert scheduler.compute(graph)
    np.testing.assert_array_equal(y.get(), -values(4))
    del graph, scheduler, y, ctx
    gc.collect()
    assert life() is None


# --- memory for weights ---


def choice(kind: GGMLType, *ne: int, experts: bool = False) -> str:
    return weight_buffer_type(CPU, Context(1).new_tensor(kind, *ne), experts=experts).name


def test_which_weights_are_rearranged() -> None:
    """ggml's own kernels decide; one row, or a plain cube, is never rearranged."""
    names = [kind.name for kind in extra_buffer_types(CPU)]
    if "CPU_REPACK" not in names:
        pytest.skip("this CPU has no rearranging kernels")
    assert choice(Q4_0, 256, 64) in names
    assert choice(Q4_0, 256, 64, 4, experts=True) == "CPU_REPACK"
    for kind, ne in (
        (F32, (256, 64)),
        (Q4_0, (256, 1)),
        (Q4_0, (256, 64, 4)),
        (Q4_0, (256, 63)),
        (GGMLType.I32, (256, 64)),
    ):
        assert choice(kind, *ne) == "CPU"


def packed() -> tuple[BufferType, Tensor]:
    w = Context(1).new_tensor(Q4_0, 256, 64, name="W")
    kind = weight_buffer_type(CPU, w)
    if not kind.is_packed:
        pytest.skip("this CPU has no rearranging kernels")
    return kind, w


def test_rearranged_weights_multiply() -> None:
    """The product is that of the plain weights; nothing else works on them, and they cannot be read back."""
    kind, w = packed()
    Buffer.for_tensors(kind, [w])
    w.set(quantize(values(64, 256), Q4_0))
    exact = dequantize(quantize(values(64, 256), Q4_0), Q4_0, (64, 256))
    for rows in (1, 6):
        ctx = Context(8)
        x = ctx.input(F32, 256, rows)
        y = ctx.output(ctx.mul_mat(w, x))
        graph, scheduler = allocated(y)
        x.set(values(rows, 256, seed=1))
        assert scheduler.compute(graph)
        np.testing.assert_allclose(y.get().reshape(rows, 64), values(rows, 256, seed=1) @ exact.T, atol=0.5)
    ctx = Context(8)
    for other in (
        lambda: ctx.view_1d(w, 256, 0),
        lambda: ctx.get_rows(w, ctx.input(GGMLType.I32, 1)),
        lambda: ctx.cont(w),
    ):
        with pytest.raises(GraphError, match="can only be multiplied with"):
            other()
    with pytest.raises(GraphError, match="cannot be read back"):
        w.get()
    with pytest.raises(GraphError, match="not in host memory"):
        w.numpy_view()
    with pytest.raises(GraphError, match="no room"):
        w.ctx.view_1d(w, 256, 0)


def test_rearranged_memory_takes_its_own_only() -> None:
    """A tensor without kernels there, or in a context with operations, is refused; as is a product they lack."""
    kind, _ = packed()
    with pytest.raises(GraphError, match="does not take such a weight"):
        Buffer.for_tensors(kind, [Context(1).new_tensor(F32, 256, 64)])
    ctx = Context(4)
    t = ctx.new_tensor(Q4_0, 256, 64)
    ctx.view_1d(t, 256, 0)
    with pytest.raises(GraphError, match="a context without operations"):
        Buffer.for_tensors(kind, [t])


# --- computing ---


def allocated(y: Tensor, n_threads: int = 1) -> tuple[Any, Scheduler]:
    graph = y.ctx.new_graph()
    graph.expand(y)
    compute = Backend(CPU)
    compute.set_n_threads(n_threads)
    scheduler = Scheduler([compute], 4096)
    scheduler.alloc(graph)
    return graph, scheduler


def test_what_a_scheduler_is_made_of() -> None:
    """Backends, the last a CPU, and a sensible number of nodes."""
    compute = Backend(CPU)
    for wrong in ([], [compute] * 17):
        with pytest.raises(BackendError, match="1 to 16 backends"):
            Scheduler(wrong, 10)
    for n in (0, -1, 2**40):
        with pytest.raises(BackendError, match="nodes expected"):
            Scheduler([compute], n)
    compute.close()
    with pytest.raises(ClosedError):
        Scheduler([compute], 10)


def test_threads_have_limits() -> None:
    """1 to 512; a closed backend takes none."""
    compute = Backend(CPU)
    for n in (0, -1, 513):
        with pytest.raises(BackendError, match="1 to 512 threads"):
            compute.set_n_threads(n)
    compute.set_n_threads(2)
    compute.close()
    with pytest.raises(ClosedError):
        compute.set_n_threads(1)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_do_not_change_a_product(n_threads: int) -> None:
    """Bits are the same for any number of threads."""
    ctx = Context(4)
    a, b = ctx.input(F32, 64, 33), ctx.input(F32, 64, 7)
    y = ctx.output(ctx.mul_mat(a, b))
    graph, scheduler = allocated(y, n_threads)
    a.set(values(33, 64))
    b.set(values(7, 64, seed=1))
    assert scheduler.compute(graph)
    assert y.get().tobytes() == PRODUCT.setdefault("bits", y.get().tobytes())


PRODUCT: dict[str, bytes] = {}


def test_pools_of_threads_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ggml has no OpenMP, a pool is kept; changing its size replaces it."""
    monkeypatch.setattr(backend, "_HAS_OPENMP", False)
    ctx = Context(4)
    a = ctx.input(F32, 64, 33)
    y = ctx.output(ctx.mul_mat(a, a))
    graph, scheduler = allocated(y, 2)
    for n in (1, 2):
        scheduler.backends[0].set_n_threads(n)
        a.set(values(33, 64))
        assert scheduler.compute(graph)
        np.testing.assert_allclose(y.get(), values(33, 64) @ values(33, 64).T, rtol=1e-4, atol=1e-4)


def test_graphs_that_do_not_fit() -> None:
    """Too many nodes, no nodes, no memory: each says so."""
    ctx = Context(40)
    x = t = ctx.input(F32, 4)
    for _ in range(30):
        t = ctx.neg(t)
    graph = ctx.new_graph()
    graph.expand(t)
    with pytest.raises(GraphError, match="30 nodes and 1 leaves do not fit a scheduler for 20"):
        Scheduler([Backend(CPU)], 20).alloc(graph)
    with pytest.raises(GraphError, match="no nodes"):
        Scheduler([Backend(CPU)], 20).alloc(Context(1).new_graph())
    ctx = Context(4)
    x = ctx.input(F32, 2**20, 2**19)
    huge = ctx.new_graph()
    huge.expand(ctx.repeat_4d(x, 2**20, 2**20, 1, 1))
    scheduler = Scheduler([Backend(CPU)], 20)
    with pytest.raises(BackendError, match="no memory"):
        scheduler.alloc(huge)
    with pytest.raises(GraphError, match="no memory"):
        scheduler.compute(huge)


def test_what_no_device_can_compute() -> None:
    """A graph with a node that no backend supports is refused by name, with its operands."""
    kind, w = packed()
    Buffer.for_tensors(kind, [w])
    ctx = Context(4)
    ids = ctx.input(GGMLType.I32, 1, 1)
    y = ctx.mul_mat_id(w, ctx.input(F32, 256, 1, 1), ids)
    y.name = "out"
    graph = ctx.new_graph()
    graph.expand(y)
    with pytest.raises(GraphError, match="no device of CPU can compute MUL_MAT_ID into 'out' f32") as caught:
        Scheduler([Backend(CPU)], 20).alloc(graph)
    assert "from 'W' q4_0 [256, 64, 1, 1]" in str(caught.value)


def test_a_computation_can_be_cancelled() -> None:
    """cancel stops the one that runs, from another thread, at its next node; the next one runs."""
    ctx = Context(4000)
    x = t = ctx.input(F32, 256, 256)
    for _ in range(500):
        t = ctx.mul_mat(x, t)
    y = ctx.output(t)
    graph, scheduler = allocated(y)
    zeros = np.zeros((256, 256), np.float32)
    x.set(zeros)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(scheduler.compute(graph)))
    start = time.monotonic()
    thread.start()
    time.sleep(0.02)
    scheduler.cancel()
    thread.join()
    cancelled = time.monotonic() - start
    assert results == [False]
    x.set(zeros)
    start = time.monotonic()
    assert scheduler.compute(graph)
    assert cancelled < time.monotonic() - start


def test_two_schedulers_in_two_threads() -> None:
    """Each thread with graphs and a scheduler of its own gets its own results."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        for k in range(30):
            ctx = Context(8)
            x = ctx.input(F32, 16, 8)
            y = ctx.output(ctx.scale(ctx.mul_mat(x, x), seed))
            graph, scheduler = allocated(y)
            data = values(8, 16, seed=seed * 100 + k)
            x.set(data)
            scheduler.compute(graph)
            if not np.allclose(y.get(), data @ data.T * seed, atol=1e-3):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_schedulers_give_their_memory_back() -> None:
    """A hundred graphs of 8 MB, each with a scheduler of its own, leave nothing behind."""

    def once() -> None:
        ctx = Context(8)
        x = ctx.input(F32, 2**20)
        graph, scheduler = allocated(ctx.output(ctx.neg(x)))
        x.set(np.ones(2**20, np.float32))
        scheduler.compute(graph)
        assert scheduler.nbytes >= 2**22
        assert scheduler.n_splits == 1

    once()
    before = resident()
    for _ in range(100):
        once()
    assert resident() - before < 2**26
