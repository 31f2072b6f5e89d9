"""The operations of recurrent and hybrid models: state spaces, linear attention, delta rules.

Each kernel walks plain memory, so operands are f32 and contiguous unless a method says otherwise.
"""

# ruff: noqa: N803, N806  (the letters are those of the papers, and ggml's)

from __future__ import annotations

from ggufpy._ffi.lib import C
from ggufpy.gguf import GGMLType
from ggufpy.graph.context import ContextBase
from ggufpy.graph.tensor import CONTIGUOUS, INT32_MAX, MAX_ELEMENTS, ROWS, STEPS, Tensor, refused

__all__ = ["RecurrentOperations"]

F32, I32 = GGMLType.F32, GGMLType.I32


def _is_packed(t: Tensor) -> bool:
    return bool(t.layout & CONTIGUOUS and t.layout & STEPS and t.nb[1] == t.ne[0] * t.nb[0])


class RecurrentOperations(ContextBase):
    """What models with a state need beside the ordinary operations."""

    def _plain(self, op: str, layout: int = CONTIGUOUS, **operands: Tensor) -> None:
        # Where there is one row or one matrix only, ggml takes any stride for contiguous; the kernels use it even so.
        whole = layout == CONTIGUOUS
        for t in operands.values():
            if t.type is not F32 or not t.layout & ROWS or (whole and not _is_packed(t)):
                what = "contiguous f32" if whole else "f32 with adjacent elements in each row"
                raise refused(op, f"{what} expected", **operands)

    def ssm_conv(self, sx: Tensor, c: Tensor) -> Tensor:
        """Convolve each channel: sx [d_conv − 1 + t, d_inner, s], c [d_conv, d_inner] → [d_inner, t, s]."""
        self._own("ssm_conv", sx, c)
        self._plain("ssm_conv", sx=sx, c=c)
        if sx.ne[3] * c.ne[2] * c.ne[3] != 1 or sx.ne[1] != c.ne[1] or sx.ne[0] < c.ne[0]:
            raise refused("ssm_conv", "sx [k − 1 + t, n, s] and c [k, n] expected", sx=sx, c=c)
        return self._wrap(C.ggml_ssm_conv(self._ptr, sx.ptr, c.ptr))

    def ssm_scan(
        self,
        s: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C_: Tensor,
        ids: Tensor,
        K: int = 1,
    ) -> Tensor:
        """Run a selective state space: the outputs, then `K` states, in one row (`ggml_ssm_scan`).

        s [d_state, dim, n_head, rows], x [dim, n_head, t, n_seqs], dt [n_head, t, n_seqs], A [d_state or 1, n_head],
        B and C_ [d_state, n_group, t, n_seqs], ids i32 [n_seqs]: the row of `s` each sequence starts from. `x`, `B` and
        `C_` may have gaps between tokens. More than one state is kept with A [1, n_head] only; where there are more
        places than tokens, nothing is written to the last ones.
        """
        operands = {"s": s, "x": x, "dt": dt, "A": A, "B": B, "C_": C_}
        self._own("ssm_scan", *operands.values(), ids)
        self._plain("ssm_scan", s=s, dt=dt, A=A)
        self._plain("ssm_scan", ROWS, x=x, B=B, C_=C_)
        d_state, dim, n_head, _ = s.ne
        n_group, t, n_seqs = B.ne[1], x.ne[2], x.ne[3]
        fits = (
            x.ne[:2] == (dim, n_head)
            and dt.ne == (n_head, t, n_seqs, 1)
            and A.ne in ((d_state, n_head, 1, 1), (1, n_head, 1, 1))
            and B.ne == C_.ne == (d_state, n_group, t, n_seqs)
            and n_head % n_group == 0
            and ids.ne == (n_seqs, 1, 1, 1)
            and ids.type is I32
            and ids.layout & ROWS
            and all(u.nb[1] == u.ne[0] * u.nb[0] for u in (x, B, C_))
        )
        if not fits or not 1 <= K <= INT32_MAX or (K > 1 and A.ne[0] != 1):
            raise refused("ssm_scan", f"these shapes do not fit together (K = {K})", **operands, ids=ids)
        if x.n_elements + K * d_state * dim * n_head * n_seqs > MAX_ELEMENTS:
            raise refused("ssm_scan", "the result is too large", **operands)
        self._index("ssm_scan", ids, s.ne[3], s=s, ids=ids)
        pointers = [operand.ptr for operand in operands.values()]
        return self._wrap(C.ggml_ssm_scan(self._ptr, *pointers, ids.ptr, K))

    def _per_token(self, op: str, state: Tensor, **operands: Tensor) -> None:
        """Check operands [S, H, t] of equal shape and a state [S · S · H, n_seqs] of equally long sequences."""
        self._own(op, *operands.values(), state)
        self._plain(op, CONTIGUOUS, **operands, state=state)
        S, H, t, rest = next(iter(operands.values())).ne
        equal = all(operand.ne == (S, H, t, 1) for operand in operands.values())
        if not equal or rest != 1 or state.ne != (S * S * H, state.ne[1], 1, 1) or t % state.ne[1]:
            raise refused(op, "equal shapes [S, H, t] and a state [S · S · H, s], s a divisor of t, expected",
                          **operands, state=state)  # fmt: skip
        if S * H * (t + S * state.ne[1]) > MAX_ELEMENTS:
            raise refused(op, "the result is too large", **operands, state=state)

    def rwkv_wkv6(self, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
        """Attend as RWKV 6: k, v, r, td [S, H, t], tf [S, H], state [S·S·H, n_seqs] → [S·H, t + S·n_seqs]."""
        self._per_token("rwkv_wkv6", state, k=k, v=v, r=r, td=td)
        self._own("rwkv_wkv6", tf)
        self._plain("rwkv_wkv6", tf=tf)
        if tf.n_elements != k.ne[0] * k.ne[1]:
            raise refused("rwkv_wkv6", "tf [S, H] expected", k=k, tf=tf)
        return self._wrap(C.ggml_rwkv_wkv6(self._ptr, k.ptr, v.ptr, r.ptr, tf.ptr, td.ptr, state.ptr))

    def rwkv_wkv7(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
        """Attend as RWKV 7: six operands [S, H, t], state [S·S·H, n_seqs] → [S·H, t + S·n_seqs]."""
        self._per_token("rwkv_wkv7", state, r=r, w=w, k=k, v=v, a=a, b=b)
        if k.ne[0] % 64:  # the kernel takes so many at a time, and does not look for the end
            raise refused("rwkv_wkv7", "heads of a multiple of 64 elements expected", r=r)
        return self._wrap(C.ggml_rwkv_wkv7(self._ptr, r.ptr, w.ptr, k.ptr, v.ptr, a.ptr, b.ptr, state.ptr))

    def gated_linear_attn(self, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
        """Attend linearly with gates: k, v, q, g [S, H, t], state [S·S·H, n_seqs] → [S·H, t + S·n_seqs]."""
        self._per_token("gated_linear_attn", state, k=k, v=v, q=q, g=g)
        return self._wrap(C.ggml_gated_linear_attn(self._ptr, k.ptr, v.ptr, q.ptr, g.ptr, state.ptr, scale))

    def gated_delta_net(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        K: int = 1,
    ) -> Tensor:
        """Attend by the gated delta rule: [S·H, t·n_seqs + K·S·n_seqs], the outputs, then the latest `K` states.

        v [S, H, t, n_seqs], q and k [S, divisor of H, t, divisor of n_seqs] (these three may have gaps between rows),
        g [1 or S, H, t, n_seqs], beta [1, H, t, n_seqs], state [S, S, H, n_seqs]. States stand latest first; where
        there are more places than tokens, nothing is written to the last ones.
        """
        operands = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
        self._own("gated_delta_net", *operands.values())
        self._plain("gated_delta_net", ROWS, q=q, k=k, v=v)
        self._plain("gated_delta_net", g=g, beta=beta, state=state)
        S, H, t, n_seqs = v.ne
        fits = (
            all(u.ne[0] == S and u.ne[2] == t and H % u.ne[1] == 0 and n_seqs % u.ne[3] == 0 for u in (q, k))
            and g.ne in ((1, H, t, n_seqs), (S, H, t, n_seqs))
            and beta.ne == (1, H, t, n_seqs)
            and state.ne == (S, S, H, n_seqs)
        )
        if not fits or not 1 <= K <= INT32_MAX:
            raise refused("gated_delta_net", f"these shapes do not fit together (K = {K})", **operands)
        if S * H * n_seqs * (t + K * S) > MAX_ELEMENTS:
            raise refused("gated_delta_net", "the result is too large", **operands)
        pointers = [operand.ptr for operand in operands.values()]
        return self._wrap(C.ggml_gated_delta_net(self._ptr, *pointers, K))

    def solve_tri(self, a: Tensor, b: Tensor, left: bool = True, lower: bool = True, uni: bool = False) -> Tensor:
        """Solve a x = b for lower triangular matrices a [n, n, x, y], b [k, n, x, y] → [k, n, x, y]."""
        self._own("solve_tri", a, b)
        self._plain("solve_tri", a=a, b=b)
        if a.ne[0] != a.ne[1] or a.ne[1:] != b.ne[1:] or not (left and lower) or uni:
            raise refused("solve_tri", "a [n, n, x, y], lower and on the left, and b [k, n, x, y] expected", a=a, b=b)
        return self._wrap(C.ggml_solve_tri(self._ptr, a.ptr, b.ptr, left, lower, uni))

    def tri(self, a: Tensor, type: int) -> Tensor:
        """Keep a triangle of square matrices: upper with (0) or without (1) the diagonal, lower with (2) or without."""
        self._own("tri", a)
        self._plain("tri", a=a)
        if a.ne[0] != a.ne[1] or type not in (0, 1, 2, 3):
            raise refused("tri", f"square matrices and a type of 0 to 3 expected, not {type}", a=a)
        return self._wrap(C.ggml_tri(self._ptr, a.ptr, type))
