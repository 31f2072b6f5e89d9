"""Qwen 3 Next, 3.5 and 3.6: three layers of four are gated delta nets, which keep a matrix for each head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ggufpy.arch.decoder import IMROPE, NEOX, REQUIRED, Config, Has, Moe, Tensor, TensorSpec, f32, inv_sqrt, linear
from ggufpy.arch.hybrid import Hybrid

__all__ = ["Qwen3Next", "Qwen35", "Qwen35Moe"]

SSM = {
    "ssm_d_conv": REQUIRED, "ssm_d_inner": REQUIRED, "ssm_d_state": REQUIRED, "ssm_dt_rank": REQUIRED,
    "ssm_n_group": REQUIRED, "is_recurrent": (), "full_attention_interval": 4,
}  # fmt: skip


class GatedAttention(Hybrid):
    """Attention whose output is weighed by a gate that the queries' matrix brings along."""

    qk_norm = "head"
    partial_rope = True
    copy_fused = True

    def heads(self, il: int) -> tuple[tuple[int, int], ...]:
        """Return the heads' shapes; each head of queries has its gate behind it."""
        (d, n), *others = super().heads(il)
        return (d, 2 * n), *others

    def weaken(self, cur: Tensor, x: Tensor, il: int) -> Tensor:
        gate = self.g.cont_2d(self.gate, *cur.ne[:2])
        return self.g.mul(self.named(cur, "attn_pregate", il), self.g.sigmoid(gate))

    def qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries and their gates, keys and values."""
        both, k, v = super().qkv(x, il)
        d, n, n_tokens, _ = both.ne
        q, self.gate = (self.g.view_3d(both, d, n // 2, n_tokens, 2 * d * 4, both.nb[2], i * d * 4) for i in (0, 1))
        return q, k, v


class DeltaRule(GatedAttention):
    """Recurrent layers keep a matrix for each head, which the gated delta rule changes (arXiv:2412.06464)."""

    def states(self) -> Mapping[int, Mapping[str, int]]:
        c = self.c
        widths = {"r": (c.ssm_d_conv - 1) * self.n_channels(), "s": c.ssm_d_state * c.ssm_d_inner}
        return {il: widths for il, n in enumerate(c.n_head_kv) if not n}

    def n_channels(self) -> int:
        """Return how many values queries, keys and values have together."""
        c = self.c
        return c.ssm_d_inner + 2 * c.ssm_n_group * c.ssm_d_state

    def recurrent_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        yield from linear("attn_qkv", c.n_embd, self.n_channels(), False)
        yield from linear("attn_gate", c.n_embd, c.ssm_d_inner, False)
        yield from linear("ssm_beta", c.n_embd, c.ssm_dt_rank, False)
        yield from linear("ssm_alpha", c.n_embd, c.ssm_dt_rank, False)
        yield from self.delta_tensors()

    def delta_tensors(self) -> Iterator[TensorSpec]:
        """List what stands behind a recurrent layer's first matrices."""
        c = self.c
        yield TensorSpec("ssm_conv1d.weight", (c.ssm_d_conv, self.n_channels()), f32=True)
        yield TensorSpec("ssm_dt.bias", (c.ssm_dt_rank,))
        yield TensorSpec("ssm_a", (c.ssm_dt_rank,))
        yield TensorSpec("ssm_norm.weight", (c.ssm_d_state,))
        yield from linear("ssm_out", c.ssm_d_inner, c.n_embd, False)

    def recur(self, x: Tensor, il: int) -> Tensor:
        """Convolve queries, keys and values, let them change the state by the gated delta rule, and read it."""
        g, c, blk = self.g, self.c, f"blk.{il}"
        d, n_k, n_v = c.ssm_d_state, c.ssm_n_group, c.ssm_dt_rank
        mixed, z = self.mixed_qkv(x, il)
        beta, alpha = self.beta_alpha(x, il)
        decay = g.mul(g.softplus(g.add(alpha, self.w[f"{blk}.ssm_dt.bias"])), self.w[f"{blk}.ssm_a"])
        decay = self.named(self.by_sequence(decay, 1, n_v), "gate", il)
        joined = self.behind_state(mixed, c.ssm_d_conv - 1, il)
        state = g.reshape_4d(self.memory.load("s", il), d, d, n_v, self.memory.n_seqs)
        y = g.silu(g.ssm_conv(joined, self.w[f"{blk}.ssm_conv1d.weight"]))
        _, n, n_seqs, _ = y.ne
        q, k, v = (
            g.view_4d(y, d, heads, n, n_seqs, d * 4, y.nb[1], y.nb[2], first * d * 4)
            for heads, first in ((n_k, 0), (n_k, n_k), (n_v, 2 * n_k))
        )
        q, k = self.spread(self.unit(q)), self.spread(self.unit(k))
        both = g.gated_delta_net(q, k, v, decay, g.sigmoid(beta), state)
        n_out = d * n_v * n * n_seqs
        out = g.view_4d(both, d, n_v, n, n_seqs, d * 4, d * n_v * 4, d * n_v * n * 4, 0)
        self.memory.save(self.graph, g.view_1d(both, d * d * n_v * n_seqs, n_out * 4), "s", il)
        out = self.normalize(self.named(out, "attn_output", il), f"{blk}.ssm_norm", "attn_out_norm", il)
        out = g.mul(out, g.silu(g.reshape_4d(z, d, n_v, n, n_seqs)))
        return g.reshape_2d(self.linear(self.by_sequence(out, d * n_v), f"{blk}.ssm_out"), c.n_embd, n * n_seqs)

    def mixed_qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """Project to queries, keys and values in one, [n_channels, n_tokens each, n_seqs], and to the output's gate."""
        mixed, z = (self.linear(x, f"blk.{il}.attn_{role}") for role in ("qkv", "gate"))
        return self.by_sequence(mixed, mixed.ne[0]), z

    def beta_alpha(self, x: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """Project to how much is learned, [1, n_head, n_tokens each, n_seqs], and forgotten, [n_head, ...]."""
        beta, alpha = (self.linear(x, f"blk.{il}.ssm_{role}") for role in ("beta", "alpha"))
        n = self.c.ssm_dt_rank
        return self.by_sequence(beta, 1, n), self.by_sequence(alpha, n)

    def unit(self, x: Tensor) -> Tensor:
        """Scale rows to a length of one."""
        n = x.ne[0]
        return self.g.scale(self.g.rms_norm(x, f32(f32(self.c.norm_rms_eps) / n)), inv_sqrt(n))

    def spread(self, x: Tensor) -> Tensor:
        """Do what heads of queries and keys need that are fewer than those of values: nothing, the rule takes turns."""
        return x


class Qwen35(DeltaRule, name="qwen35"):
    """Qwen 3.5: rotation by sections that are interleaved. Only text is supported."""

    keys = {**SSM, "rope_sections": REQUIRED}
    rope = IMROPE
    ffn_norm = "post_attention_norm"
    ffn_scale = True
    crop = "last"
    nextn = True
    tiny = {
        "n_layer": 4, "ssm_d_conv": 4, "ssm_d_inner": 128, "ssm_d_state": 32, "ssm_dt_rank": 4, "ssm_n_group": 2,
    }  # fmt: skip
    tiny_variants = {
        "interval": {"full_attention_interval": 2},
        "recurrent-layers": {"is_recurrent": [False, True, True, True]},
        "as-many-heads": {"ssm_n_group": 4},
        "nextn": {"n_layer": 5, "n_layer_nextn": 1},
    }

    def check(self) -> Iterator[str]:
        c = self.c
        if c.ssm_d_inner != c.ssm_d_state * c.ssm_dt_rank:
            yield f"ssm.inner_size: expected {c.ssm_dt_rank} heads of {c.ssm_d_state}, found {c.ssm_d_inner}"
        if c.ssm_dt_rank % c.ssm_n_group:
            yield f"ssm.group_count: expected a divisor of {c.ssm_dt_rank} (ssm.time_step_rank), found {c.ssm_n_group}"

    def adjust(self) -> Config:
        """Take the heads of keys and values from recurrent layers."""
        c = self.c
        step = c.full_attention_interval
        recurrent = c.is_recurrent or [(il + 1) % step != 0 for il in range(c.n_layer)]
        return replace(c, n_head_kv=tuple(0 if r else n for r, n in zip(recurrent, c.n_head_kv, strict=True)))

    def nextn_config(self) -> Config:
        return replace(self.c, n_head_kv=(max(self.c.n_head_kv),) * self.c.n_layer)


class Qwen35Moe(Qwen35, name="qwen35moe"):
    """Qwen 3.5 with experts, and shared ones that a gate of their own weighs for each token."""

    keys = {**SSM, "n_ff_exp": 0, "n_ff_shexp": 0, "rope_sections": REQUIRED}
    moe = Moe(split_ff=True, shared="dense", shared_gate=True, fused=True, scale=True)


class Qwen3Next(Qwen35Moe, name="qwen3next"):
    """Qwen 3 Next: one matrix for beta and alpha, and older files' one for queries, keys, values and gate."""

    keys = {**SSM, "n_ff_exp": 0, "n_ff_shexp": 0}
    rope = NEOX
    tiny_variants = {**Qwen35.tiny_variants, "ssm-in": {"has": "ssm_in.weight"}}

    def recurrent_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        c = self.c
        if "ssm_in.weight" in has:
            yield TensorSpec("ssm_in.weight", (c.n_embd, self.n_channels() + c.ssm_d_inner))
        else:
            yield TensorSpec("attn_qkv.weight", (c.n_embd, self.n_channels()))
            yield TensorSpec("attn_gate.weight", (c.n_embd, c.ssm_d_inner))
        yield TensorSpec("ssm_ba.weight", (c.n_embd, 2 * c.ssm_dt_rank))
        yield from (spec for spec in self.delta_tensors() if spec.name != "ssm_out.scale")

    def mixed_qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor]:
        if f"blk.{il}.ssm_in.weight" not in self.w:
            return super().mixed_qkv(x, il)
        d, n = self.c.ssm_d_state, self.c.ssm_d_inner // self.c.ssm_n_group
        q, k, v, z = self.of_groups(self.linear(x, f"blk.{il}.ssm_in"), d, d, n, n)
        mixed = self.g.concat(self.g.concat(q, k, 0), v, 0)
        return self.by_sequence(mixed, mixed.ne[0]), z

    def beta_alpha(self, x: Tensor, il: int) -> tuple[Tensor, Tensor]:
        n_v, n = self.c.ssm_dt_rank, self.c.ssm_dt_rank // self.c.ssm_n_group
        beta, alpha = self.of_groups(self.linear(x, f"blk.{il}.ssm_ba"), n, n)
        return self.by_sequence(beta, 1, n_v), self.by_sequence(alpha, n_v)

    def of_groups(self, x: Tensor, *widths: int) -> Iterator[Tensor]:
        """Split each group of heads in parts of these widths; yields each part of all groups, [n, n_tokens]."""
        g, n_group, n_tokens, first = self.g, self.c.ssm_n_group, x.ne[1], 0
        x = g.reshape_3d(x, sum(widths), n_group, n_tokens)
        for n in widths:
            yield g.cont_2d(g.view_3d(x, n, n_group, n_tokens, x.nb[1], x.nb[2], first * 4), n * n_group, n_tokens)
            first += n

    def spread(self, x: Tensor) -> Tensor:
        """Repeat each head for the heads of values that it serves, which are neighbours here."""
        g, (d, n_k, n, n_seqs), n_v = self.g, x.ne, self.c.ssm_dt_rank
        if n_k == n_v:
            return x
        x = g.repeat_4d(g.reshape_4d(x, d, 1, n_k, n * n_seqs), d, n_v // n_k, n_k, n * n_seqs)
        return g.reshape_4d(x, d, n_v, n, n_seqs)
