"""Operations compute what NumPy computes; whatever ggml would abort on is refused before; memory outlives its users.

Shapes passed to ggufpy are in ggml's order, arrays in NumPy's: a tensor [4, 3] is an array (3, 4).
"""

from __future__ import annotations

import gc
import math
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufpy._ffi.lib import C
from ggufpy.backend import Backend, Buffer, Scheduler, cpu_device
from ggufpy.errors import ClosedError, GgufpyError, GraphError
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Tensor
from ggufpy.graph.ops import CAN_GET_ROWS, CAN_MULTIPLY, CAN_STORE
from ggufpy.types import NUMPY_TYPES, dequantize, needs_imatrix, quantize

F32, F16, BF16, I32, I64 = GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.I32, GGMLType.I64
Array = np.ndarray[Any, Any]
BACKEND = Backend(cpu_device())
SLOW = {GGMLType.IQ1_S, GGMLType.IQ1_M, GGMLType.IQ2_S, GGMLType.IQ2_XS}  # seconds to quantize the first time


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kind_of(array: Array) -> GGMLType:
    return next(kind for kind, dtype in NUMPY_TYPES.items() if dtype == array.dtype)


def bf16(array: Array) -> Array:
    return quantize(array, BF16).view(np.uint16)


def widen(array: Array) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32)


def evaluate(build: Callable[..., Tensor], *inputs: Array) -> Array:
    """Compute what `build(ctx, *tensors)` makes of the inputs; each one is of the type of its array."""
    ctx = Context(64)
    tensors = [ctx.input(kind_of(array), *array.shape[::-1]) for array in inputs]
    result = ctx.output(build(ctx, *tensors))
    graph = ctx.new_graph()
    graph.expand(result)
    scheduler = Scheduler([BACKEND], 256)
    scheduler.alloc(graph)
    for tensor, array in zip(tensors, inputs, strict=True):
        tensor.set(array)
    assert scheduler.compute(graph)
    return result.get()


def close(found: Array, expected: Any, tolerance: float = 1e-5) -> None:
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# --- what operations compute ---

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_repeats_the_second_operand(op: str) -> None:
    """The second operand is repeated along every dimension."""
    a, b = values(2, 4, 6), values(1, 2, 3, seed=1) + 3
    close(evaluate(lambda c, x, y: getattr(c, op)(x, y), a, b), ARITHMETIC[op](a, np.tile(b, (2, 2, 2))))


@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_on_half_precision(op: str) -> None:
    """f16 and bf16 take an operand of their own type or f32, and keep their type."""
    a, b = values(3, 8), values(3, 8, seed=1) + 3
    expected = ARITHMETIC[op](a, b)
    for second in (b, b.astype(np.float16)):
        close(evaluate(lambda c, x, y: getattr(c, op)(x, y), a.astype(np.float16), second), expected, 1e-2)
    ctx = Context(8)
    assert getattr(ctx, op)(ctx.input(BF16, 8), ctx.input(F32, 8)).type is BF16


UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "neg": np.negative,
    "sqr": np.square,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "gelu_quick": lambda x: x / (1 + np.exp(-1.702 * x)),
}


@pytest.mark.parametrize("op", UNARY)
def test_functions_of_one_element(op: str) -> None:
    """Each is its formula; the CPU takes gelu from a table of f16 values."""
    x = np.abs(values(3, 5)) + 0.1 if op in ("sqrt", "log") else values(3, 5)
    close(evaluate(lambda c, t: getattr(c, op)(t), x), UNARY[op](x), 2e-3 if "gelu" in op else 1e-5)
    close(evaluate(lambda c, t: getattr(c, op)(t), x.astype(np.float16)), UNARY[op](x), 1e-2)


def test_xielu() -> None:
    """xIELU with its four parameters (arXiv:2411.13010, equation 6, as ggml parametrizes it)."""
    x, (an, ap, beta, eps) = values(2, 9), (0.3, 0.7, 0.5, -1e-6)
    alpha_p, alpha_n = np.log1p(np.exp(ap)), beta + np.log1p(np.exp(an))
    expected = np.where(x > 0, alpha_p * x * x + beta * x, (np.expm1(np.minimum(x, eps)) - x) * alpha_n + beta * x)
    close(evaluate(lambda c, t: c.xielu(t, an, ap, beta, eps), x), expected)


GATES = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu", "geglu_erf": "gelu_erf", "geglu_quick": "gelu_quick"}


@pytest.mark.parametrize("op", GATES)
def test_gates(op: str) -> None:
    """The first half, or the first operand, goes through the function and is multiplied with the other."""
    x = values(3, 12)
    a, b = x[:, :6].copy(), x[:, 6:].copy()
    expected = UNARY[GATES[op]](a) * b
    close(evaluate(lambda c, t: getattr(c, op)(t), x), expected, 2e-3)
    close(evaluate(lambda c, s, t: getattr(c, f"{op}_split")(s, t), a, b), expected, 2e-3)


def test_gates_with_limits() -> None:
    """gpt-oss' gate adds one to the clamped second operand; the other clamps both."""
    a, b = values(3, 6) * 4, values(3, 6, seed=1) * 4
    x, y = np.minimum(a, 3), np.clip(b, -3, 3)
    close(evaluate(lambda c, s, t: c.swiglu_oai(s, t, 1.5, 3), a, b), x / (1 + np.exp(-1.5 * x)) * (y + 1))
    close(evaluate(lambda c, s, t: c.swiglu_clamp(s, t, 3), a, b), np.minimum(UNARY["silu"](a), 3) * y, 0.35)


def test_norms() -> None:
    """Each row by its mean and variance, its root mean square, its length; groups of channels together."""
    x, eps = values(2, 4, 3, 8), 1e-5
    centred = x - x.mean(-1, keepdims=True)
    close(evaluate(lambda c, t: c.norm(t, eps), x), centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps))
    close(evaluate(lambda c, t: c.rms_norm(t, eps), x), x / np.sqrt((x**2).mean(-1, keepdims=True) + eps))
    close(evaluate(lambda c, t: c.l2_norm(t, eps), x), x / np.sqrt((x**2).sum(-1, keepdims=True)))
    groups = x.reshape(2, 2, -1)
    centred = groups - groups.mean(-1, keepdims=True)
    expected = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)).reshape(x.shape)
    close(evaluate(lambda c, t: c.group_norm(t, 2, eps), x[:1]), expected[0], 1e-4)


def test_norm_and_weight_in_one() -> None:
    """A norm followed by its weight, which ggml computes in one pass, is the product of both."""
    x, w = values(5, 8), values(8, seed=1)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w
    close(evaluate(lambda c, t, u: c.mul(c.rms_norm(t, 1e-6), u), x, w), expected)


def test_sums() -> None:
    """Sums and means run along rows; sum adds up everything."""
    x = values(2, 3, 7)
    close(evaluate(lambda c, t: c.sum_rows(t), x), x.sum(-1, keepdims=True))
    close(evaluate(lambda c, t: c.mean(t), x), x.mean(-1, keepdims=True))
    close(evaluate(lambda c, t: c.cumsum(t), x), x.cumsum(-1))
    close(evaluate(lambda c, t: c.sum(t), x), [x.sum()])


def test_scale_and_clamp() -> None:
    """Numbers scale, shift, fill and limit a tensor."""
    x = values(3, 7)
    close(evaluate(lambda c, t: c.scale(t, -2.5), x), x * -2.5)
    close(evaluate(lambda c, t: c.scale_bias(t, 2, 1), x), x * 2 + 1)
    close(evaluate(lambda c, t: c.clamp(t, -0.5, float("inf")), x), np.maximum(x, -0.5))
    close(evaluate(lambda c, t: c.fill(t, 4), x), np.full_like(x, 4))


MULTIPLY = [kind for kind in GGMLType if CAN_MULTIPLY[kind] and kind not in SLOW]


def weight(kind: GGMLType, *shape: int) -> tuple[Array, Array]:
    """Return random data of a type as `Tensor.set` takes it, and its values."""
    x = values(*shape, seed=int(kind))
    data = quantize(x, kind, np.ones(shape[-1]) if needs_imatrix(kind) else None)
    exact = dequantize(data, kind, shape)
    dtype = NUMPY_TYPES.get(kind)
    return (data if dtype is None else data.view(dtype).reshape(shape)), exact


def bound(kind: GGMLType, data: Array, *ne: int) -> Tensor:
    """Return a leaf with data, in a context and buffer of its own."""
    tensor = Context(1).new_tensor(kind, *ne, name="W")
    Buffer.for_tensors(cpu_device().buffer_type, [tensor])
    tensor.set(data)
    return tensor


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("kind", MULTIPLY, ids=lambda kind: kind.name)
def test_products_with_weights_of_every_type(kind: GGMLType, rows: int) -> None:
    """The product is that of the dequantized weight, up to the rounding of the other side to 8 bits."""
    data, exact = weight(kind, 8, 256)
    x = values(rows, 256, seed=1)
    found = evaluate(lambda c, t: c.mul_mat(bound(kind, data, 256, 8), t), x)
    close(found.reshape(rows, 8) / 16, x @ exact.T / 16, 3e-2)


def test_products_broadcast_the_weight() -> None:
    """Matrices of the weight serve several of the other side, in turn."""
    a, b = values(2, 5, 8), values(4, 3, 8, seed=1)
    expected = np.einsum("hnk,hmk->hmn", np.repeat(a, 2, 0), b)
    close(evaluate(lambda c, s, t: c.mul_mat(s, t), a, b), expected, 1e-4)


def test_precision_is_a_wish() -> None:
    """Products take wishes for their precision, which the CPU leaves aside."""

    def build(ctx: Context, s: Tensor, t: Tensor) -> Tensor:
        product = ctx.mul_mat(s, t)
        ctx.prec_set_acc(product, 10)
        ctx.prec_set_src(product, 30, 1)
        return product

    a, b = values(5, 8), values(3, 8, seed=1)
    close(evaluate(build, a, b), b @ a.T)


def test_products_by_chosen_matrices() -> None:
    """Each token is multiplied with the matrices it chose; shared or own rows."""
    experts, ids = values(4, 5, 8), np.array([[0, 3], [2, 2], [1, 0]], np.int32)
    for x in (values(3, 1, 8, seed=1), values(3, 2, 8, seed=2)):
        expected = np.einsum("tunk,tuk->tun", experts[ids], np.broadcast_to(x, (3, 2, 8)))
        close(evaluate(lambda c, e, t, i: c.mul_mat_id(e, t, i), experts, x, ids), expected, 1e-4)


def test_rows_added_by_number() -> None:
    """Each row gets the bias of the matrix it chose."""
    a, bias, ids = values(3, 2, 8), values(4, 8, seed=1), np.array([[0, 3], [2, 2], [1, 0]], np.int32)
    close(evaluate(lambda c, t, b, i: c.add_id(t, b, i), a, bias, ids), a + bias[ids])


def test_the_hadamard_hint_changes_nothing_but_the_way() -> None:
    """With the hint, ggml computes the product with a Hadamard matrix by a fast transform."""
    h = np.array([[1.0]], np.float32)
    while len(h) < 64:
        h = np.block([[h, h], [h, -h]]) / np.float32(np.sqrt(2))
    x = values(3, 64)

    def build(ctx: Context, left: Tensor, right: Tensor) -> Tensor:
        product = ctx.mul_mat(left, right)
        ctx.mul_mat_set_hint(product, 1)
        return product

    close(evaluate(build, h, x), x @ h)


@pytest.mark.parametrize("kind", [k for k in GGMLType if CAN_GET_ROWS[k] and k not in SLOW], ids=lambda k: k.name)
def test_rows_of_every_type_are_gathered_exactly(kind: GGMLType) -> None:
    """Gathered rows are the dequantized ones (i32 stays i32)."""
    data, exact = weight(kind, 5, 256) if kind is not I32 else 2 * (np.arange(20, dtype=np.int32).reshape(5, 4),)
    ids = np.array([3, 0, 4, 3], np.int32)
    found = evaluate(lambda c, i: c.get_rows(bound(kind, data, exact.shape[1], 5), i), ids)
    np.testing.assert_array_equal(found, exact[ids])


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("kind", [k for k in GGMLType if CAN_STORE[k]], ids=lambda k: k.name)
def test_rows_of_every_type_are_scattered(kind: GGMLType, index: Any) -> None:
    """Scattered rows are converted to the type; the other rows stay."""
    target = Context(1).new_tensor(kind, 256, 6, name="cache")
    Buffer.zeros(cpu_device(), [target])
    rows, ids = values(2, 256), np.array([4, 1], index)
    evaluate(lambda c, r, i: c.set_rows(target, r, i), rows, ids)
    stored = dequantize(target.get(), kind, (6, 256))
    assert not stored[[0, 2, 3, 5]].any()
    expected = dequantize(quantize(rows, kind), kind, (2, 256))
    assert np.sqrt(np.mean((stored[ids] - rows) ** 2)) < 1.2 * np.sqrt(np.mean((expected - rows) ** 2)) + 1e-7


def test_soft_max() -> None:
    """The mask is added before, ALiBi slopes fall by head, a sink takes its share."""
    x, mask, sinks = values(4, 3, 8), np.triu(np.full((3, 8), -np.inf, np.float32), 4), values(4, seed=2)

    def expected(slopes: Array, sinks: Array | None = None) -> Array:
        with np.errstate(invalid="ignore"):
            z = x * 0.5 + np.where(np.isinf(mask), mask, mask * slopes[:, None, None])
        e = np.exp(z)
        return e / (e.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None]))

    flat, slopes = np.ones(4), 2.0 ** -(8 * np.arange(1, 5) / 4)
    close(evaluate(lambda c, t: c.soft_max(t), x), np.exp(x) / np.exp(x).sum(-1, keepdims=True))
    for kind in (np.float32, np.float16):
        close(evaluate(lambda c, t, m: c.soft_max_ext(t, m, 0.5, 0), x, mask.astype(kind)), expected(flat))
    mask = np.where(np.isinf(mask), mask, values(3, 8, seed=1))
    close(evaluate(lambda c, t, m: c.soft_max_ext(t, m, 0.5, 8), x, mask), expected(slopes))

    def with_sinks(ctx: Context, t: Tensor, m: Tensor, s: Tensor) -> Tensor:
        result = ctx.soft_max_ext(t, m, 0.5, 0)
        ctx.soft_max_add_sinks(result, s)
        return result

    close(evaluate(with_sinks, x, mask, sinks), expected(flat, sinks))


@pytest.mark.parametrize("n_q", [1, 5, 70])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_flash_attention(n_q: int, softcap: float, kind: Any) -> None:
    """It is the softmax of the products, times the values: grouped heads, a mask, sinks, a soft cap."""
    d, e, n_kv, heads = 32, 16, 600 if n_q == 1 else 80, 4
    q, k, v = values(heads, n_q, d), values(2, n_kv, d, seed=1), values(2, n_kv, e, seed=2)
    mask = np.where(values(n_q, n_kv, seed=3) > 1, -np.inf, 0).astype(np.float16)
    sinks = values(heads, seed=4)

    def build(ctx: Context, q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Tensor:
        result = ctx.flash_attn_ext(q, k, v, m, 0.2, 0.0, softcap)
        ctx.flash_attn_ext_add_sinks(result, s)
        ctx.flash_attn_ext_set_n_kv_max(result, 0)
        ctx.prec_set_acc(result, 10)
        return result

    z = np.einsum("hqd,hkd->hqk", q, np.repeat(k, 2, 0)) * 0.2
    z = (softcap * np.tanh(z / softcap) if softcap else z) + mask
    p = np.exp(z)
    p /= p.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    expected = np.einsum("hqk,hke->qhe", p, np.repeat(v, 2, 0))
    found = evaluate(build, q, k.astype(kind), v.astype(kind), mask, sinks)
    close(found.reshape(expected.shape), expected, 5e-3)


def rotate(x: Array, positions: Array, n_dims: int, neox: bool, base: float, scale: float, factors: Array) -> Array:
    """Rotate (tokens, heads, dims) as RoFormer does."""
    angle = positions[:, None] * scale * base ** (-np.arange(0, n_dims, 2) / n_dims) / factors
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first = slice(0, n_dims // 2) if neox else slice(0, n_dims, 2)
    second = slice(n_dims // 2, n_dims) if neox else slice(1, n_dims, 2)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize("n_dims", [8, 6])
def test_rope(mode: int, n_dims: int) -> None:
    """Pairs turn by their angle; what lies beyond `n_dims` stays."""
    x, positions, factors = (
        values(5, 3, 8),
        np.array([0, 1, 7, 100, 3], np.int32),
        np.linspace(1, 2, 4, dtype=np.float32),
    )
    yarn = (0, 10000.0, 0.5, 0.0, 1.0, 32.0, 1.0)
    plain = rotate(x, positions, n_dims, mode == 2, 10000.0, 0.5, np.ones(n_dims // 2))
    close(evaluate(lambda c, t, p: c.rope_ext(t, p, None, n_dims, mode, *yarn), x, positions), plain, 1e-4)
    divided = rotate(x, positions, n_dims, mode == 2, 10000.0, 0.5, factors[: n_dims // 2])
    close(evaluate(lambda c, t, p, f: c.rope_ext(t, p, f, n_dims, mode, *yarn), x, positions, factors), divided, 1e-4)


def test_rope_from_an_offset() -> None:
    """What lies before the offset stays, too; rows and offset have to fit."""
    x, positions, yarn = values(5, 3, 8), np.array([0, 1, 7, 100, 3], np.int32), (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)

    def build(ctx: Context, t: Tensor, p: Tensor) -> Tensor:
        result = ctx.rope_ext(t, p, None, 4, 2, *yarn)
        for wrong in (-2, 1, 6):
            with pytest.raises(GraphError, match="room for the offset"):
                ctx.rope_set_offset(result, wrong)
        ctx.rope_set_offset(result, 2)
        return result

    expected = x.copy()
    expected[..., 2:6] = rotate(x[..., 2:6], positions, 4, True, 10000.0, 1.0, np.ones(2))
    close(evaluate(build, x, positions), expected, 1e-4)


def test_rope_by_sections() -> None:
    """With four equal positions, MROPE is NEOX; otherwise each section turns by its own."""
    x, yarn = values(3, 2, 8), (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
    planes = np.array([[5, 6, 7], [0, 0, 0], [1, 2, 3], [0, 0, 0]], np.int32)
    same = np.tile(planes[0], 4)
    whole = rotate(x, planes[0], 8, True, 10000.0, 1.0, np.ones(4))
    close(evaluate(lambda c, t, p: c.rope_multi(t, p, None, 8, [2, 1, 1, 0], 8, *yarn), x, same), whole, 1e-4)
    found = evaluate(lambda c, t, p: c.rope_multi(t, p, None, 8, [2, 1, 1, 0], 8, *yarn), x, planes.reshape(-1))
    close(found[..., [0, 1, 4, 5]], whole[..., [0, 1, 4, 5]], 1e-4)
    close(found[..., [2, 6]], x[..., [2, 6]], 1e-4)  # the second section's positions are 0
    third = rotate(x, planes[2], 8, True, 10000.0, 1.0, np.ones(4))
    close(found[..., [3, 7]], third[..., [3, 7]], 1e-4)


def test_views_and_copies() -> None:
    """Views look at parts and other orders, copies make them contiguous."""
    x = values(2, 3, 4, 8)
    close(evaluate(lambda c, t: c.cont(c.permute(t, 0, 2, 1, 3)), x), x.transpose(0, 2, 1, 3))
    close(evaluate(lambda c, t: c.cont(c.permute(t, 2, 0, 1, 3)), x), x.transpose(0, 3, 1, 2))
    close(evaluate(lambda c, t: c.cont_4d(c.transpose(t), 2, 2, 6, 8), x), x.swapaxes(2, 3).reshape(8, 6, 2, 2))
    close(evaluate(lambda c, t: c.scale(c.reshape_4d(t, 2, 8, 6, 2), 1), x), x.reshape(2, 6, 8, 2))
    close(evaluate(lambda c, t: c.cont(c.transpose(t)), x), x.swapaxes(2, 3))
    close(evaluate(lambda c, t: c.cont_2d(c.permute(t, 0, 2, 1, 3), 24, 8), x), x.transpose(0, 2, 1, 3).reshape(8, 24))
    close(evaluate(lambda c, t: c.cont_3d(c.transpose(t), 4, 8, 6), x), x.swapaxes(2, 3).reshape(6, 8, 4))
    close(evaluate(lambda c, t: c.scale(c.reshape_2d(t, 32, 6), 1), x), x.reshape(6, 32))
    close(evaluate(lambda c, t: c.scale(c.reshape_1d(t, 192), 1), x), x.reshape(-1))
    close(evaluate(lambda c, t: c.cont(c.view_1d(t, 5, 12)), x), x.reshape(-1)[3:8])
    close(evaluate(lambda c, t: c.cont(c.view_2d(t, 4, 3, t.nb[1], t.nb[2])), x), x[0, 1, :3, :4])
    close(evaluate(lambda c, t: c.cont(c.view_3d(t, 8, 4, 2, t.nb[1], t.nb[3], 0)), x), x[:, 0])
    close(evaluate(lambda c, t: c.cont(c.view_4d(t, 2, 2, 3, 2, *t.nb[1:], 8)), x), x[:, :, :2, 2:4])


@pytest.mark.parametrize("dim", range(4))
def test_concat(dim: int) -> None:
    """The second operand comes behind the first."""
    a, shape = values(2, 3, 4, 8), [2, 3, 4, 8]
    shape[3 - dim] = 5
    b = values(*shape, seed=1)
    close(evaluate(lambda c, s, t: c.concat(s, t, dim), a, b), np.concatenate((a, b), 3 - dim))


def test_repeat_pad_arange() -> None:
    """Tensors grow by repetition and by zeros; arange counts."""
    x = values(3, 4)
    close(evaluate(lambda c, t: c.repeat_4d(t, 8, 3, 2, 1), x), np.tile(x, (2, 1, 2)))
    close(evaluate(lambda c, t: c.repeat(t, c.input(F32, 8, 6)), x), np.tile(x, (2, 2)))
    close(evaluate(lambda c, t: c.pad(t, 1, 2, 0, 0), x), np.pad(x, ((0, 2), (0, 1))))
    close(evaluate(lambda c, t: c.add(c.arange(1, 3, 0.5), t), np.zeros(4, np.float32)), [1, 1.5, 2, 2.5])


def test_order() -> None:
    """Places come sorted, or as the largest few."""
    x = np.random.default_rng(0).permutation(40).reshape(4, 10).astype(np.float32)
    np.testing.assert_array_equal(evaluate(lambda c, t: c.argsort(t, 0), x), x.argsort(-1))
    np.testing.assert_array_equal(evaluate(lambda c, t: c.cont(c.argsort_top_k(t, 3)), x), (-x).argsort(-1)[:, :3])
    np.testing.assert_array_equal(np.sort(evaluate(lambda c, t: c.top_k(t, 3), x)), np.sort((-x).argsort(-1)[:, :3]))
    np.testing.assert_array_equal(evaluate(lambda c, t: c.argmax(t), x), x.argmax(-1))


CASTS = [(F32, F16), (F32, BF16), (F32, I32), (I32, F32), (F16, F32), (F16, BF16), (BF16, F32), (BF16, F16)]


@pytest.mark.parametrize(("source", "target"), CASTS, ids=lambda kind: kind.name)
def test_casts(source: GGMLType, target: GGMLType) -> None:
    """Plain numbers convert; to integers, the fraction is dropped."""
    x = np.array([[0, 1, -2.75, 100]], np.float32)
    plain = np.trunc(x) if I32 in (source, target) else x
    given = bf16(x) if source is BF16 else plain.astype(np.int32) if source is I32 else x.astype(NUMPY_TYPES[source])

    ctx = Context(4)
    t = ctx.input(source, 4)
    result = ctx.output(ctx.cast(t, target))
    found = run(ctx, result, {t: given[0]})
    np.testing.assert_array_equal(widen(found) if target is BF16 else found, plain[0])


def run(ctx: Context, result: Tensor, inputs: dict[Tensor, Array]) -> Array:
    graph = ctx.new_graph()
    graph.expand(result)
    scheduler = Scheduler([BACKEND], 256)
    scheduler.alloc(graph)
    for tensor, array in inputs.items():
        tensor.set(array)
    assert scheduler.compute(graph)
    return result.get()


@pytest.mark.parametrize("kind", [GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.Q6_K], ids=lambda kind: kind.name)
def test_casts_to_blocks_and_back(kind: GGMLType) -> None:
    """Rows are quantized and expanded by copying."""
    x = values(3, 256)
    expected = dequantize(quantize(x, kind), kind, x.shape)
    close(evaluate(lambda c, t: c.cast(c.cast(t, kind), F32), x), expected, 0.05)
    data, exact = weight(kind, 3, 256)
    np.testing.assert_array_equal(run_cast(kind, data), exact)


def run_cast(kind: GGMLType, data: Array) -> Array:
    ctx = Context(4)
    return run(ctx, ctx.output(ctx.cast(bound(kind, data, 256, 3), F32)), {})


def test_copies_into_a_leaf() -> None:
    """cpy writes into memory that somebody else owns, converting."""
    target = Context(1).new_tensor(F16, 8, 2)
    Buffer.zeros(cpu_device(), [target])
    x = values(1, 8)
    evaluate(lambda c, t: c.cpy(t, c.view_2d(target, 8, 1, target.nb[1], target.nb[1])), x)
    np.testing.assert_array_equal(target.get(), np.concatenate((np.zeros((1, 8)), x)).astype(np.float16))


# --- tensors ---


def test_what_a_tensor_says() -> None:
    """Shape, strides and so on are ggml's; repr shows name, type and shape."""
    ctx = Context(8)
    t = ctx.new_tensor(GGMLType.Q4_0, 64, 5, 1, 3, name="blk.0.attn_q.weight")
    assert (t.ne, t.nb, t.n_dims, t.n_elements) == ((64, 5, 1, 3), (18, 36, 180, 180), 4, 960)
    assert (t.shape, t.nbytes, t.is_contiguous, t.op) == ((3, 1, 5, 64), 540, True, "NONE")
    assert repr(t) == "'blk.0.attn_q.weight' q4_0 [64, 5, 1, 3]"
    p = ctx.permute(t, 0, 2, 3, 1)
    assert (p.ne, p.nb, p.is_contiguous, p.op, p.root) == ((64, 3, 5, 1), (18, 180, 36, 180), False, "PERMUTE", t)


def test_names_have_63_bytes() -> None:
    """A longer name is refused rather than cut, as is one with a zero byte."""
    t = Context(1).new_tensor(F32, 1)
    t.name = "ü" * 31 + "x"
    assert t.name == "ü" * 31 + "x"
    for name in ("x" * 64, "ü" * 32, "a\0b"):
        with pytest.raises(GraphError, match="at most 63 bytes"):
            t.name = name


def test_data_has_to_fit() -> None:
    """set takes the exact dtype and shape; missing outer dimensions count as ones; other strides are copied."""
    ctx = Context(4)
    t = ctx.new_tensor(F32, 4, 3, name="t")
    with pytest.raises(GraphError, match=r"'t' f32 \[4, 3\] has no data"):
        t.set(values(3, 4))
    Buffer.zeros(cpu_device(), [t])
    for wrong in (values(4, 3), values(12), values(3, 4).astype(np.float64), np.zeros((3, 4), np.int32)):
        with pytest.raises(GraphError, match=r"takes float32 \[3, 4\]"):
            t.set(wrong)
    x = values(4, 3).T
    t.set(x)
    np.testing.assert_array_equal(t.get(), x)
    t.set(values(1, 1, 3, 4))
    t.set_bytes(x.tobytes())
    np.testing.assert_array_equal(t.get(), x)
    with pytest.raises(GraphError, match="takes 48 contiguous bytes, not 47"):
        t.set_bytes(bytes(47))


def test_views_of_data() -> None:
    """A view reads and writes its part if that has no gaps; NumPy looks at any part in place."""
    ctx = Context(8)
    t = ctx.new_tensor(F32, 4, 3)
    Buffer.zeros(cpu_device(), [t])
    x = values(3, 4)
    t.set(x)
    row, corner = ctx.view_1d(t, 4, t.nb[1]), ctx.view_2d(t, 2, 2, t.nb[1], 8)
    np.testing.assert_array_equal(row.get(), x[1])
    np.testing.assert_array_equal(corner.numpy_view(), x[:2, 2:])
    np.testing.assert_array_equal(ctx.transpose(t).numpy_view(), x.T)
    for refuse in (corner.get, lambda: corner.set(x[:2, :2])):
        with pytest.raises(GraphError, match="make it contiguous"):
            refuse()
    seen = t.numpy_view()
    row.set(np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(seen[1], np.arange(4))
    with pytest.raises(ValueError, match="read-only"):
        seen[0, 0] = 1
    t.numpy_view(writable=True)[0, 0] = 7
    assert (seen[0, 0], t.address % 32) == (7, 0)


# --- what ggml would abort on ---


class Room:
    """Tensors to misuse."""

    def __init__(self) -> None:
        self.c = c = Context(99)
        self.a = c.input(F32, 8, 3, name="a")
        self.wide = c.input(F32, 9, 3, name="wide")
        self.cube = c.input(F32, 8, 3, 2, name="cube")
        self.half = c.input(F16, 8, 3, name="half")
        self.q = c.new_tensor(GGMLType.Q4_0, 32, 4, name="q")
        self.i = c.input(I32, 3, name="i")
        self.i64 = c.input(I64, 3, name="i64")
        self.n = c.input(I32, 8, 3, name="n")
        self.flat = c.transpose(self.a)
        self.flat.name = "flat"
        self.cache = c.new_tensor(F16, 8, 10, name="cache")
        self.experts = c.new_tensor(F32, 8, 5, 4, name="experts")
        self.ids = c.input(I32, 2, 3, name="ids")
        self.x = c.input(F32, 8, 1, 3, name="x")
        self.heads = c.input(F32, 8, 2, 3, name="heads")
        self.kv = c.input(F16, 8, 6, 2, name="kv")
        self.query = c.input(F32, 8, 3, 2, name="query")
        self.mask = c.input(F16, 6, 3, name="mask")
        self.one = c.input(F32, 2, name="one")


ROPE = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
MISUSES: dict[str, Callable[[Room], Any]] = {
    "new_tensor: no such type": lambda r: r.c.new_tensor(4, 8),
    "new_tensor: negative type": lambda r: r.c.new_tensor(-1, 8),
    "new_tensor: no sizes": lambda r: r.c.new_tensor(F32),
    "new_tensor: five sizes": lambda r: r.c.new_tensor(F32, 1, 1, 1, 1, 1),
    "new_tensor: empty": lambda r: r.c.new_tensor(F32, 4, 0),
    "new_tensor: negative": lambda r: r.c.new_tensor(F32, -4),
    "new_tensor: half a block": lambda r: r.c.new_tensor(GGMLType.Q4_0, 33),
    "new_tensor: size wraps": lambda r: r.c.new_tensor(F32, 2**40, 2**40),
    "add: shapes": lambda r: r.c.add(r.a, r.wide),
    "add: smaller first": lambda r: r.c.add(r.a, r.cube),
    "add: types": lambda r: r.c.add(r.a, r.half),
    "add: quantized": lambda r: r.c.add(r.q, r.q),
    "add: transposed": lambda r: r.c.add(r.flat, r.flat),
    "add_id: shapes": lambda r: r.c.add_id(r.heads, r.wide, r.ids),
    "add_id: ids of another type": lambda r: r.c.add_id(r.a, r.a, r.i64),
    "scale: transposed": lambda r: r.c.scale(r.flat, 2),
    "scale: integers": lambda r: r.c.scale(r.n, 2),
    "clamp: transposed": lambda r: r.c.clamp(r.flat, 0, 1),
    "silu: integers": lambda r: r.c.silu(r.n),
    "silu: transposed": lambda r: r.c.silu(r.flat),
    "swiglu: odd": lambda r: r.c.swiglu(r.wide),
    "swiglu_split: shapes": lambda r: r.c.swiglu_split(r.a, r.cube),
    "swiglu_split: types": lambda r: r.c.swiglu_split(r.a, r.half),
    "swiglu_oai: negative limit": lambda r: r.c.swiglu_oai(r.a, r.a, 1, -1),
    "swiglu_oai: half": lambda r: r.c.swiglu_oai(r.half, r.half, 1, 1),
    "rms_norm: negative eps": lambda r: r.c.rms_norm(r.a, -1e-5),
    "rms_norm: nan": lambda r: r.c.rms_norm(r.a, float("nan")),
    "rms_norm: half": lambda r: r.c.rms_norm(r.half, 1e-5),
    "rms_norm: transposed": lambda r: r.c.rms_norm(r.flat, 1e-5),
    "group_norm: no groups": lambda r: r.c.group_norm(r.cube, 0, 1e-5),
    "sum_rows: half": lambda r: r.c.sum_rows(r.half),
    "mul_mat: k": lambda r: r.c.mul_mat(r.a, r.wide),
    "mul_mat: broadcast": lambda r: r.c.mul_mat(r.cube, r.a),
    "mul_mat: transposed": lambda r: r.c.mul_mat(r.flat, r.flat),
    "mul_mat: integers": lambda r: r.c.mul_mat(r.n, r.a),
    "mul_mat: half with float": lambda r: r.c.mul_mat(r.a, r.half),
    "mul_mat_set_hint: not a product": lambda r: r.c.mul_mat_set_hint(r.a, 1),
    "mul_mat_set_hint: not square": lambda r: r.c.mul_mat_set_hint(r.c.mul_mat(r.a, r.a), 1),
    "mul_mat_id: k": lambda r: r.c.mul_mat_id(r.experts, r.wide, r.ids),
    "mul_mat_id: tokens": lambda r: r.c.mul_mat_id(r.experts, r.x, r.i),
    "mul_mat_id: ids of another type": lambda r: r.c.mul_mat_id(r.experts, r.x, r.heads),
    "prec_set_acc: not a product": lambda r: r.c.prec_set_acc(r.c.silu(r.a), 10),
    "prec_set_acc: unknown": lambda r: r.c.prec_set_acc(r.c.mul_mat(r.a, r.a), 20),
    "prec_set_src: not a product": lambda r: r.c.prec_set_src(r.c.silu(r.a), 10, 1),
    "prec_set_src: the weight": lambda r: r.c.prec_set_src(r.c.mul_mat(r.a, r.a), 10, 0),
    "prec_set_src: no operand": lambda r: r.c.prec_set_src(r.c.mul_mat(r.a, r.a), 10, 10),
    "rope_set_offset: not a rotation": lambda r: r.c.rope_set_offset(r.c.silu(r.a), 0),
    "cpy: sizes": lambda r: r.c.cpy(r.a, r.cube),
    "cpy: types": lambda r: r.c.cpy(r.n, r.half),
    "cpy: long rows into short blocks": lambda r: r.c.cpy(
        r.c.input(F32, 256, 64), r.c.new_tensor(GGMLType.Q5_0, 64, 256)
    ),
    "cpy: into iq": lambda r: r.c.cpy(r.c.input(F32, 256), r.c.new_tensor(GGMLType.IQ2_XS, 256)),
    "cast: no such type": lambda r: r.c.cast(r.a, 5),
    "cast: half a block": lambda r: r.c.cast(r.a, GGMLType.Q4_0),
    "cast: between blocks": lambda r: r.c.cast(r.q, GGMLType.Q8_0),
    "transpose: blocks": lambda r: r.c.transpose(r.q),
    "permute: blocks": lambda r: r.c.permute(r.q, 1, 0, 2, 3),
    "cont_2d: size": lambda r: r.c.cont_2d(r.flat, 5, 5),
    "reshape_2d: size": lambda r: r.c.reshape_2d(r.a, 5, 5),
    "reshape_2d: transposed": lambda r: r.c.reshape_2d(r.flat, 8, 3),
    "reshape_2d: half a block": lambda r: r.c.reshape_2d(r.q, 16, 8),
    "reshape_3d: negative": lambda r: r.c.reshape_3d(r.a, -8, -3, 1),
    "view_1d: too long": lambda r: r.c.view_1d(r.a, 25, 0),
    "view_1d: offset": lambda r: r.c.view_1d(r.a, 1, 96),
    "view_1d: negative offset": lambda r: r.c.view_1d(r.a, 1, -4),
    "view_1d: between elements": lambda r: r.c.view_1d(r.a, 1, 2),
    "view_2d: stride": lambda r: r.c.view_2d(r.a, 8, 3, 48, 0),
    "view_2d: stride wraps": lambda r: r.c.view_2d(r.a, 8, 2, 2**64 - 32, 32),
    "view_2d: empty": lambda r: r.c.view_2d(r.a, 8, 0, 32, 0),
    "view_2d: many of one row": lambda r: r.c.view_2d(r.a, 8, 2**40, 0, 0),
    "view_4d: half a block": lambda r: r.c.view_4d(r.q, 16, 4, 1, 1, *r.q.nb[1:], 0),
    "view of a view: too long": lambda r: r.c.view_1d(r.c.view_1d(r.a, 8, 64), 9, 0),
    "permute: twice the same": lambda r: r.c.permute(r.a, 0, 0, 1, 2),
    "permute: five": lambda r: r.c.permute(r.a, 0, 1, 2, 4),
    "concat: shapes": lambda r: r.c.concat(r.a, r.wide, 1),
    "concat: types": lambda r: r.c.concat(r.a, r.half, 0),
    "concat: axis": lambda r: r.c.concat(r.a, r.a, 4),
    "repeat_4d: shape": lambda r: r.c.repeat_4d(r.a, 12, 3, 1, 1),
    "repeat_4d: size wraps": lambda r: r.c.repeat_4d(r.a, 2**40, 3 * 2**40, 1, 1),
    "repeat_4d: blocks": lambda r: r.c.repeat_4d(r.q, 64, 4, 1, 1),
    "pad: negative": lambda r: r.c.pad(r.a, -1, 0, 0, 0),
    "pad: half": lambda r: r.c.pad(r.half, 1, 0, 0, 0),
    "arange: backwards": lambda r: r.c.arange(1, 0, 1),
    "arange: standing": lambda r: r.c.arange(0, 1, 0),
    "arange: endless": lambda r: r.c.arange(0, float("inf"), 1),
    "arange: nan": lambda r: r.c.arange(0, float("nan"), 1),
    "get_rows: ids of another type": lambda r: r.c.get_rows(r.a, r.i64),
    "get_rows: shape": lambda r: r.c.get_rows(r.cube, r.i),
    "get_rows: computed ids": lambda r: r.c.get_rows(r.a, r.c.cast(r.c.cast(r.i, F32), I32)),
    "get_rows: known to be too large": lambda r: r.c.get_rows(r.a, r.c.argmax(r.a)),
    "set_rows: width": lambda r: r.c.set_rows(r.cache, r.wide, r.i),
    "set_rows: numbers": lambda r: r.c.set_rows(r.cache, r.a, r.ids),
    "set_rows: types": lambda r: r.c.set_rows(r.n, r.a, r.i),
    "set_rows: half into float": lambda r: r.c.set_rows(r.a, r.half, r.i),
    "soft_max_ext: mask": lambda r: r.c.soft_max_ext(r.a, r.wide, 1, 0),
    "soft_max_ext: transposed": lambda r: r.c.soft_max_ext(r.flat, None, 1, 0),
    "soft_max_ext: slopes without a mask": lambda r: r.c.soft_max_ext(r.a, None, 1, 8),
    "soft_max_add_sinks: heads": lambda r: r.c.soft_max_add_sinks(r.c.soft_max(r.cube), r.wide),
    "soft_max_add_sinks: not a softmax": lambda r: r.c.soft_max_add_sinks(r.c.silu(r.cube), r.one),
    "soft_max_add_sinks: twice": lambda r: [r.c.soft_max_add_sinks(s, r.one) for s in [r.c.soft_max(r.cube)] * 2],
    "soft_max_add_sinks: a circle": lambda r: circle(r),
    "flash_attn_ext: half query": lambda r: r.c.flash_attn_ext(r.kv, r.kv, r.kv, None, 1, 0, 0),
    "flash_attn_ext: k and v": lambda r: r.c.flash_attn_ext(r.query, r.kv, r.cube, None, 1, 0, 0),
    "flash_attn_ext: heads": lambda r: r.c.flash_attn_ext(r.c.input(F32, 8, 3, 3), r.kv, r.kv, None, 1, 0, 0),
    "flash_attn_ext: mask": lambda r: r.c.flash_attn_ext(r.query, r.kv, r.kv, r.half, 1, 0, 0),
    "flash_attn_ext: f32 mask": lambda r: r.c.flash_attn_ext(r.query, r.kv, r.kv, r.c.input(F32, 6, 3), 1, 0, 0),
    "flash_attn_ext: slopes": lambda r: r.c.flash_attn_ext(r.query, r.kv, r.kv, None, 1, 8, 0),
    "flash_attn_ext_set_n_kv_max": lambda r: r.c.flash_attn_ext_set_n_kv_max(r.c.silu(r.a), 1),
    "rope_ext: positions": lambda r: r.c.rope_ext(r.a, r.i, None, 8, 0, *ROPE),
    "rope_ext: mode": lambda r: r.c.rope_ext(r.heads, r.i, None, 8, 8, *ROPE),
    "rope_ext: odd": lambda r: r.c.rope_ext(r.heads, r.i, None, 7, 0, *ROPE),
    "rope_ext: none": lambda r: r.c.rope_ext(r.heads, r.i, None, 0, 0, *ROPE),
    "rope_ext: too many": lambda r: r.c.rope_ext(r.heads, r.i, None, 10, 0, *ROPE),
    "rope_ext: float positions": lambda r: r.c.rope_ext(r.heads, r.c.input(F32, 3), None, 8, 0, *ROPE),
    "rope_ext: few factors": lambda r: r.c.rope_ext(r.heads, r.i, r.one, 8, 0, *ROPE),
    "rope_multi: positions": lambda r: r.c.rope_multi(r.heads, r.i, None, 8, [2, 1, 1, 0], 8, *ROPE),
    "rope_multi: sections": lambda r: r.c.rope_multi(r.heads, r.c.input(I32, 12), None, 8, [0, 0, 0, 4], 8, *ROPE),
    "argsort: half": lambda r: r.c.argsort(r.half, 0),
    "argsort: order": lambda r: r.c.argsort(r.a, 2),
    "argsort_top_k: too many": lambda r: r.c.argsort_top_k(r.a, 9),
    "top_k: none": lambda r: r.c.top_k(r.a, 0),
    "argmax: cube": lambda r: r.c.argmax(r.cube),
    "another context's input": lambda r: r.c.silu(Context(1).input(F32, 8)),
    "another context's node": lambda r: r.c.silu(Room().flat),
    "a name for another context": lambda r: r.c.output(Room().a),
    "no room for tensors": lambda r: [r.c.silu(r.a) for _ in range(100)],
    "a context of nothing": lambda r: Context(0),
    "a context of everything": lambda r: Context(2**40),
    "a graph too small": lambda r: r.c.new_graph(2).expand(r.c.silu(r.a)),
    "another context's graph": lambda r: Context(1).new_graph().expand(r.a),
}


def circle(r: Room) -> None:
    soft = r.c.soft_max(r.cube)
    r.c.soft_max_add_sinks(soft, r.c.cont(r.c.view_1d(r.c.silu(soft), 2, 0)))


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused(misuse: str) -> None:
    """Each is an error of ours, and the message names the operands it is about."""
    with pytest.raises(GraphError) as caught:
        MISUSES[misuse](Room())
    if misuse in ("add: shapes", "mul_mat: k"):
        assert "a = 'a' f32 [8, 3], b = 'wide' f32 [9, 3]" in str(caught.value)


def index_graph(rows: int) -> tuple[Tensor, Any, Scheduler]:
    ctx = Context(8)
    ids = ctx.input(I32, 2, 1, name="ids")
    graph = ctx.new_graph()
    graph.expand(ctx.get_rows(bound(F32, values(rows, 4), 4, rows), ctx.view_1d(ids, 1, 4)))
    scheduler = Scheduler([BACKEND], 64)
    scheduler.alloc(graph)
    return ids, graph, scheduler


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_row_numbers_out_of_range(bad: int) -> None:
    """They are found before the kernel uses them, by name; others in the same input do not matter."""
    ids, graph, scheduler = index_graph(5)
    ids.set(np.array([bad, 4], np.int32))
    assert scheduler.compute(graph)
    ids.set(np.array([0, bad], np.int32))
    with pytest.raises(GraphError, match=rf"'ids \(view\)' has the row number {bad}, the rows are 0 to 4"):
        scheduler.compute(graph)


def test_row_numbers_written_behind_our_back() -> None:
    """It is the memory that is looked at, not what passed through `set`."""
    ids, graph, scheduler = index_graph(5)
    ids.set(np.zeros(2, np.int32))
    assert scheduler.compute(graph)
    ids.set(np.zeros(2, np.int32))
    ids.numpy_view(writable=True)[1] = 77
    with pytest.raises(GraphError, match="77"):
        scheduler.compute(graph)


def test_row_numbers_are_not_computed_over() -> None:
    """An operation may neither write to row numbers nor take what was written for such."""
    ctx = Context(16)
    ids, other, x = ctx.input(I32, 3, name="ids"), ctx.input(I32, 3), ctx.input(F32, 4, 5)
    ctx.get_rows(x, ids)
    with pytest.raises(GraphError, match="used as row numbers"):
        ctx.cpy(other, ids)
    ctx.cpy(ids, other)
    with pytest.raises(GraphError, match="have to come from a leaf"):
        ctx.get_rows(x, other)


def test_row_numbers_whose_range_is_known() -> None:
    """Places that argsort found stay usable through views, copies, casts, and when they are scaled down."""
    x, table = values(2, 8), values(4, 3, seed=1)

    def build(ctx: Context, scores: Tensor, rows: Tensor) -> Tensor:
        ids = ctx.reshape_1d(ctx.cont(ctx.argsort_top_k(scores, 2)), 4)
        return ctx.get_rows(rows, ctx.cast(ctx.scale(ctx.cast(ids, F32), 0.5), I32))

    places = (-x).argsort(-1)[:, :2].reshape(-1)
    close(evaluate(build, x, table), table[places // 2])


def test_views_are_limited_by_the_memory_they_look_into() -> None:
    """A view of a view may leave it, as in ggml, but not the tensor both look into."""
    ctx = Context(8)
    t = ctx.new_tensor(F32, 16)
    inner = ctx.view_1d(t, 4, 16)
    assert ctx.view_1d(inner, 12, 0).ne[0] == 12
    with pytest.raises(GraphError, match="leave the memory"):
        ctx.view_1d(inner, 13, 0)


# --- graphs ---


def test_the_order_is_ggmls() -> None:
    """Nodes come in the order in which ggml itself would take them."""

    def build() -> tuple[Context, list[Tensor]]:
        ctx, r = Context(400), np.random.default_rng(5)
        pool = [ctx.input(F32, 4) for _ in range(3)]
        for i in range(300):
            first, second = (pool[int(k)] for k in r.integers(max(0, len(pool) - 12), len(pool), 2))
            pool.append(ctx.add(first, second) if i % 3 else ctx.reshape_2d(first, 2, 2) if i % 2 else ctx.silu(first))
            if pool[-1].n_dims == 2:
                pool[-1] = ctx.reshape_1d(pool[-1], 4)
        for i, tensor in enumerate(pool):
            tensor.name = f"t{i}"
        return ctx, pool

    ctx, pool = build()
    other, twins = build()
    ours, theirs = ctx.new_graph(), other.new_graph()
    for k in (40, 200, 120, len(pool) - 1):
        ours.expand(pool[k])
        C.ggml_build_forward_expand(theirs.ptr, twins[k].ptr)
    assert len(ours) > 100
    assert ours.names == theirs.names
    assert ours.ops == theirs.ops


def test_graphs_may_be_deep() -> None:
    """A long chain needs no stack: ggml's own walk would recurse once per node."""
    ctx = Context(100_001)
    t = ctx.input(F32, 1)
    for _ in range(100_000):
        t = ctx.neg(t)
    graph = ctx.new_graph()
    thread = threading.Thread(target=graph.expand, args=(t,))
    thread.start()
    thread.join()
    assert len(graph) == 100_000


def test_many_tensors_at_once() -> None:
    """What would exhaust the lists of ggml's allocator is refused; as many outputs as one likes are not."""

    def build(n: int) -> tuple[Tensor, list[Tensor], Any]:
        ctx = Context(2000)
        x, graph = ctx.input(F32, 8), ctx.new_graph()
        parts = [graph.expand(ctx.concat(x, x, 0)) for _ in range(n)]
        return x, parts, graph

    x, parts, graph = build(600)
    total = parts[0]
    for part in [*parts[2::2], *parts[1::2]]:
        total = graph.expand(x.ctx.add(total, part))
    scheduler = Scheduler([BACKEND], 4000)
    with pytest.raises(GraphError, match="too many tensors at once"):
        scheduler.alloc(graph)
    x, parts, graph = build(600)
    for part in parts:
        x.ctx.output(part)
    scheduler.alloc(graph)
    x.set(np.ones(8, np.float32))
    assert scheduler.compute(graph)
    np.testing.assert_array_equal(parts[300].get(), np.ones(16))


def test_an_allocated_graph_is_final() -> None:
    """No further operation, node, hint or sink; and it is allocated once."""
    ctx = Context(16)
    x = ctx.input(F32, 8)
    product = ctx.mul_mat(x, x)
    graph = ctx.new_graph()
    graph.expand(product)
    scheduler = Scheduler([BACKEND], 64)
    scheduler.alloc(graph)
    for late in (
        lambda: ctx.silu(x),
        lambda: graph.expand(product),
        lambda: ctx.prec_set_acc(product, 10),
        lambda: ctx.output(product),
        lambda: scheduler.alloc(graph),
        lambda: Scheduler([BACKEND], 64).alloc(graph),
    ):
        with pytest.raises(GraphError, match="allocated"):
            late()


def test_memory_moves_on_with_the_next_graph() -> None:
    """A tensor whose memory another graph took is refused; a NumPy view keeps the last values."""
    scheduler = Scheduler([BACKEND], 64)

    def build(n: int, value: float) -> tuple[Tensor, Any]:
        ctx = Context(4)
        x = ctx.input(F32, n)
        y = ctx.output(ctx.neg(x))
        graph = ctx.new_graph()
        graph.expand(y)
        scheduler.alloc(graph)
        x.set(np.full(n, value, np.float32))
        assert scheduler.compute(graph)
        return y, graph

    first, graph = build(1000, 1.0)
    view = first.numpy_view()
    second, _ = build(100_000, 2.0)
    np.testing.assert_array_equal(view, np.full(1000, -1.0))
    with pytest.raises(GraphError, match="has no data"):
        first.get()
    with pytest.raises(GraphError, match="no memory"):
        scheduler.compute(graph)
    np.testing.assert_array_equal(second.get(), np.full(100_000, -2.0))


# --- lifetimes ---


def test_data_outlives_its_owners() -> None:
    """Tensors, and views of them, keep weights, buffer, graph memory and scheduler alive."""
    ctx = Context(4)
    x = ctx.input(F32, 4, 2)
    w = bound(F32, values(3, 4), 4, 3)
    expected = values(2, 4, seed=1) @ w.get().T
    y = ctx.output(ctx.mul_mat(w, x))
    del w
    gc.collect()
    graph = ctx.new_graph()
    graph.expand(y)
    scheduler = Scheduler([Backend(cpu_device())], 64)
    scheduler.alloc(graph)
    x.set(values(2, 4, seed=1))
    assert scheduler.compute(graph)
    del scheduler, graph, ctx, x
    gc.collect()
    view = y.numpy_view()
    np.testing.assert_allclose(y.get(), expected, rtol=1e-5)
    del y
    gc.collect()
    np.testing.assert_allclose(view, expected, rtol=1e-5)


def test_contexts_are_freed_at_once() -> None:
    """No circle keeps a context's memory until the garbage collector comes."""
    gc.disable()
    try:
        ctx = Context(16)
        ids, x = ctx.input(I32, 2), ctx.input(F32, 4, 2)
        y = ctx.get_rows(x, ctx.view_1d(ids, 2, 0))
        graph = ctx.new_graph()
        graph.expand(y)
        scheduler = Scheduler([BACKEND], 64)
        scheduler.alloc(graph)
        gone = weakref.ref(ctx), weakref.ref(scheduler)
        del ctx, ids, x, y, graph, scheduler
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_closed_owners_say_so() -> None:
    """After close, every use is a ClosedError; names and shapes can still be shown."""
    with Context(8) as ctx:
        x = ctx.input(F32, 4, name="x")
        graph = ctx.new_graph()
        graph.expand(ctx.neg(x))
        scheduler = Scheduler([BACKEND], 64)
        scheduler.alloc(graph)
    ctx.close()
    for use in (lambda: ctx.neg(x), lambda: ctx.new_graph(), x.get, lambda: ctx.input(F32, 1), lambda: graph.expand(x)):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        scheduler.compute(graph)
    assert (repr(x), graph.ops) == ("'x' f32 [4]", ["NEG"])
    scheduler.close()
    for use in (lambda: scheduler.alloc(graph), lambda: scheduler.compute(graph), scheduler.reset):
        with pytest.raises(ClosedError):
            use()


def test_leaves_of_closed_owners_are_refused() -> None:
    """Neither a closed context's leaf nor one of a closed buffer gets into a graph."""
    w = bound(F32, values(4), 4)
    w.buffer.close()
    with pytest.raises(ClosedError, match="the buffer of 'W'"):
        Context(4).neg(w)
    with pytest.raises(ClosedError, match="the buffer of 'W'"):
        w.get()
    w = bound(F32, values(4), 4)
    w.ctx.close()
    with pytest.raises(ClosedError, match="the context of 'W'"):
        Context(4).neg(w)


# --- all together ---


def test_random_misuse_never_aborts() -> None:
    """Random operations on random operands, built and computed, end in results or in our errors."""
    fuzz = Path(__file__).parent / "helpers" / "graph_fuzz.py"
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        [sys.executable, str(fuzz), "1", "400"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert int(re.search("'computed': ([0-9]+)", done.stdout)[1]) > 200


def test_building_is_quick() -> None:
    """A graph of a thousand nodes is built in milliseconds, since it is built again whenever its shape changes."""

    def build() -> float:
        start = time.thread_time()
        ctx = Context(2000)
        graph = ctx.new_graph()
        x = ctx.input(F32, 64, 1)
        for _ in range(30):
            for _ in range(10):
                x = ctx.mul_mat(w, ctx.mul(ctx.rms_norm(x, 1e-5), norm))
                x = graph.expand(ctx.reshape_2d(ctx.permute(x, 0, 1, 2, 3), 64, 1))
        assert len(graph) == 1500
        return time.thread_time() - start

    w, norm = bound(F32, values(64, 64), 64, 64), bound(F32, values(64), 64)
    assert min(build() for _ in range(7)) < 0.02  # about 0.004 on an idle machine


def test_every_operation_is_tested_here() -> None:
    """An operation without a test of its result stands out."""
    text = Path(__file__).read_text(encoding="utf-8")
    names = [name for name in vars(Context.__mro__[1]) if not name.startswith("_")]
    tabled = {*ARITHMETIC, *UNARY, *GATES, *(f"{gate}_split" for gate in GATES)}
    assert len(names) > 70
    assert [name for name in names if f".{name}(" not in text and name not in tabled] == []


def test_errors_are_ours() -> None:
    """Whatever is refused can be caught as GgufpyError and as ValueError."""
    with pytest.raises(ValueError, match="add") as caught:
        MISUSES["add: types"](Room())
    assert isinstance(caught.value, GgufpyError)
