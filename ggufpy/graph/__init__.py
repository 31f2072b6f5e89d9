"""A thin layer over ggml's graph building: `Context`, `Tensor`, `Graph`, and one method per ggml operation.

It owns tensors' metadata and the checks before C. It does not own memory or devices (`backend`), nor know any model
(`arch`).

Names, argument order and results are ggml's: `ctx.mul_mat(a, b)` is `ggml_mul_mat`. Shapes, strides and axes are in
ggml's order everywhere in this package, innermost first: `[n_embd, n_tokens]`. Only `Tensor.set`, `.get` and
`.numpy_view` speak NumPy's order.

ggml answers a mistake with `abort()`, which no caller survives. None of its assertions can be reached from here,
because:

- each method repeats, before the call, what the ggml function asserts, *and* what the kernels of the CPU backend
  assert or silently rely on when they run (types, contiguous rows, sizes). Where a device can do more, the CPU's rule
  still holds, since any operation may fall back to the CPU. What fails is a `GraphError` that shows the operands'
  names, types and shapes;
- sizes are kept so small (`MAX_ELEMENTS`, `MAX_TENSORS`) that no product or sum of them wraps; empty tensors are
  refused;
- a context counts its tensors, and a graph is large enough for all of them;
- row numbers (`get_rows`, `set_rows`, `mul_mat_id`, `add_id`, `ssm_scan`) must come from `argsort`, `argmax` or
  `top_k`, whose range is known, or from a leaf: then `Scheduler.compute` looks at the values right before it hands
  the graph to ggml, whoever wrote them. No operation may write to such a leaf;
- a context keeps alive what its tensors point to, takes from other contexts only leaves bound to a buffer, and
  accepts no further operation once its graph is allocated. Data is read and written only while it has memory;
- `Scheduler.alloc` asks the backends whether they support each node where its data lies, bounds what ggml's allocator
  has to keep track of, and takes a graph once.

Left to the caller: NaN among values to sort (the CPU's argsort is undefined then, as in llama.cpp).
"""

from __future__ import annotations

from ggufpy.graph.context import Graph
from ggufpy.graph.inputs import NO_LIMIT, Inputs, mask_writer
from ggufpy.graph.ops import Operations
from ggufpy.graph.recurrent import RecurrentOperations
from ggufpy.graph.tensor import MAX_ELEMENTS, MAX_TENSORS, Tensor

__all__ = ["MAX_ELEMENTS", "MAX_TENSORS", "NO_LIMIT", "Context", "Graph", "Inputs", "Tensor", "mask_writer"]


class Context(Operations, RecurrentOperations):
    """The metadata of up to `n_tensors` tensors (a `ggml_context` without data), and the operations that make them.

    Not thread-safe. A context manager; `close` may be called twice. Memory that other contexts or arrays still use
    lives on.
    """
