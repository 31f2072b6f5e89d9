"""The operations of recurrent models compute what the recurrences say, step by step in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggufpy.backend import Backend, Scheduler, cpu_device
from ggufpy.errors import GraphError
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Tensor

F32, I32 = GGMLType.F32, GGMLType.I32
Array = np.ndarray[Any, Any]
S, H, T, N = 16, 2, 6, 2  # of a head, heads, tokens, sequences


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.5


def evaluate(build: Callable[..., Tensor], *inputs: Array) -> Array:
    """Compute what `build(ctx, *tensors)` makes of f32 and i32 arrays."""
    ctx = Context(32)
    tensors = [ctx.input(F32 if a.dtype == np.float32 else I32, *a.shape[::-1]) for a in inputs]
    result = ctx.output(build(ctx, *tensors))
    graph = ctx.new_graph()
    graph.expand(result)
    scheduler = Scheduler([Backend(cpu_device())], 64)
    scheduler.alloc(graph)
    for tensor, array in zip(tensors, inputs, strict=True):
        tensor.set(array)
    assert scheduler.compute(graph)
    return result.get()


def check(found: Array, outputs: Array, states: Array) -> None:
    """Compare with the outputs, followed by the states, in one piece of memory."""
    np.testing.assert_allclose(found.reshape(-1), np.concatenate((outputs.reshape(-1), states.reshape(-1))),
                               rtol=1e-4, atol=1e-4)  # fmt: skip


def recur(step: Callable[[Array, int, int, int], tuple[Array, Array]], state: Array) -> tuple[Array, Array]:
    """Run `step(state of a head, sequence, token, head) → (output, state)` over all of them."""
    outputs, state = np.empty((T, H, state.shape[-1]), np.float32), state.copy()
    for n in range(N):
        for t in range(n * T // N, (n + 1) * T // N):
            for h in range(H):
                outputs[t, h], state[n, h] = step(state[n, h], n, t, h)
    return outputs, state


def test_rwkv6() -> None:
    """out = r · (tf ∘ kv + S), S ← diag(td) S + kv."""
    k, v, r, td = (values(T, H, S, seed=i) for i in range(4))
    tf, state = values(H, S, seed=4), values(N, H, S, S, seed=5)

    def step(s: Array, n: int, t: int, h: int) -> tuple[Array, Array]:
        kv = np.outer(k[t, h], v[t, h])
        return r[t, h] @ (tf[h][:, None] * kv + s), s * td[t, h][:, None] + kv

    found = evaluate(lambda c, *x: c.rwkv_wkv6(*x), k, v, r, tf, td, state.reshape(N, -1))
    check(found, *recur(step, state))


def test_rwkv7() -> None:
    """S ← S diag(w) + v kᵀ + (S a) bᵀ, out = S r."""
    r, w, k, v, a, b = (values(T, H, 64, seed=i) * 0.3 for i in range(6))
    state = values(N, H, 64, 64, seed=6)

    def step(s: Array, n: int, t: int, h: int) -> tuple[Array, Array]:
        s = s * w[t, h] + np.outer(v[t, h], k[t, h]) + np.outer(s @ a[t, h], b[t, h])
        return s @ r[t, h], s

    found = evaluate(lambda c, *x: c.rwkv_wkv7(*x), r, w, k, v, a, b, state.reshape(N, -1))
    check(found, *recur(step, state))


def test_gated_linear_attention() -> None:
    """S ← diag(g) S + k vᵀ, out = scale · qᵀ S."""
    k, v, q, g = (values(T, H, S, seed=i) for i in range(4))
    state = values(N, H, S, S, seed=4)

    def step(s: Array, n: int, t: int, h: int) -> tuple[Array, Array]:
        s = s * g[t, h][:, None] + np.outer(k[t, h], v[t, h])
        return 0.3 * q[t, h] @ s, s

    found = evaluate(lambda c, *x: c.gated_linear_attn(*x, 0.3), k, v, q, g, state.reshape(N, -1))
    check(found, *recur(step, state))


@pytest.mark.parametrize("per_element", [False, True])
def test_gated_delta_rule(per_element: bool) -> None:
    """S ← S e^g, S ← S + β (v − S k) kᵀ, out = S q / √d; one head of q and k serves all heads of v."""
    q, k = values(N, T, 1, S), values(N, T, 1, S, seed=1)
    v, g = values(N, T, H, S, seed=2), values(N, T, H, S if per_element else 1, seed=3)
    beta, state = values(N, T, H, 1, seed=4), values(N, H, S, S, seed=5)
    outputs, s = np.empty((N, T, H, S)), state.copy()
    for n, t, h in np.ndindex(N, T, H):
        m = s[n, h] * np.exp(g[n, t, h])
        m = m + np.outer((v[n, t, h] - m @ k[n, t, 0]) * beta[n, t, h], k[n, t, 0])
        outputs[n, t, h], s[n, h] = m @ q[n, t, 0] / np.sqrt(S), m
    check(evaluate(lambda c, *x: c.gated_delta_net(*x), q, k, v, g, beta, state), outputs, s)


@pytest.mark.parametrize("scalar", [False, True])
def test_selective_state_space(scalar: bool) -> None:
    """S ← e^(Δ A) S + Δ x Bᵀ, out = S C, with Δ = softplus(dt); each sequence starts from the row it names."""
    d_state, groups, rows = 8, 1, 3
    s, x, dt = values(rows, H, S, d_state), values(N, T, H, S, seed=1), values(N, T, H, seed=2)
    a = -np.abs(values(H, 1 if scalar else d_state, seed=3))
    b, c = values(N, T, groups, d_state, seed=4), values(N, T, groups, d_state, seed=5)
    ids = np.array([2, 0], np.int32)
    outputs, states = np.empty((N, T, H, S)), s[ids].copy()
    for n, t, h in np.ndindex(N, T, H):
        delta = np.log1p(np.exp(dt[n, t, h]))
        states[n, h] = states[n, h] * np.exp(delta * a[h]) + delta * np.outer(x[n, t, h], b[n, t, 0])
        outputs[n, t, h] = states[n, h] @ c[n, t, 0]
    check(evaluate(lambda g, *u: g.ssm_scan(*u), s, x, dt, a, b, c, ids), outputs, states)


def test_state_rows_are_looked_at() -> None:
    """A sequence cannot start from a row that is not there."""
    with pytest.raises(GraphError, match="row number 3, the rows are 0 to 2"):
        evaluate(
            lambda g, *u: g.ssm_scan(*u),
            values(3, H, S, 8), values(N, T, H, S), values(N, T, H), values(H, 1), values(N, T, 1, 8),
            values(N, T, 1, 8), np.array([0, 3], np.int32),
        )  # fmt: skip


def test_convolution() -> None:
    """Each channel is convolved with its own kernel."""
    x, kernel = values(N, 5, T + 3), values(5, 4, seed=1)
    expected = np.stack([(x[:, :, t : t + 4] * kernel).sum(-1) for t in range(T)], 1)
    np.testing.assert_allclose(evaluate(lambda c, s, k: c.ssm_conv(s, k), x, kernel), expected, rtol=1e-5, atol=1e-6)


def test_triangles() -> None:
    """Triangles are cut out, and systems of equations with them solved."""
    x = values(2, 5, 5)
    for type, expected in enumerate((np.triu(x), np.triu(x, 1), np.tril(x), np.tril(x, -1))):
        np.testing.assert_array_equal(evaluate(lambda c, t, type=type: c.tri(t, type), x), expected)
    a, b = np.tril(x) + 3 * np.eye(5, dtype=np.float32), values(2, 5, 3, seed=1)
    np.testing.assert_allclose(evaluate(lambda c, s, t: c.solve_tri(s, t), a, b), np.linalg.solve(a, b), rtol=1e-4)


MISUSES: dict[str, Callable[[Context], Any]] = {
    "ssm_conv: short": lambda c: c.ssm_conv(c.input(F32, 3, 5, 1), c.input(F32, 4, 5)),
    "ssm_conv: channels": lambda c: c.ssm_conv(c.input(F32, 9, 5, 1), c.input(F32, 4, 6)),
    # ggml takes these for contiguous, as there is one element or row only; its kernels rely on the strides even so.
    "ssm_scan: one state, far from the next": lambda c: c.ssm_scan(
        c.view_4d(c.input(F32, 8, 64), 8, S, H, 1, 32, 32 * S, 64, 0), *[c.input(F32, *ne) for ne in
        ((S, H, T, N), (H, T, N), (1, H), (8, 1, T, N), (8, 1, T, N))], c.input(I32, N)),
    "ssm_conv: one step, permuted": lambda c: c.ssm_conv(c.permute(c.input(F32, 5, 1, 2), 1, 0, 2, 3),
                                                         c.input(F32, 1, 5)),
    "ssm_conv: one channel, in longer rows": lambda c: c.ssm_conv(c.view_3d(c.input(F32, 9, 1, 1), 6, 1, 1, 36, 36, 0),
                                                                  c.input(F32, 4, 1)),
    "rwkv_wkv6: sequences": lambda c: c.rwkv_wkv6(*[c.input(F32, S, H, 5)] * 3, c.input(F32, S, H),
                                                  c.input(F32, S, H, 5), c.input(F32, S * S * H, 2)),
    "rwkv_wkv6: tf": lambda c: c.rwkv_wkv6(*[c.input(F32, S, H, 4)] * 3, c.input(F32, S, 1), c.input(F32, S, H, 4),
                                           c.input(F32, S * S * H, 2)),
    "rwkv_wkv7: shapes": lambda c: c.rwkv_wkv7(*[c.input(F32, S, H, 4)] * 5, c.input(F32, S, H, 3),
                                               c.input(F32, S * S * H, 2)),
    "rwkv_wkv7: small heads": lambda c: c.rwkv_wkv7(*[c.input(F32, 32, H, 4)] * 6, c.input(F32, 32 * 32 * H, 2)),
    "gated_linear_attn: state": lambda c: c.gated_linear_attn(*[c.input(F32, S, H, 4)] * 4, c.input(F32, S, S, H), 1),
    "gated_linear_attn: half": lambda c: c.gated_linear_attn(*[c.input(GGMLType.F16, S, H, 4)] * 4,
                                                             c.input(F32, S * S * H, 2), 1),
    "solve_tri: upper": lambda c: c.solve_tri(c.input(F32, 4, 4), c.input(F32, 2, 4), lower=False),
    "solve_tri: shapes": lambda c: c.solve_tri(c.input(F32, 4, 4), c.input(F32, 2, 5)),
    "tri: not square": lambda c: c.tri(c.input(F32, 4, 5), 0),
    "tri: type": lambda c: c.tri(c.input(F32, 4, 4), 4),
}  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused(misuse: str) -> None:
    """Operands that do not fit are refused before ggml sees them."""
    with pytest.raises(GraphError, match=misuse.split(":")[0]):
        MISUSES[misuse](Context(32))


@pytest.mark.parametrize("wrong", range(7))
def test_operands_of_scan_and_delta_rule(wrong: int) -> None:
    """Whichever operand has another shape, the others show it."""
    c = Context(32)
    shapes = [(8, S, H, 3), (S, H, T, N), (H, T, N), (1, H), (8, 1, T, N), (8, 1, T, N), (N,)]
    operands = [c.input(F32 if i < 6 else I32, *ne) for i, ne in enumerate(shapes)]
    c.ssm_scan(*operands)
    operands[wrong] = c.input(operands[wrong].type, *shapes[wrong][:-1], shapes[wrong][-1] + 1)
    if wrong != 0:  # the state may have more rows than sequences
        with pytest.raises(GraphError, match="ssm_scan: these shapes"):
            c.ssm_scan(*operands)
    shapes = [(S, 1, T, N), (S, 1, T, N), (S, H, T, N), (1, H, T, N), (1, H, T, N), (S, S, H, N)]
    operands = [c.input(F32, *ne) for ne in shapes]
    c.gated_delta_net(*operands)
    with pytest.raises(GraphError, match="K = 0"):
        c.gated_delta_net(*operands, 0)
    operands[wrong % 6] = c.input(F32, *shapes[wrong % 6][:2], shapes[wrong % 6][2] + 1, N)
    with pytest.raises(GraphError, match="gated_delta_net: these shapes"):
        c.gated_delta_net(*operands)
