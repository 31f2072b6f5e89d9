"""Builds and computes random graphs, most of them wrong, through the public API: `python graph_fuzz.py SEED COUNT`.

Run in a process of its own: what it looks for is a killed process. Prints how much was refused, built and computed.
"""

from __future__ import annotations

import inspect
import random
import sys
from typing import Any

import numpy as np

from ggufpy.backend import Backend, Buffer, Scheduler, cpu_device, extra_buffer_types
from ggufpy.errors import GgufpyError
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Tensor

SIZES = (1, 1, 2, 3, 4, 6, 8, 16, 32, 64, 96, 256, 512)
PLAIN = (
    [GGMLType.F32] * 8
    + [GGMLType.F16] * 2
    + [GGMLType.I32] * 3
    + [GGMLType.I64, GGMLType.BF16, GGMLType.I8, GGMLType.F64]
)
SKIPPED = {"close", "input", "new_tensor", "new_graph", "output"}
OPS = {
    name: inspect.signature(method)
    for name, method in inspect.getmembers(Context, inspect.isfunction)
    if not name.startswith("_") and name not in SKIPPED
}


class Fuzzer:
    """One random graph after another, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values = np.random.default_rng(seed)
        self.device = cpu_device()
        self.backend = Backend(self.device)
        self.counts = dict.fromkeys(("refused", "built", "alloc refused", "compute refused", "computed"), 0)
        self.by_op = {name: [0, 0] for name in OPS}

    def shape(self, pool: list[Tensor]) -> list[int]:
        r = self.random
        if pool and r.random() < 0.6:
            ne = list(r.choice(pool).ne)
            r.shuffle(ne)
            if r.random() < 0.5:
                ne[r.randrange(4)] = r.choice(SIZES)
            if r.random() < 0.3:
                ne[2] = ne[3] = 1
        else:
            ne = [r.choice(SIZES) for _ in range(r.randint(1, 4))]
        return ne if np.prod(ne) <= 2**16 else ne[:2]

    def leaf(self, ctx: Context, pool: list[Tensor]) -> Tensor:
        r = self.random
        kind = r.choice(PLAIN) if r.random() < 0.85 else r.choice(list(GGMLType))
        ne = self.shape(pool)
        if kind in (GGMLType.I32, GGMLType.I64) and r.random() < 0.7:
            ne = [r.choice(ne)]
        if kind.is_quantized and r.random() < 0.9:
            ne[0] = kind.block_size * r.randint(1, 2)
        return ctx.input(kind, *ne) if r.random() < 0.7 else ctx.new_tensor(kind, *ne)

    def integer(self, name: str, tensors: list[Tensor]) -> int:
        r = self.random
        if r.random() < 0.08:
            return r.choice((-1, 2**31, 2**40, -(2**63), 2**63, 2**70))
        t = r.choice(tensors)
        if name.startswith("nb"):
            return r.choice((*t.nb, t.nb[0] * r.choice(SIZES), 0))
        if name == "offset":
            return r.choice((0, 0, *t.nb, t.nb[0] * r.choice(SIZES), 1))
        if name.startswith("axis"):
            return r.randrange(4)
        if name.startswith("ne"):
            return r.choice((*t.ne, 1, r.choice(SIZES), t.n_elements))
        if name in ("mode", "order", "dim", "hint", "prec"):
            return r.choice((0, 1, 2, 3, 8, 10, 24, 40))
        return r.choice((0, 1, 2, 3, 4, *t.ne))

    def argument(self, name: str, annotation: str, pool: list[Tensor], so_far: list[Any]) -> Any:
        r = self.random
        if annotation.startswith("Tensor"):
            if "None" in annotation and r.random() < 0.3:
                return None
            likely = [t for t in pool if so_far and isinstance(so_far[0], Tensor) and t.ne[0] == so_far[0].ne[0]]
            if name in ("ids", "b", "c") and r.random() < 0.3:
                likely = [t for t in pool if t.type in (GGMLType.I32, GGMLType.I64)]
            return r.choice(likely) if likely and r.random() < 0.7 else r.choice(pool)
        if annotation == "float":
            return r.choice(
                (0.0, 1.0, -1.0, 1e-5, 10000.0, 1e30, 1e300, float("inf"), float("-inf"), float("nan"), 0.5)
            )
        if annotation == "Sequence[int]":
            return [r.choice((0, 1, 2, 4, -1)) for _ in range(r.choice((4, 4, 4, 3)))]
        if "GGMLType" in annotation:
            return r.choice([*GGMLType, -1, 4, 99])
        return self.integer(name, [t for t in so_far if isinstance(t, Tensor)] or pool)

    # Operations whose operands rarely fit by chance get operands made for them; now and then one size is off.

    def dims(self, *choices: tuple[int, ...]) -> list[int]:
        return [self.random.choice(values) for values in choices]

    def make(self, ctx: Context, kind: GGMLType, *ne: int) -> Tensor:
        sizes = list(ne)
        if self.random.random() < 0.05:
            sizes[self.random.randrange(len(sizes))] = self.random.choice(SIZES)
        t = ctx.input(kind, *sizes)
        if self.random.random() < 0.2 and len(sizes) > 1:  # the same shape, but with gaps between rows
            t = ctx.input(kind, sizes[0] * 2, *sizes[1:])
            t = ctx.view_4d(t, *([*sizes, 1, 1, 1][:4]), *t.nb[1:], self.random.choice((0, t.nb[1] // 2)))
        return t

    def weight(self) -> GGMLType:
        return self.random.choice([GGMLType.F32, GGMLType.F16, GGMLType.BF16, *GGMLType])

    def recipe(self, ctx: Context) -> tuple[str, list[Any]]:
        r, f32, i32 = self.random, GGMLType.F32, GGMLType.I32
        name = r.choice(("get_rows", "set_rows", "mul_mat_id", "add_id", "rope_ext", "rope_multi", "flash_attn_ext",
                         "soft_max_ext", "mul_mat", "hadamard", "sinks", "cpy", "top", "permute", "recurrent",
                         "recurrent"))  # fmt: skip
        n, rows, k, x, y = self.dims((2, 8, 32, 64, 256), (1, 3, 8, 64), (1, 2, 5, 9), (1, 2, 4), (1, 2))
        if name == "get_rows":
            return name, [self.make(ctx, self.weight(), n, rows, x, y), self.make(ctx, i32, k, x, y)]
        if name == "set_rows":
            source, index = r.choice((f32, f32, GGMLType.F16)), r.choice((GGMLType.I64, i32))
            a, b = self.make(ctx, self.weight(), n, rows, x, y), self.make(ctx, source, n, k, x, y)
            return name, [a, b, self.make(ctx, index, k, r.choice((1, x)), y)]
        if name == "mul_mat_id":
            return name, [
                self.make(ctx, self.weight(), n, rows, x),
                self.make(ctx, f32, n, r.choice((1, k)), rows),
                self.make(ctx, i32, k, rows),
            ]
        if name == "add_id":
            return name, [self.make(ctx, f32, n, k, x), self.make(ctx, f32, n, rows), self.make(ctx, i32, k, x)]
        if name.startswith("rope"):
            kind, planes = r.choice((f32, f32, GGMLType.F16)), 4 if name == "rope_multi" else 1
            n_dims = r.choice((n, n // 2, 2, 3, 0))
            factors = None if r.random() < 0.5 else self.make(ctx, f32, max(1, n // 2))
            yarn = [r.choice((0, 4096, -1)), 10000.0, r.choice((1.0, 0.25)), r.choice((0.0, 1.0)), 1.0, 32.0, 1.0]
            head = [self.make(ctx, kind, n, k, rows, y), self.make(ctx, i32, rows * planes), factors, n_dims]
            if planes == 1:
                return name, [*head, r.choice((0, 2, 8)), *yarn]
            return name, [*head, [r.choice((0, 1, n // 8, 4)) for _ in range(4)], r.choice((8, 40, 24, 0)), *yarn]
        if name == "flash_attn_ext":
            kinds, heads, n_kv = self.weight(), r.choice((1, 2)), r.choice((1, 5, 32, 256, 600))
            kind_v = kinds if r.random() < 0.7 else self.weight()
            n_q = r.choice((1, 1, 3, 70))
            q, key = self.make(ctx, f32, n, n_q, x * heads, y), self.make(ctx, kinds, n, n_kv, x, y)
            mask = (
                None
                if r.random() < 0.3
                else self.make(ctx, GGMLType.F16, n_kv, n_q, r.choice((1, x)), r.choice((1, y)))
            )
            return name, [
                q,
                key,
                self.make(ctx, kind_v, r.choice((n, 32, 64)), n_kv, x, y),
                mask,
                0.1,
                r.choice((0.0, 8.0)),
                r.choice((0.0, 50.0)),
            ]
        if name in ("soft_max_ext", "sinks"):
            mask = (
                None
                if r.random() < 0.3
                else self.make(ctx, r.choice((f32, GGMLType.F16)), n, rows, r.choice((1, x)), r.choice((1, y)))
            )
            arguments = [self.make(ctx, f32, n, rows, x, y), mask, 0.1, r.choice((0.0, 8.0))]
            if name == "soft_max_ext":
                return name, arguments
            return "soft_max_add_sinks", [ctx.soft_max_ext(*arguments), self.make(ctx, f32, x)]
        if name == "hadamard":
            product = ctx.mul_mat(self.make(ctx, f32, n, n), self.make(ctx, r.choice((f32, GGMLType.F16)), n, rows, x))
            return "mul_mat_set_hint", [product, 1]
        if name == "cpy":
            shape = [n, rows, x, y]
            a = self.make(ctx, self.weight(), *shape)
            r.shuffle(shape)
            return name, [a, self.make(ctx, self.weight(), *(shape if r.random() < 0.5 else a.ne))]
        if name == "recurrent":
            return self.recurrent(ctx)
        if name == "permute":
            axes = [0, 1, 2, 3]
            r.shuffle(axes)
            return name, [self.make(ctx, self.weight(), n, rows, x, y), *axes]
        if name == "top":
            scores = self.make(ctx, f32, rows, k)
            ids = ctx.argsort_top_k(scores, min(rows, 2))
            return "mul_mat_id", [self.make(ctx, self.weight(), n, k, rows), self.make(ctx, f32, n, 1, k), ids]
        return name, [
            self.make(ctx, self.weight(), n, rows, x, y),
            self.make(ctx, r.choice((f32, f32, GGMLType.F16, GGMLType.BF16)), n, k, x * 2, y),
        ]

    def recurrent(self, ctx: Context) -> tuple[str, list[Any]]:
        r, f32 = self.random, GGMLType.F32
        name = r.choice(("ssm_conv", "ssm_scan", "rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn", "gated_delta_net"))
        s, h, t, n = self.dims((8, 16, 64), (1, 2, 3), (1, 4, 6), (1, 2))
        states = r.choice((1, 1, 3))
        if name == "ssm_conv":
            return name, [self.make(ctx, f32, t + 3, s, n), self.make(ctx, f32, 4, s)]
        if name == "ssm_scan":
            g, a = r.choice((1, h)), r.choice((1, s))
            x, dt = self.make(ctx, f32, 4, h, t, n), self.make(ctx, f32, h, t, n)
            b, c, ids = self.make(ctx, f32, s, g, t, n), self.make(ctx, f32, s, g, t, n), ctx.input(GGMLType.I32, n)
            return name, [self.make(ctx, f32, s, 4, h, 2), x, dt, self.make(ctx, f32, a, h), b, c, ids, states]
        if name == "gated_delta_net":
            q, k = self.make(ctx, f32, s, 1, t, n), self.make(ctx, f32, s, h, t, 1)
            v, g = self.make(ctx, f32, s, h, t, n), self.make(ctx, f32, r.choice((1, s)), h, t, n)
            return name, [q, k, v, g, self.make(ctx, f32, 1, h, t, n), self.make(ctx, f32, s, s, h, n), states]
        heads = [self.make(ctx, f32, s, h, t) for _ in range(6)]
        state = self.make(ctx, f32, s * s * h, n)
        if name == "rwkv_wkv7":
            return name, [*heads, state]
        if name == "rwkv_wkv6":
            return name, [*heads[:3], self.make(ctx, f32, s, h), heads[3], state]
        return name, [*heads[:4], state, 0.5]

    def fill(self, tensor: Tensor) -> None:
        r = self.random
        dtype, shape = tensor._numpy()
        if tensor.type in (GGMLType.I32, GGMLType.I64):
            high = r.choice((1, 2, 2, 4, 600))
            tensor.set(self.values.integers(-1 if r.random() < 0.1 else 0, high, shape).astype(dtype))
        elif dtype.kind == "f":
            tensor.set(self.values.standard_normal(shape).astype(dtype))
        else:  # raw bits, but no NaN as a block's scale
            tensor.set((self.values.integers(0, 60, shape)).astype(dtype))

    def place(self, tensors: list[Tensor]) -> None:
        kinds = [self.device.buffer_type] * 3 + extra_buffer_types(self.device)
        for tensor in tensors:
            try:
                Buffer.for_tensors(self.random.choice(kinds), [tensor])
                self.fill(tensor)
            except GgufpyError:
                self.counts["refused"] += 1

    def once(self) -> None:
        r = self.random
        other, ctx = Context(4), Context(r.choice((8, 99, 99)))
        pool = [self.leaf_or_none(other, []) for _ in range(3)]
        pool = [t for t in pool if t is not None]
        self.place(pool if r.random() < 0.8 else pool[:1])
        for _ in range(r.randint(2, 6)):
            leaf = self.leaf_or_none(ctx, pool)
            pool += [leaf] if leaf is not None else []
        if not pool:
            return
        leaves = [t for t in pool if t.ctx is ctx]
        made = []
        for _ in range(r.randint(5, 30)):
            name = r.choice(list(OPS))
            arguments: list[Any] = []
            if r.random() < 0.25:
                try:
                    name, arguments = self.recipe(ctx)
                    used = [t for t in arguments if isinstance(t, Tensor)]
                    leaves += [t.root or t for t in used]
                    pool += used
                except GgufpyError:
                    continue
            else:
                for parameter in list(OPS[name].parameters.values())[1:]:
                    arguments.append(self.argument(parameter.name, str(parameter.annotation), pool, arguments))
            try:
                result = getattr(ctx, name)(*arguments)
            except GgufpyError:
                self.counts["refused"] += 1
                self.by_op[name][0] += 1
                continue
            except OverflowError:  # Python's own, for numbers that no C type holds
                continue
            self.counts["built"] += 1
            self.by_op[name][1] += 1
            if isinstance(result, Tensor) and result.n_elements < 2**18:  # larger ones would only take time
                pool.append(result)
                made.append(result)
        self.compute(ctx, leaves, made)

    def leaf_or_none(self, ctx: Context, pool: list[Tensor]) -> Tensor | None:
        try:
            return self.leaf(ctx, pool)
        except GgufpyError:
            self.counts["refused"] += 1
            return None

    def compute(self, ctx: Context, leaves: list[Tensor], made: list[Tensor]) -> None:
        r = self.random
        if not made:
            return
        graph = ctx.new_graph()
        for tensor in r.sample(made, r.randint(1, len(made))):
            graph.expand(tensor)
        outputs = [ctx.output(tensor) for tensor in made if r.random() < 0.5]
        scheduler = Scheduler([self.backend], 200)
        self.backend.set_n_threads(r.choice((1, 1, 2)))
        self.backend.set_use_ref(r.random() < 0.1)
        try:
            scheduler.alloc(graph)
        except GgufpyError:
            self.counts["alloc refused"] += 1
            return
        for leaf in leaves:
            try:
                if r.random() < 0.95:
                    self.fill(leaf)
            except GgufpyError:
                pass  # not in the graph
        try:
            scheduler.compute(graph)
        except GgufpyError:
            self.counts["compute refused"] += 1
            return
        self.counts["computed"] += 1
        for tensor in outputs:
            try:
                tensor.get()
                tensor.numpy_view()
            except GgufpyError:
                pass


def main() -> None:
    """Run COUNT graphs from SEED on."""
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    verbose = len(sys.argv) > 3
    totals: dict[str, int] = {}
    by_op: dict[str, list[int]] = {name: [0, 0] for name in OPS}
    for i in range(seed, seed + count):
        if verbose:
            print(i, flush=True)
        fuzzer = Fuzzer(i)
        fuzzer.once()
        for key, n in fuzzer.counts.items():
            totals[key] = totals.get(key, 0) + n
        for name, (refused, built) in fuzzer.by_op.items():
            by_op[name][0] += refused
            by_op[name][1] += built
    print(totals)
    if verbose:
        print(by_op)
    else:
        print("never built:", [name for name, (_, built) in by_op.items() if not built])


if __name__ == "__main__":
    main()
