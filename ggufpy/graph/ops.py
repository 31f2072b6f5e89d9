"""The operations of decoders, one method each: checks, the call, the result. The package says what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ggufpy._ffi.lib import C, ffi
from ggufpy.gguf import GGMLType
from ggufpy.graph.context import ContextBase
from ggufpy.graph.tensor import (
    CONTIGUOUS,
    CONTIGUOUS_1,
    FRESH,
    INT32_MAX,
    LEAF,
    MAX_ELEMENTS,
    NULL,
    ROWS,
    STEPS,
    TYPES,
    Tensor,
    refused,
)

__all__ = ["Operations"]

F32, F16, BF16 = GGMLType.F32, GGMLType.F16, GGMLType.BF16
I16, I32, I64 = GGMLType.I16, GGMLType.I32, GGMLType.I64
FLOATS = (F32, F16, BF16)


def _flags(types: Sequence[GGMLType]) -> tuple[bool, ...]:
    # A tuple indexed by the type's code: several times faster than a set, because hashing an enum member is slow.
    return tuple(code in [int(t) for t in types] for code in range(len(TYPES)))


_QUANTIZED = [t for t in GGMLType if t.is_quantized]
_NO_FROM_FLOAT = [GGMLType[n] for n in ["IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"]]
_NO_DOT = [GGMLType.Q8_1, GGMLType.Q8_K]
# As the type traits of ggml-cpu.c have it: kernels exist for weights of these types, and for storing as these.
CAN_MULTIPLY = _flags([*FLOATS, *(t for t in _QUANTIZED if t not in _NO_DOT)])
CAN_STORE = _flags([*FLOATS, *(t for t in _QUANTIZED if t not in [*_NO_FROM_FLOAT, *_NO_DOT])])
CAN_GET_ROWS = _flags([*FLOATS, I32, *(t for t in _QUANTIZED if t not in _NO_DOT)])
CAN_EXPAND = _flags([t for t in _QUANTIZED if t not in _NO_DOT])


def address_of(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Operations(ContextBase):
    """The operations that ordinary decoders are made of."""

    # --- arithmetic ---

    def _arithmetic(self, op: str, function: Any, a: Tensor, b: Tensor) -> Tensor:
        self._own(op, a, b)
        ane, bne = a.ne, b.ne
        if ane[0] % bne[0] or ane[1] % bne[1] or ane[2] % bne[2] or ane[3] % bne[3]:
            raise refused(op, "b cannot be repeated to the shape of a", a=a, b=b)
        if a.type not in FLOATS or (b.type is not F32 and b.type is not a.type):
            raise refused(op, "a is f32, f16 or bf16, b is f32 or the type of a", a=a, b=b)
        if not a.layout & ROWS:
            raise refused(op, "the elements of a row of a have to be adjacent (use cont)", a=a, b=b)
        return self._wrap(function(self._ptr, a.ptr, b.ptr))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Add `b`, repeated to the shape of `a`."""
        return self._arithmetic("add", C.ggml_add, a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """Subtract `b`, repeated to the shape of `a`."""
        return self._arithmetic("sub", C.ggml_sub, a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply by `b`, repeated to the shape of `a`, element by element."""
        return self._arithmetic("mul", C.ggml_mul, a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """Divide by `b`, repeated to the shape of `a`."""
        return self._arithmetic("div", C.ggml_div, a, b)

    def add_id(self, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """Add to each a[:, i, t] the row b[:, ids[i, t]]: a [n, k, n_tokens], b [n, n_rows], ids i32 [k, n_tokens]."""
        self._own("add_id", a, b, ids)
        if a.ne[0] != b.ne[0] or a.ne[1:3] != ids.ne[:2] or a.ne[3] * b.ne[2] * b.ne[3] * ids.ne[2] * ids.ne[3] != 1:
            raise refused("add_id", "a [n, k, t], b [n, rows], ids [k, t] expected", a=a, b=b, ids=ids)
        if a.type is not F32 or b.type is not F32 or ids.type is not I32:
            raise refused("add_id", "f32, f32 and i32 expected", a=a, b=b, ids=ids)
        self._rows("add_id", a=a, b=b, ids=ids)
        self._index("add_id", ids, b.ne[1], a=a, b=b, ids=ids)
        return self._wrap(C.ggml_add_id(self._ptr, a.ptr, b.ptr, ids.ptr))

    def scale(self, a: Tensor, s: float) -> Tensor:
        """Multiply by the number `s`."""
        limit = None
        if a.limit is not None and 0 <= s <= 1:  # rounding keeps the order, so the largest stays the largest
            limit = int(np.float32(a.limit - 1) * np.float32(s)) + 1
        self._scalable("scale", a)
        return self._contiguous("scale", C.ggml_scale, (F32, BF16), a, s, limit=limit)

    def scale_bias(self, a: Tensor, s: float, b: float) -> Tensor:
        """Multiply by `s`, then add `b`."""
        self._scalable("scale_bias", a)
        return self._contiguous("scale_bias", C.ggml_scale_bias, (F32, BF16), a, s, b)

    def _scalable(self, op: str, a: Tensor) -> None:
        if a.layout & (ROWS | STEPS) != ROWS | STEPS:
            raise refused(op, "a tensor that is not permuted expected (use cont)", a=a)

    def fill(self, a: Tensor, c: float) -> Tensor:
        """Make a tensor like `a` with `c` everywhere."""
        return self._contiguous("fill", C.ggml_fill, (F32, F16), a, c)

    def _contiguous(
        self, op: str, function: Any, types: tuple[GGMLType, ...], a: Tensor, *numbers: float, limit: int | None = None
    ) -> Tensor:
        self._own(op, a)
        if a.type not in types or not a.layout & CONTIGUOUS:
            raise refused(op, f"a contiguous tensor of type {' or '.join(t.label for t in types)} expected", a=a)
        return self._wrap(function(self._ptr, a.ptr, *numbers), limit=limit)

    def _row_wise(self, op: str, function: Any, types: tuple[GGMLType, ...], a: Tensor, *numbers: float) -> Tensor:
        # ROWS: the kernels walk a row without strides; CONTIGUOUS_1: and step from row to row by nb[1] alone.
        self._own(op, a)
        if a.type not in types or a.layout & (ROWS | CONTIGUOUS_1) != ROWS | CONTIGUOUS_1:
            raise refused(op, f"rows without gaps of type {' or '.join(t.label for t in types)} expected", a=a)
        return self._wrap(function(self._ptr, a.ptr, *numbers))

    def clamp(self, a: Tensor, min: float, max: float) -> Tensor:
        """Keep the values within min … max."""
        return self._row_wise("clamp", C.ggml_clamp, (F32, F16), a, min, max)

    # --- functions of one element ---

    def _unary(self, op: str, function: Any, a: Tensor) -> Tensor:
        return self._row_wise(op, function, FLOATS, a)

    def abs(self, a: Tensor) -> Tensor:
        """Take the absolute value."""
        return self._unary("abs", C.ggml_abs, a)

    def neg(self, a: Tensor) -> Tensor:
        """Change the sign."""
        return self._unary("neg", C.ggml_neg, a)

    def sqr(self, a: Tensor) -> Tensor:
        """Square."""
        return self._unary("sqr", C.ggml_sqr, a)

    def sqrt(self, a: Tensor) -> Tensor:
        """Take the square root."""
        return self._unary("sqrt", C.ggml_sqrt, a)

    def exp(self, a: Tensor) -> Tensor:
        """Raise e to each element."""
        return self._unary("exp", C.ggml_exp, a)

    def log(self, a: Tensor) -> Tensor:
        """Take the natural logarithm."""
        return self._unary("log", C.ggml_log, a)

    def sin(self, a: Tensor) -> Tensor:
        """Take the sine."""
        return self._unary("sin", C.ggml_sin, a)

    def cos(self, a: Tensor) -> Tensor:
        """Take the cosine."""
        return self._unary("cos", C.ggml_cos, a)

    def tanh(self, a: Tensor) -> Tensor:
        """Take the hyperbolic tangent."""
        return self._unary("tanh", C.ggml_tanh, a)

    def sigmoid(self, a: Tensor) -> Tensor:
        """Take 1 / (1 + e^−x)."""
        return self._unary("sigmoid", C.ggml_sigmoid, a)

    def softplus(self, a: Tensor) -> Tensor:
        """Take log(1 + e^x)."""
        return self._unary("softplus", C.ggml_softplus, a)

    def relu(self, a: Tensor) -> Tensor:
        """Take max(x, 0)."""
        return self._unary("relu", C.ggml_relu, a)

    def silu(self, a: Tensor) -> Tensor:
        """Take x · sigmoid(x)."""
        return self._unary("silu", C.ggml_silu, a)

    def gelu(self, a: Tensor) -> Tensor:
        """Take GELU in its tanh approximation (on the CPU through a table of f16 values)."""
        return self._unary("gelu", C.ggml_gelu, a)

    def gelu_erf(self, a: Tensor) -> Tensor:
        """Take GELU by the error function."""
        return self._unary("gelu_erf", C.ggml_gelu_erf, a)

    def gelu_quick(self, a: Tensor) -> Tensor:
        """Take x · sigmoid(1.702 x)."""
        return self._unary("gelu_quick", C.ggml_gelu_quick, a)

    def xielu(self, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
        """Take xIELU (arXiv:2411.13010) with these four parameters."""
        return self._row_wise("xielu", C.ggml_xielu, FLOATS, a, alpha_n, alpha_p, beta, eps)

    # --- gated units ---

    def _glu(self, op: str, function: Any, a: Tensor) -> Tensor:
        if a.ne[0] % 2:
            raise refused(op, "a row has to hold two halves of equal length", a=a)
        return self._row_wise(op, function, FLOATS, a)

    def _glu_split(
        self, op: str, function: Any, types: tuple[GGMLType, ...], a: Tensor, b: Tensor, *numbers: float
    ) -> Tensor:
        self._own(op, a, b)
        if a.ne != b.ne or a.type is not b.type or a.type not in types:
            raise refused(op, f"equal shapes of one type among {', '.join(t.label for t in types)} expected", a=a, b=b)
        if a.layout & b.layout & (ROWS | CONTIGUOUS_1) != ROWS | CONTIGUOUS_1:
            raise refused(op, "rows without gaps expected", a=a, b=b)
        return self._wrap(function(self._ptr, a.ptr, b.ptr, *numbers))

    def reglu(self, a: Tensor) -> Tensor:
        """Gate: relu of the first half of each row, times the second."""
        return self._glu("reglu", C.ggml_reglu, a)

    def geglu(self, a: Tensor) -> Tensor:
        """Gate: gelu of the first half of each row, times the second."""
        return self._glu("geglu", C.ggml_geglu, a)

    def swiglu(self, a: Tensor) -> Tensor:
        """Gate: silu of the first half of each row, times the second."""
        return self._glu("swiglu", C.ggml_swiglu, a)

    def geglu_erf(self, a: Tensor) -> Tensor:
        """Gate: gelu_erf of the first half of each row, times the second."""
        return self._glu("geglu_erf", C.ggml_geglu_erf, a)

    def geglu_quick(self, a: Tensor) -> Tensor:
        """Gate: gelu_quick of the first half of each row, times the second."""
        return self._glu("geglu_quick", C.ggml_geglu_quick, a)

    def reglu_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Gate: relu(a) · b."""
        return self._glu_split("reglu_split", C.ggml_reglu_split, FLOATS, a, b)

    def geglu_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Gate: gelu(a) · b."""
        return self._glu_split("geglu_split", C.ggml_geglu_split, FLOATS, a, b)

    def swiglu_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Gate: silu(a) · b."""
        return self._glu_split("swiglu_split", C.ggml_swiglu_split, FLOATS, a, b)

    def geglu_erf_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Gate: gelu_erf(a) · b."""
        return self._glu_split("geglu_erf_split", C.ggml_geglu_erf_split, FLOATS, a, b)

    def geglu_quick_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Gate: gelu_quick(a) · b."""
        return self._glu_split("geglu_quick_split", C.ggml_geglu_quick_split, FLOATS, a, b)

    def swiglu_oai(self, a: Tensor, b: Tensor, alpha: float, limit: float) -> Tensor:
        """Gate as gpt-oss does: with x = min(a, limit) and y = clamp(b, ±limit), x · sigmoid(alpha x) · (y + 1)."""
        if not limit >= 0:
            raise refused("swiglu_oai", f"limit {limit} is negative", a=a, b=b)
        return self._glu_split("swiglu_oai", C.ggml_swiglu_oai, (F32,), a, b, alpha, limit)

    def swiglu_clamp(self, a: Tensor, b: Tensor, limit: float) -> Tensor:
        """Gate: silu(a) with both sides kept within `limit` (`ggml_swiglu_clamp`)."""
        if not limit >= 0:
            raise refused("swiglu_clamp", f"limit {limit} is negative", a=a, b=b)
        return self._glu_split("swiglu_clamp", C.ggml_swiglu_clamp, (F32, F16), a, b, limit)

    # --- norms and sums over rows ---

    def _over_rows(self, op: str, function: Any, a: Tensor, *numbers: float) -> Tensor:
        self._own(op, a)
        if a.type is not F32 or not a.layout & ROWS:
            raise refused(op, "f32 with adjacent elements in each row expected", a=a)
        return self._wrap(function(self._ptr, a.ptr, *numbers))

    def _norm(self, op: str, function: Any, a: Tensor, eps: float) -> Tensor:
        if not eps >= 0:
            raise refused(op, f"eps {eps} is negative", a=a)
        return self._over_rows(op, function, a, eps)

    def norm(self, a: Tensor, eps: float) -> Tensor:
        """Normalize each row to mean 0 and variance 1."""
        return self._norm("norm", C.ggml_norm, a, eps)

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """Divide each row by its root mean square."""
        return self._norm("rms_norm", C.ggml_rms_norm, a, eps)

    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        """Divide each row by its length, or by `eps` if that is larger."""
        return self._norm("l2_norm", C.ggml_l2_norm, a, eps)

    def group_norm(self, a: Tensor, n_groups: int, eps: float) -> Tensor:
        """Normalize each of `n_groups` groups of channels (dimension 2)."""
        # Between dimension 2 and the number of groups ggml divides without a look.
        if not 0 < n_groups <= a.ne[2] or a.ne[2] % n_groups or not eps >= 0:
            raise refused("group_norm", f"n_groups {n_groups} has to divide dimension 2, eps {eps} to be positive", a=a)
        return self._over_rows("group_norm", C.ggml_group_norm, a, n_groups, eps)

    def sum_rows(self, a: Tensor) -> Tensor:
        """Sum each row: [n, …] → [1, …]."""
        return self._over_rows("sum_rows", C.ggml_sum_rows, a)

    def mean(self, a: Tensor) -> Tensor:
        """Average each row: [n, …] → [1, …]."""
        return self._over_rows("mean", C.ggml_mean, a)

    def sum(self, a: Tensor) -> Tensor:
        """Sum everything into one number."""
        return self._over_rows("sum", C.ggml_sum, a)

    def cumsum(self, a: Tensor) -> Tensor:
        """Sum up along each row."""
        return self._over_rows("cumsum", C.ggml_cumsum, a)

    # --- matrix products ---

    def mul_mat(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply: a [k, n, x, y], of any type with a dot product, and b [k, m, x·r, y·s] → f32 [n, m, x·r, y·s]."""
        self._own("mul_mat", a, b)
        ane, bne = a.ne, b.ne
        if ane[0] != bne[0] or bne[2] % ane[2] or bne[3] % ane[3]:
            raise refused("mul_mat", "a [k, n, x, y] and b [k, m, multiple of x, multiple of y] expected", a=a, b=b)
        self._multipliable("mul_mat", a, b)
        if ane[1] * bne[1] * bne[2] * bne[3] > MAX_ELEMENTS:
            raise refused("mul_mat", "the result is too large", a=a, b=b)
        return self._wrap(C.ggml_mul_mat(self._ptr, a.ptr, b.ptr))

    def _multipliable(self, op: str, a: Tensor, b: Tensor) -> None:
        same = b.type is a.type and a.type in (F16, BF16)
        if not CAN_MULTIPLY[a.type] or not (b.type is F32 or same or (a.type is F32 and b.type is BF16)):
            raise refused(
                op, "no kernel multiplies these types (b is f32, or f16 with f16, bf16 with bf16 or f32)", a=a, b=b
            )
        if not a.layout & b.layout & ROWS or a.nb[1] < a.nb[0]:
            raise refused(op, "the elements of each row have to be adjacent (use cont)", a=a, b=b)

    def mul_mat_set_hint(self, a: Tensor, hint: int) -> None:
        """Tell the kernel that the left side of the product `a` is a Hadamard matrix (hint 1)."""
        self._mine("mul_mat_set_hint", a)
        left, right = a.ptr.src[0], a.ptr.src[1]
        n = left.ne[0] if a.op == "MUL_MAT" else 0
        fits = n and n & (n - 1) == 0 and left.ne[1] == n and left.ne[2] * left.ne[3] == 1
        if hint not in (0, 1) or not fits or left.type != F32 or right.type not in (F32, F16):
            raise refused(
                "mul_mat_set_hint", f"hint {hint} is for mul_mat(f32 [n, n], f32 or f16), n a power of two", a=a
            )
        C.ggml_mul_mat_set_hint(a.ptr, hint)

    def mul_mat_id(self, as_: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """Multiply by chosen matrices: as_ [k, n, n_expert], b [k, u or 1, t], ids i32 [u, t] → f32 [n, u, t]."""
        self._own("mul_mat_id", as_, b, ids)
        ane, bne, ine = as_.ne, b.ne, ids.ne
        if ane[0] != bne[0] or ine[1] != bne[2] or ine[0] % bne[1] or ane[3] * bne[3] * ine[2] * ine[3] != 1:
            raise refused("mul_mat_id", "as [k, n, e], b [k, u or 1, t], ids [u, t] expected", a=as_, b=b, ids=ids)
        if ids.type is not I32 or b.type is not F32:
            raise refused("mul_mat_id", "b f32 and ids i32 expected", a=as_, b=b, ids=ids)
        self._multipliable("mul_mat_id", as_, b)
        if ane[1] * ine[0] * ine[1] > MAX_ELEMENTS or ane[2] * ine[0] * ine[1] > 2**32:
            raise refused("mul_mat_id", "the result is too large", a=as_, b=b, ids=ids)
        self._index("mul_mat_id", ids, ane[2], a=as_, b=b, ids=ids)
        return self._wrap(C.ggml_mul_mat_id(self._ptr, as_.ptr, b.ptr, ids.ptr))

    def prec_set_acc(self, a: Tensor, prec: int) -> None:
        """Ask that mul_mat(_id) or flash_attn_ext add up in `GGML_PREC_F32` (10) at least, or 0 to leave it open."""
        self._mine("prec_set_acc", a)
        if prec not in (0, 10) or not C.ggml_prec_set_acc(a.ptr, prec):
            raise refused("prec_set_acc", f"precision {prec} cannot be set", a=a)

    def prec_set_src(self, a: Tensor, prec: int, idx: int) -> None:
        """Allow mul_mat(_id) to round its second operand (`idx` 1) to `prec`, a value of `enum ggml_prec`."""
        self._mine("prec_set_src", a)
        if prec not in (0, 10, 15, 20, 30, 40) or idx != 1 or not C.ggml_prec_set_src(a.ptr, prec, idx):
            raise refused("prec_set_src", f"precision {prec} of operand {idx} cannot be set", a=a)

    # --- copies and views ---

    def cpy(self, a: Tensor, b: Tensor) -> Tensor:
        """Copy `a` into `b`, converting; return a view of `b`."""
        self._own("cpy", a, b)
        if a.n_elements != b.n_elements:
            raise refused("cpy", "equal numbers of elements expected", a=a, b=b)
        self._convertible("cpy", a, b.type, a.ne == b.ne, b.layout, b=b)
        if b.type.is_quantized and a.ne[0] % b.type.block_size:
            raise refused("cpy", "rows of whole blocks expected", a=a, b=b)
        if b.type.is_quantized and a.type is not b.type and a.ne[0] > b.ne[0]:  # ggml keeps room for a row of b
            raise refused("cpy", "rows of at most the length of those of b expected", a=a, b=b)
        root = self._writes("cpy", b)
        return self._wrap(C.ggml_cpy(self._ptr, a.ptr, b.ptr), root)

    def cast(self, a: Tensor, type: GGMLType | int) -> Tensor:
        """Convert to another type (to i32: the fraction is dropped)."""
        kind = TYPES[type] if 0 <= type < len(TYPES) else None
        if kind is None:
            raise refused("cast", f"there is no type {type}", a=a)
        self._own("cast", a)
        self._size("cast", kind, a.ne, a=a)
        self._convertible("cast", a, kind, True, FRESH)
        return self._wrap(C.ggml_cast(self._ptr, a.ptr, kind), limit=a.limit if kind in (F32, I32) else None)

    def _convertible(self, op: str, a: Tensor, to: GGMLType, same_shape: bool, layout: int, **operands: Any) -> None:
        """Check that the CPU has a copy kernel from `a` to a tensor of type `to` with this layout."""
        both = a.layout & layout
        if a.type is to:
            fits = not to.is_quantized or both & CONTIGUOUS or (same_shape and both & ROWS)
        elif a.type in FLOATS:
            if to in FLOATS:
                fits = True
            elif to is I32:
                fits = a.type is F32
            else:
                fits = CAN_STORE[to] and layout & CONTIGUOUS and a.layout & ROWS
        elif a.type is I32:
            fits = to is F32
        else:
            fits = CAN_EXPAND[a.type] and to is F32 and a.layout & ROWS and layout & CONTIGUOUS
        if not fits:
            raise refused(op, f"no kernel copies {a.type.label} to {to.label} with these strides", a=a, **operands)

    def cont(self, a: Tensor) -> Tensor:
        """Copy into contiguous memory."""
        self._own("cont", a)
        self._convertible("cont", a, a.type, True, FRESH)
        if a.ne[0] % a.type.block_size:
            raise refused("cont", "rows of whole blocks expected", a=a)
        return self._wrap(C.ggml_cont(self._ptr, a.ptr), limit=a.limit)

    def cont_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """Copy into contiguous memory with another shape of as many elements."""
        return self.cont_4d(a, ne0, ne1, 1, 1)

    def cont_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Copy into contiguous memory with another shape of as many elements."""
        return self.cont_4d(a, ne0, ne1, ne2, 1)

    def cont_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Copy into contiguous memory with another shape of as many elements."""
        self._own("cont", a)
        ne = (ne0, ne1, ne2, ne3)
        self._same_size("cont", a, ne)
        self._convertible("cont", a, a.type, a.ne == ne, FRESH)
        return self._wrap(C.ggml_cont_4d(self._ptr, a.ptr, ne0, ne1, ne2, ne3), limit=a.limit)

    def _same_size(self, op: str, a: Tensor, ne: Sequence[int]) -> None:
        n = 1
        for size in ne:
            n *= size
        if n != a.n_elements or min(ne) < 1 or ne[0] % a.type.block_size:
            raise refused(op, f"the shape {list(ne)} does not fit", a=a)

    def reshape(self, a: Tensor, b: Tensor) -> Tensor:
        """Look at `a` in the shape of `b`."""
        return self.reshape_4d(a, *b.ne)

    def reshape_1d(self, a: Tensor, ne0: int) -> Tensor:
        """Look at `a` in another shape of as many elements."""
        return self.reshape_4d(a, ne0, 1, 1, 1)

    def reshape_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """Look at `a` in another shape of as many elements."""
        return self.reshape_4d(a, ne0, ne1, 1, 1)

    def reshape_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Look at `a` in another shape of as many elements."""
        return self.reshape_4d(a, ne0, ne1, ne2, 1)

    def reshape_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Look at `a` in another shape of as many elements."""
        self._own("reshape", a)
        self._same_size("reshape", a, (ne0, ne1, ne2, ne3))
        if not a.layout & CONTIGUOUS:
            raise refused("reshape", "a contiguous tensor expected (use cont)", a=a)
        return self._view_of(a, C.ggml_reshape_4d(self._ptr, a.ptr, ne0, ne1, ne2, ne3))

    def view_1d(self, a: Tensor, ne0: int, offset: int) -> Tensor:
        """Look at `ne0` elements from byte `offset` on."""
        self._view("view_1d", a, (ne0, 1, 1, 1), (0, 0, 0), offset)
        return self._view_of(a, C.ggml_view_1d(self._ptr, a.ptr, ne0, offset))

    def view_2d(self, a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
        """Look at `ne1` rows, `nb1` bytes apart, from byte `offset` on."""
        self._view("view_2d", a, (ne0, ne1, 1, 1), (nb1, 0, 0), offset)
        return self._view_of(a, C.ggml_view_2d(self._ptr, a.ptr, ne0, ne1, nb1, offset))

    def view_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int) -> Tensor:
        """Look at a part with these sizes and byte strides, from byte `offset` on."""
        self._view("view_3d", a, (ne0, ne1, ne2, 1), (nb1, nb2, 0), offset)
        return self._view_of(a, C.ggml_view_3d(self._ptr, a.ptr, ne0, ne1, ne2, nb1, nb2, offset))

    def view_4d(
        self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int
    ) -> Tensor:
        """Look at a part with these sizes and byte strides, from byte `offset` on."""
        self._view("view_4d", a, (ne0, ne1, ne2, ne3), (nb1, nb2, nb3), offset)
        return self._view_of(a, C.ggml_view_4d(self._ptr, a.ptr, ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset))

    def _view(self, op: str, a: Tensor, ne: tuple[int, ...], nb: tuple[int, ...], offset: int) -> None:
        """Check that a view lies within the memory of `a` (or of what `a` is a view of), on whole blocks."""
        self._own(op, a)
        kind = a.type
        row, rest = divmod(ne[0], kind.block_size)
        size = kind.type_size
        start = offset + (int(a.ptr.view_offs) if a.root is not None else 0)
        end = start + row * size + (ne[1] - 1) * nb[0] + (ne[2] - 1) * nb[1] + (ne[3] - 1) * nb[2]
        # ggml asserts the same of the bytes the view would have without gaps, which small strides can undercut.
        end = max(end, start + row * size * ne[1] * ne[2] * ne[3])
        whole = rest or offset % size or nb[0] % size or nb[1] % size or nb[2] % size
        if min(ne) < 1 or min(nb) < 0 or offset < 0 or whole or end > (a.root or a).nbytes:
            raise refused(
                op, f"shape {list(ne)}, strides {list(nb)}, offset {offset} leave the memory or cut a block", a=a
            )

    def permute(self, a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
        """Look at `a` with its dimension i moved to place axis_i."""
        self._own("permute", a)
        if sorted((axis0, axis1, axis2, axis3)) != [0, 1, 2, 3]:
            raise refused("permute", f"{[axis0, axis1, axis2, axis3]} is not an order of the four axes", a=a)
        if axis0 and a.type.is_quantized:
            raise refused("permute", "the blocks of a quantized tensor stay along its first dimension", a=a)
        return self._view_of(a, C.ggml_permute(self._ptr, a.ptr, axis0, axis1, axis2, axis3))

    def transpose(self, a: Tensor) -> Tensor:
        """Look at `a` with its first two dimensions exchanged."""
        self._own("transpose", a)
        if a.type.is_quantized:
            raise refused("transpose", "the blocks of a quantized tensor stay along its first dimension", a=a)
        return self._view_of(a, C.ggml_transpose(self._ptr, a.ptr))

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """Put `b` behind `a` along dimension `dim`."""
        self._own("concat", a, b)
        if dim not in (0, 1, 2, 3) or a.type is not b.type or any(a.ne[i] != b.ne[i] for i in range(4) if i != dim):
            raise refused("concat", f"one type and shapes that differ in dimension {dim} only expected", a=a, b=b)
        self._rows("concat", a=a, b=b)
        self._size("concat", a.type, [n + (b.ne[i] if i == dim else 0) for i, n in enumerate(a.ne)], a=a, b=b)
        return self._wrap(C.ggml_concat(self._ptr, a.ptr, b.ptr, dim))

    def repeat(self, a: Tensor, b: Tensor) -> Tensor:
        """Repeat `a` to the shape of `b`."""
        return self.repeat_4d(a, *b.ne)

    def repeat_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Repeat `a` to this shape."""
        self._own("repeat", a)
        ne = (ne0, ne1, ne2, ne3)
        self._size("repeat", a.type, ne, a=a)
        if (
            any(n % m for n, m in zip(ne, a.ne, strict=True))
            or a.type not in (F32, F16, BF16, I16, I32)
            or not a.layout & ROWS
        ):
            raise refused("repeat", f"f32, f16, bf16, i16 or i32 rows that fill {list(ne)} expected", a=a)
        return self._wrap(C.ggml_repeat_4d(self._ptr, a.ptr, ne0, ne1, ne2, ne3), limit=a.limit)

    def pad(self, a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
        """Add zeros at the end of each dimension."""
        self._own("pad", a)
        pads = (p0, p1, p2, p3)
        if a.type is not F32 or min(pads) < 0 or max(pads) > INT32_MAX:
            raise refused("pad", f"f32 and no negative number among {list(pads)} expected", a=a)
        self._size("pad", F32, [n + p for n, p in zip(a.ne, pads, strict=True)], a=a)
        return self._wrap(C.ggml_pad(self._ptr, a.ptr, p0, p1, p2, p3))

    def arange(self, start: float, stop: float, step: float) -> Tensor:
        """Make the f32 numbers start, start + step, … below `stop`."""
        self._own("arange")
        with np.errstate(all="ignore"):  # what ggml computes, in float32 as there
            n = (np.float32(stop) - np.float32(start)) / np.float32(step)
        if not (n > 0 and n < INT32_MAX and np.float32(stop) > np.float32(start)):
            raise refused("arange", f"no sequence leads from {start} to {stop} in steps of {step}")
        return self._wrap(C.ggml_arange(self._ptr, start, stop, step))

    # --- rows ---

    def get_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Gather rows: a [n, rows, x, y], b i32 [k, x, y] → [n, k, x, y], f32 (i32 if `a` is)."""
        self._own("get_rows", a, b)
        ane, bne = a.ne, b.ne
        if ane[2] != bne[1] or ane[3] != bne[2] or bne[3] != 1 or b.type is not I32:
            raise refused("get_rows", "a [n, rows, x, y] and i32 b [k, x, y] expected", a=a, b=b)
        if not CAN_GET_ROWS[a.type] or not a.layout & ROWS:
            raise refused("get_rows", "no kernel gathers rows of this type with these strides", a=a, b=b)
        if ane[0] * bne[0] * bne[1] * bne[2] > MAX_ELEMENTS:
            raise refused("get_rows", "the result is too large", a=a, b=b)
        self._index("get_rows", b, ane[1], a=a, b=b)
        return self._wrap(C.ggml_get_rows(self._ptr, a.ptr, b.ptr), limit=a.limit)

    def set_rows(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Scatter: row c[i] of `a` becomes row i of `b`, converted; return a view of `a`.

        a [n, rows, x, y] of a type that can be stored, b f32 (f16 if `a` is) [n, k, x, y], c i64 or i32 [k, x / r, y
        / s]. No row number may occur twice.
        """
        self._own("set_rows", a, b, c)
        ane, bne, cne = a.ne, b.ne, c.ne
        if (
            ane[0] != bne[0]
            or ane[2:] != bne[2:]
            or bne[1] != cne[0]
            or bne[2] % cne[1]
            or bne[3] % cne[2]
            or cne[3] != 1
        ):
            raise refused("set_rows", "a [n, rows, x, y], b [n, k, x, y], c [k, x / r, y / s] expected", a=a, b=b, c=c)
        # ggml also takes f16 for other types of `a`, but its work buffer is then too small for more than one thread.
        fits = CAN_STORE[a.type] and (b.type is F32 or (b.type is F16 and a.type is F16))
        if not fits or c.type not in (I64, I32):
            raise refused("set_rows", "no kernel stores these types (b is f32, c i64 or i32)", a=a, b=b, c=c)
        if not a.layout & b.layout & ROWS:
            raise refused("set_rows", "the elements of each row have to be adjacent", a=a, b=b, c=c)
        root = self._writes("set_rows", a)
        self._index("set_rows", c, ane[1], a=a, b=b, c=c)
        return self._wrap(C.ggml_set_rows(self._ptr, a.ptr, b.ptr, c.ptr), root)

    # --- attention ---

    def soft_max(self, a: Tensor) -> Tensor:
        """Take the softmax of each row."""
        return self._contiguous("soft_max", C.ggml_soft_max, (F32,), a)

    def soft_max_ext(self, a: Tensor, mask: Tensor | None, scale: float, max_bias: float) -> Tensor:
        """Take the softmax of each row of a · scale + mask · slope; `max_bias` > 0 gives ALiBi slopes by head."""
        self._own("soft_max_ext", a)
        if a.type is not F32 or not a.layout & CONTIGUOUS:
            raise refused("soft_max_ext", "contiguous f32 expected", a=a, mask=mask)
        if mask is None:
            if not max_bias <= 0:
                raise refused("soft_max_ext", f"max_bias {max_bias} needs a mask", a=a)
            return self._wrap(C.ggml_soft_max_ext(self._ptr, a.ptr, NULL, scale, max_bias))
        self._own("soft_max_ext", mask)
        ane, mne = a.ne, mask.ne
        if mne[0] != ane[0] or mne[1] < ane[1] or ane[2] % mne[2] or ane[3] % mne[3]:
            raise refused(
                "soft_max_ext", "mask [ne0, ne1 or more, divisor of ne2, divisor of ne3] expected", a=a, mask=mask
            )
        if mask.type not in (F16, F32) or not mask.layout & CONTIGUOUS:
            raise refused("soft_max_ext", "a contiguous f16 or f32 mask expected", a=a, mask=mask)
        return self._wrap(C.ggml_soft_max_ext(self._ptr, a.ptr, mask.ptr, scale, max_bias))

    def soft_max_add_sinks(self, a: Tensor, sinks: Tensor | None) -> None:
        """Let each head (dimension 2) of the softmax `a` share its weight with a sink: f32 [n_head]."""
        self._add_sinks("soft_max_add_sinks", "SOFT_MAX", 2, C.ggml_soft_max_add_sinks, a, sinks)

    def _add_sinks(self, op: str, kind: str, slot: int, function: Any, a: Tensor, sinks: Tensor | None) -> None:
        self._mine(op, a)
        if sinks is None:
            return
        if sinks.ctx is not self:
            self._adopt(op, sinks)
        if a.op != kind or a.ptr.src[slot] != NULL:
            raise refused(op, f"the result of a {kind.lower()} without sinks expected", a=a, sinks=sinks)
        n_head = a.ptr.src[0].ne[2]
        if sinks.type is not F32 or sinks.ne != (n_head, 1, 1, 1) or not sinks.layout & CONTIGUOUS:
            raise refused(op, f"sinks f32 [{n_head}] expected", a=a, sinks=sinks)
        # A context lays its tensors out in the order they are made: nothing older can be computed from something newer.
        if not sinks.flags & LEAF and address_of(sinks.ptr) > address_of(a.ptr):
            raise refused(op, "computed sinks have to be made before what they are added to", a=a, sinks=sinks)
        function(a.ptr, sinks.ptr)

    def flash_attn_ext(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, max_bias: float, logit_softcap: float
    ) -> Tensor:
        """Attend: q [d, m, n_head, s], k [d, n, n_head_kv, s], v [e, n, n_head_kv, s] → f32 [e, n_head, m, s].

        mask f16 [n, m or more, divisor of n_head, divisor of s], contiguous, or None; n_head is a multiple of
        n_head_kv.
        """
        self._own("flash_attn_ext", q, k, v)
        qne, kne, vne = q.ne, k.ne, v.ne
        if qne[0] != kne[0] or kne[1:] != vne[1:] or qne[2] % kne[2] or qne[3] != kne[3]:
            raise refused(
                "flash_attn_ext", "q [d, m, h, s], k [d, n, h / r, s], v [e, n, h / r, s] expected", q=q, k=k, v=v
            )
        if q.type is not F32 or not CAN_MULTIPLY[k.type] or not CAN_MULTIPLY[v.type]:
            raise refused("flash_attn_ext", "no kernel for these types (q has to be f32)", q=q, k=k, v=v)
        if not q.layout & k.layout & v.layout & ROWS:
            raise refused("flash_attn_ext", "the elements of each row have to be adjacent", q=q, k=k, v=v)
        if qne[1] * qne[2] * qne[3] * vne[0] > MAX_ELEMENTS:
            raise refused("flash_attn_ext", "the result is too large", q=q, k=k, v=v)
        at = NULL
        if mask is not None:
            self._own("flash_attn_ext", mask)
            mne = mask.ne
            if mne[0] != kne[1] or mne[1] < qne[1] or qne[2] % mne[2] or qne[3] % mne[3]:
                raise refused(
                    "flash_attn_ext", "mask [n, m or more, divisor of h, divisor of s] expected", q=q, k=k, mask=mask
                )
            if mask.type is not F16 or not mask.layout & CONTIGUOUS:
                raise refused("flash_attn_ext", "a contiguous f16 mask expected", q=q, k=k, mask=mask)
            at = mask.ptr
        elif not max_bias <= 0:
            raise refused("flash_attn_ext", f"max_bias {max_bias} needs a mask", q=q, k=k, v=v)
        return self._wrap(C.ggml_flash_attn_ext(self._ptr, q.ptr, k.ptr, v.ptr, at, scale, max_bias, logit_softcap))

    def flash_attn_ext_add_sinks(self, a: Tensor, sinks: Tensor | None) -> None:
        """Let each head of the attention `a` share its weight with a sink: f32 [n_head]."""
        self._add_sinks("flash_attn_ext_add_sinks", "FLASH_ATTN_EXT", 4, C.ggml_flash_attn_ext_add_sinks, a, sinks)

    def flash_attn_ext_set_n_kv_max(self, a: Tensor, n_kv_max: int) -> None:
        """Promise that no row of the mask of `a` has more finite entries than this; 0 promises nothing."""
        self._mine("flash_attn_ext_set_n_kv_max", a)
        if a.op != "FLASH_ATTN_EXT" or not 0 <= n_kv_max <= INT32_MAX:
            raise refused("flash_attn_ext_set_n_kv_max", f"{n_kv_max} cannot be set", a=a)
        C.ggml_flash_attn_ext_set_n_kv_max(a.ptr, n_kv_max)

    def rope_ext(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """Rotate by position: a [head_dim, n_head, n_tokens, s], b i32 [n_tokens], c f32 frequency factors or None.

        Mode 0 turns neighbouring pairs, 2 (NEOX) pairs half of `n_dims` apart. The rest are YaRN's parameters
        (arXiv:2309.00071).
        """
        if mode not in (0, 2):
            raise refused("rope_ext", f"mode 0 or 2 expected, not {mode}", a=a, b=b)
        factors = self._rope("rope_ext", a, b, c, n_dims, n_ctx_orig, 1)
        return self._wrap(
            C.ggml_rope_ext(
                self._ptr, a.ptr, b.ptr, factors, n_dims, mode, n_ctx_orig,
                freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow,
            )
        )  # fmt: skip

    def rope_multi(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        sections: Sequence[int],
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """Rotate by four positions per token: b i32 [4 · n_tokens], in four planes; `sections` counts each one's pairs.

        Mode 8 is MROPE, 40 IMROPE, 24 VISION.
        """
        parts = tuple(sections)
        if mode not in (8, 24, 40) or (mode == 24 and n_dims * 2 != a.ne[0]):
            raise refused("rope_multi", f"mode 8, 40, or 24 with n_dims half of ne0 expected, not {mode}", a=a, b=b)
        if len(parts) != 4 or min(parts) < 0 or max(parts[:3]) < 1 or sum(parts) > a.ne[0]:
            raise refused("rope_multi", f"four sections with a sum of 1 to ne0 expected, not {list(parts)}", a=a, b=b)
        factors = self._rope("rope_multi", a, b, c, n_dims, n_ctx_orig, 4)
        return self._wrap(
            C.ggml_rope_multi(
                self._ptr, a.ptr, b.ptr, factors, n_dims, list(parts), mode, n_ctx_orig,
                freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow,
            )
        )  # fmt: skip

    def _rope(
        self, op: str, a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, n_ctx_orig: int, per_token: int
    ) -> Any:
        self._own(op, a, b)
        ne = a.ne
        if a.type not in (F32, F16) or not a.layout & ROWS or n_dims < 2 or n_dims > ne[0] or (n_dims | ne[0]) & 1:
            raise refused(
                op, f"f32 or f16 rows of an even length of at least n_dims = {n_dims} (even) expected", a=a, b=b
            )
        if b.type is not I32 or b.n_elements != b.ne[0] or b.ne[0] != ne[2] * per_token or not b.layout & CONTIGUOUS:
            raise refused(op, f"i32 positions [{ne[2] * per_token}] expected", a=a, b=b)
        if not -INT32_MAX <= n_ctx_orig <= INT32_MAX:
            raise refused(op, f"n_ctx_orig {n_ctx_orig} is out of range", a=a, b=b)
        if c is None:
            return NULL
        self._own(op, c)
        if c.type is not F32 or c.ne[0] < n_dims // 2 or not c.layout & CONTIGUOUS:
            raise refused(op, f"f32 factors [{n_dims // 2} or more] expected", a=a, b=b, c=c)
        return c.ptr

    def rope_set_offset(self, a: Tensor, n_offs: int) -> None:
        """Let the rotation `a` begin at element `n_offs` of each row instead of the first."""
        self._mine("rope_set_offset", a)
        n_dims, mode = a.ptr.op_params[1], a.ptr.op_params[2]
        if a.op != "ROPE" or mode == 24 or n_offs < 0 or n_offs % 2 or n_offs + n_dims > a.ne[0]:
            raise refused("rope_set_offset", f"a rotation that leaves room for the offset {n_offs} expected", a=a)
        C.ggml_rope_set_offset(a.ptr, n_offs)

    # --- order ---

    def argsort(self, a: Tensor, order: int) -> Tensor:
        """Order each row, ascending (0) or descending (1): the i32 places of its elements."""
        if order not in (0, 1):
            raise refused("argsort", f"order 0 or 1 expected, not {order}", a=a)
        return self._order("argsort", C.ggml_argsort, a, order)

    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """Give the places of the `k` largest elements of each row, in descending order: a view of `argsort`."""
        if not 0 < k <= a.ne[0]:
            raise refused("argsort_top_k", f"a row does not have {k} elements", a=a)
        s = self.argsort(a, 1)
        return self.view_4d(s, k, *s.ne[1:], *s.nb[1:], 0)

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Give the places of the `k` largest elements of each row, in no particular order."""
        if not 0 < k <= a.ne[0]:
            raise refused("top_k", f"a row does not have {k} elements", a=a)
        return self._order("top_k", C.ggml_top_k, a, k)

    def argmax(self, a: Tensor) -> Tensor:
        """Give the place of the largest element of each row: a [n, rows] → i32 [rows]."""
        if a.ne[2] * a.ne[3] != 1:
            raise refused("argmax", "a matrix expected", a=a)
        return self._order("argmax", C.ggml_argmax, a)

    def _order(self, op: str, function: Any, a: Tensor, *numbers: int) -> Tensor:
        self._own(op, a)
        if a.type is not F32 or a.layout & (ROWS | CONTIGUOUS_1) != ROWS | CONTIGUOUS_1 or a.ne[0] > INT32_MAX:
            raise refused(op, "f32 rows without gaps expected", a=a)
        return self._wrap(function(self._ptr, a.ptr, *numbers), limit=a.ne[0])
