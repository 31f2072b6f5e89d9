"""What a context is besides its operations: room for tensors, what they keep alive, when no more come; `Graph`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ggufpy._ffi.lib import C, ffi, text_of
from ggufpy.backend import Buffer, Lifetime, Owner, Scheduler
from ggufpy.errors import ClosedError, GraphError
from ggufpy.gguf import GGMLType
from ggufpy.graph.tensor import INDEX, LEAF, MAX_ELEMENTS, MAX_TENSORS, ROWS, TYPES, WRITTEN, Tensor, refused

__all__ = ["ContextBase", "Graph"]

MAX_HOLES = 250  # MAX_FREE_BLOCKS of ggml-alloc.c, less a few

_allocate = ffi.new_allocator(should_clear_after_alloc=False)


def _metadata_context(nbytes: int) -> tuple[Any, Any, Any]:
    """Make a ggml context for `nbytes` of metadata; return it, where its memory starts, and the owner of that.

    The memory is Python's: ggml aborts where it gets none.
    """
    memory = _allocate("char[]", nbytes + 16)
    start = memory + -int(ffi.cast("uintptr_t", memory)) % 16
    params = ffi.new("struct ggml_init_params *", {"mem_size": nbytes, "mem_buffer": start, "no_alloc": True})
    return ffi.gc(C.ggml_init(params[0]), C.ggml_free), start, memory


class ContextBase(Owner):
    """Room for tensors, the checks that all operations share, and what has to stay alive for them."""

    def __init__(self, n_tensors: int) -> None:
        if not 0 < n_tensors <= MAX_TENSORS:
            raise GraphError(f"a context holds 1 to {MAX_TENSORS} tensors, not {n_tensors}")
        self._ptr, self._memory, memory = _metadata_context(n_tensors * C.ggml_tensor_overhead() + 64)
        self._metadata = (self._ptr, memory)
        self._life = Lifetime(*self._metadata)
        self._capacity = n_tensors
        self._left = n_tensors
        self._n_leaves = 0
        self._shape = ffi.new("int64_t[10]")
        self._shape_bytes = ffi.buffer(self._shape)
        self._foreign: set[Tensor] = set()  # leaves of other contexts that this one's operations use
        # Leaves and views of leaves, by pointer (tensors would close a circle): their row numbers must be below this.
        self._indices: dict[Any, int] = {}
        self._scheduler: Scheduler | None = None
        self._generation = 0

    def close(self) -> None:
        """Give the context up. Its tensors cannot be used any more."""
        self._ptr = None
        self._seal()
        self._life = Lifetime(*self._metadata)  # the tensors' names and shapes stay, what they refer to goes
        self._foreign = set()
        self._indices = {}
        self._scheduler = None

    @property
    def n_tensors(self) -> int:
        """Count the tensors made so far."""
        return self._capacity - self._left

    def _is_allocated(self) -> bool:
        return self._scheduler is not None and self._scheduler._generation == self._generation

    def _freeze(self, scheduler: Scheduler, generation: int) -> None:
        """Take no more operations: `scheduler` has given the tensors memory."""
        self._seal()
        self._scheduler = scheduler
        self._generation = generation

    def _seal(self) -> None:
        self._capacity -= self._left
        self._left = 0

    def _bindable(self, t: Tensor, buffer: Buffer) -> None:
        """Check that a tensor may get its data from a buffer."""
        if self._ptr is None or self._scheduler is not None:
            raise self._no_room("bind")
        if t.root is not None or not t.flags & LEAF:
            raise refused("bind", "only leaves can be bound to a buffer", tensor=t)
        if t.buffer is not None:
            raise refused("bind", "it is bound already", tensor=t)
        if t.flags & WRITTEN and buffer.readonly:
            raise refused("bind", "operations write to it, and the buffer cannot be written to", tensor=t)
        if buffer.packed:
            # Only products know rearranged weights, and a view would hide where they lie: no operations here.
            if self._n_leaves < self.n_tensors:
                raise refused("bind", "rearranged weights need a context without operations", tensor=t)
            self._seal()

    # --- making tensors ---

    def new_tensor(self, type: GGMLType | int, *ne: int, name: str | None = None) -> Tensor:
        """Make a leaf of this type and shape (`ggml_new_tensor_4d`); a buffer or a scheduler gives it memory."""
        kind = TYPES[type] if 0 <= type < len(TYPES) else None
        if kind is None:
            raise GraphError(f"new_tensor: there is no type {type}")
        self._size("new_tensor", kind, ne)
        self._own("new_tensor")
        self._n_leaves += 1
        return self._named(
            self._wrap(C.ggml_new_tensor_4d(self._ptr, kind, *ne, *(1,) * (4 - len(ne))), flags=LEAF), name
        )

    def input(self, type: GGMLType | int, *ne: int, name: str | None = None) -> Tensor:
        """Make a leaf that is written before every compute (`ggml_set_input`)."""
        tensor = self.new_tensor(type, *ne, name=name)
        C.ggml_set_input(tensor.ptr)
        return tensor

    def output(self, a: Tensor, name: str | None = None) -> Tensor:
        """Keep the memory of `a` from being used again (`ggml_set_output`), so that it can be read later."""
        self._mine("output", a)
        C.ggml_set_output(a.ptr)
        if a.root is not None and a.root.ctx is self:  # a view has no memory of its own
            C.ggml_set_output(a.root.ptr)
        return self._named(a, name)

    def new_graph(self, size: int | None = None) -> Graph:
        """Make an empty graph over this context."""
        return Graph(self, size)

    def _named(self, tensor: Tensor, name: str | None) -> Tensor:
        if name is not None:
            tensor.name = name
        return tensor

    def _wrap(self, ptr: Any, root: Tensor | None = None, flags: int = 0, limit: int | None = None) -> Tensor:
        self._left -= 1
        return Tensor(self, ptr, root, flags, limit)

    def _view_of(self, a: Tensor, ptr: Any) -> Tensor:
        return self._wrap(ptr, a.root or a, a.flags & LEAF, a.limit)

    def _own(self, op: str, *operands: Tensor) -> None:
        """Check that one more tensor fits, and that the operands are ours or may be used by us."""
        if self._left < 1:
            raise self._no_room(op)
        for t in operands:
            if t.ctx is not self:
                self._adopt(op, t)

    def _no_room(self, op: str) -> GraphError | ClosedError:
        if self._ptr is None:
            return ClosedError(f"{op}: the context is closed")
        if self._scheduler is not None:
            return GraphError(f"{op}: the context's graph is allocated already: build in a new context")
        return GraphError(f"{op}: the context has no room for more than {self._capacity} tensors")

    def _adopt(self, op: str, t: Tensor) -> None:
        if t.ctx._ptr is None:
            raise ClosedError(f"{op}: the context of {t!r} is closed")
        if t.buffer is None:
            raise refused(op, "a tensor of another context has to be a leaf that is bound to a buffer", operand=t)
        if t.buffer.closed:
            raise ClosedError(f"{op}: the buffer of {t!r} is closed")
        if t.buffer.packed and op not in ("mul_mat", "mul_mat_id"):
            raise refused(op, f"weights in {t.buffer.type.name} can only be multiplied with", operand=t)
        if t not in self._foreign:
            self._foreign.add(t)
            self._life.add(t.ctx._life)

    def _mine(self, op: str, a: Tensor) -> None:
        """Check that `a` may still be changed."""
        if self._ptr is None or self._scheduler is not None:
            raise self._no_room(op)
        if a.ctx is not self:
            raise refused(op, "the tensor belongs to another context", a=a)

    # --- shared checks ---

    def _size(self, op: str, type: GGMLType, ne: Sequence[int], **operands: Any) -> None:
        """Check a new shape: one to four positive sizes, rows of whole blocks, not too many elements."""
        n = 1
        for size in ne:
            n *= size
        if not 1 <= len(ne) <= 4 or min(ne) < 1 or n > MAX_ELEMENTS or ne[0] % type.block_size:
            raise refused(op, f"no {type.label} tensor has the shape {list(ne)}", **operands)

    def _rows(self, op: str, **operands: Tensor) -> None:
        for t in operands.values():
            if not t.layout & ROWS:
                raise refused(op, "the elements of a row have to be adjacent (use cont)", **operands)

    def _index(self, op: str, rows: Tensor, n: int, **operands: Any) -> None:
        """Make sure that no value of `rows` lies outside 0 … n − 1: as known now, or by a look before each compute."""
        limit = rows.limit
        if limit is not None:
            if limit > n:
                raise refused(op, f"row numbers go up to {limit - 1}, there are {n} rows", **operands)
            return
        root = rows.root or rows
        if not rows.flags & LEAF or root.flags & WRITTEN:
            raise refused(op, "row numbers have to come from a leaf, argsort, argmax or top_k", **operands)
        root.flags |= INDEX
        self._indices[rows.ptr] = min(n, self._indices.get(rows.ptr, n))

    def _writes(self, op: str, a: Tensor, **operands: Any) -> Tensor:
        """Check that an operation may write to the memory of `a`; return the tensor that owns it."""
        root = a.root or a
        if root.flags & INDEX:
            raise refused(op, "its values are used as row numbers, so no operation may write to it", a=a)
        if root.buffer is not None and root.buffer.readonly:
            raise refused(op, "it lies in memory that cannot be written to", a=a)
        root.flags |= WRITTEN
        return root


class Graph:
    """The nodes that lead to some tensors of one context, in the order in which they are computed (`ggml_cgraph`)."""

    def __init__(self, ctx: ContextBase, size: int | None = None) -> None:
        """Make an empty graph with room for `size` nodes and as many leaves; by default for all the context has."""
        ctx._open()
        self.size = 2 * ctx._capacity + 1024 if size is None else size
        if not 0 < self.size <= 4 * MAX_TENSORS:
            raise GraphError(f"a graph holds 1 to {4 * MAX_TENSORS} nodes, not {self.size}")
        self.ctx = ctx
        holder, _, memory = _metadata_context(C.ggml_graph_overhead_custom(self.size, False) + 64)
        self.ptr = C.ggml_new_graph_custom(holder, self.size, False)
        self._life = Lifetime(holder, memory)

    def expand(self, tensor: Tensor) -> Tensor:
        """Add what `tensor` is computed from, then itself (`ggml_build_forward_expand`); return it."""
        self.ctx._mine("expand", tensor)
        needed = self.ctx.n_tensors + len(self.ctx._foreign)
        if needed > self.size:
            raise GraphError(f"expand: a graph of {self.size} nodes may not hold the {needed} tensors of its context")
        if tensor.flags & LEAF and tensor.root is None and tensor.buffer is None:
            C.ggml_set_input(tensor.ptr)  # a leaf that no node uses gets memory as an input only
        if not C.ggufpy_expand(self.ptr, tensor.ptr):
            raise MemoryError
        return tensor

    def _allocatable(self, n_nodes: int) -> None:
        """Check that a scheduler for `n_nodes` nodes and as many leaves can take the graph."""
        ctx = self.ctx
        ctx._open()
        if ctx._scheduler is not None:
            raise GraphError("a graph of this context was allocated before: build it again in a new context")
        if not len(self):
            raise GraphError("the graph has no nodes")
        n_leaves = ctx._n_leaves + len(ctx._foreign)
        if len(self) + n_leaves > n_nodes:
            raise GraphError(f"{len(self)} nodes and {n_leaves} leaves do not fit a scheduler for {n_nodes}")
        holes = C.ggufpy_graph_max_holes(self.ptr, ctx._memory, ctx.n_tensors)
        if not 0 <= holes <= MAX_HOLES:
            raise GraphError(
                f"the graph keeps too many tensors at once ({holes} gaps between them): have fewer outputs, or expand "
                "each tensor shortly before its use"
            )

    def _freeze(self, scheduler: Scheduler, generation: int) -> dict[Any, int]:
        """Take no more nodes; return the row numbers to look at before each compute."""
        self.ctx._freeze(scheduler, generation)
        return self.ctx._indices

    def __len__(self) -> int:
        return int(C.ggml_graph_n_nodes(self.ptr))

    @property
    def names(self) -> list[str]:
        """List the names of the nodes in order."""
        return [text_of(C.ggml_graph_node(self.ptr, i).name) for i in range(len(self))]

    @property
    def ops(self) -> list[str]:
        """List the operations of the nodes in order (`ggml_op_desc`)."""
        return [text_of(C.ggml_op_desc(C.ggml_graph_node(self.ptr, i))) for i in range(len(self))]
