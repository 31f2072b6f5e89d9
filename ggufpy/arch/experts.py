"""Mixtures of experts: which layers have them, their tensors, the router's choice, and the weighted sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ggufpy.arch.ffn import FeedForward
from ggufpy.arch.scaling import f32
from ggufpy.arch.tensors import Has, Presence, TensorSpec
from ggufpy.graph import Tensor

__all__ = ["CLAMP_MIN", "GATING", "ROUTER", "Experts", "Moe"]

CLAMP_MIN = 1e-6
"""Limits of SwiGLU that are no larger mean none."""
MIN_F16 = 6.103515625e-5
GATING = {1: "softmax", 2: "sigmoid", 3: "softmax_weight", 4: "sqrt_softplus"}
ROUTER = {"expert_gating_func": 0, "expert_weights_scale": 0.0, "expert_weights_norm": False}
"""Keys by which a file describes its router, with their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """What experts a model has, and how a router's logits become the weights of the chosen (build_moe_ffn).

    An architecture that reads `expert_gating_func` lets the file say so, with `gating` for files that do not; None for
    either leaves it to the file alone (`normalize`: to `expert_weights_norm`).
    """

    required: bool = True  # False: the same name stands for dense models too
    gate: Presence = True  # of the experts
    by_tensors: bool = False  # which layers have experts is seen from the file's tensors alone
    gating: str | None = "softmax"  # or "sigmoid", "softmax_weight" (softmax over the chosen), "sqrt_softplus"
    normalize: bool | None = True
    bias: Presence = False  # added for the choice only
    bias_name: str = "exp_probs_b.bias"
    split_ff: bool = False  # without a width of their own, the experts of a token share feed_forward_length
    shared: str = ""
    """Experts that every token uses, as wide together as `expert_shared_count` others ("many"), as "one" other, or as
    "dense" layers are, if no key says how wide."""
    shared_gate: bool = False  # which a gate weighs for each token
    fused: bool = False  # the file may have gate and up as one matrix
    scale: bool = False  # the file may have scales of the experts' matrices
    expert_bias: bool = False
    select_logits: bool = False  # choose by the logits, whatever the gating
    weight_first: bool = False  # weigh what goes into the experts, not what comes out


class Experts(FeedForward):
    """A layer's FFN: dense, or experts and those that all tokens share."""

    moe: ClassVar[Moe | None] = None

    def ffn_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        """List the tensors of a layer's FFN, dense or with experts."""
        if self.is_moe(il, has):
            yield from self.moe_tensors(il, has)
        else:
            yield from self.dense_tensors(self.c.n_ff[il])

    def is_moe(self, il: int, has: Has = ()) -> bool:
        """Say whether a layer has experts, by the keys or by the names it has in the file."""
        c = self.c
        if self.moe and self.moe.by_tensors:
            return any("_exps." in name or "ffn_gate_inp." in name for name in has) if has else il > 0
        step = c.interleave_moe_layer_step or 1
        return bool(self.moe and c.n_expert and il >= c.n_layer_dense_lead and (il + 1) % step == 0)

    def moe_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        """List the tensors of a layer's router and experts."""
        c = self.c
        assert self.moe is not None
        moe, n_ff, n_expert = self.moe, self.n_ff_exp(il), c.n_expert
        yield TensorSpec("ffn_gate_inp.weight", (c.n_embd, n_expert))
        if moe.expert_bias:
            yield TensorSpec("ffn_gate_inp.bias", (n_expert,))
        if moe.fused and "ffn_gate_up_exps.weight" in has:
            matrices = [("gate_up", c.n_embd, n_ff * 2), ("down", n_ff, c.n_embd)]
        else:
            matrices = [("gate", c.n_embd, n_ff), ("up", c.n_embd, n_ff), ("down", n_ff, c.n_embd)]
        for role, n_in, n_out in matrices:
            if role == "gate" and moe.gate is False:
                continue
            optional = role == "gate" and moe.gate is None
            yield TensorSpec(f"ffn_{role}_exps.weight", (n_in, n_out, n_expert), optional)
            if moe.expert_bias:
                yield TensorSpec(f"ffn_{role}_exps.bias", (n_out, n_expert), f32=True)
            if moe.scale and role != "gate_up":
                yield TensorSpec(f"ffn_{role}_exps.scale", (n_expert,), optional=True)
        if moe.bias is not False:
            yield TensorSpec(moe.bias_name, (n_expert,), optional=moe.bias is None)
        if moe.shared and (width := self.n_ff_shexp(il)):
            yield from self.dense_tensors(width, "_shexp")
        if moe.shared_gate:
            yield TensorSpec("ffn_gate_inp_shexp.weight", (c.n_embd,))

    def n_ff_exp(self, il: int) -> int:
        """Return an expert's width."""
        c = self.c
        own = c.n_ff_exp[il] if c.n_ff_exp else 0
        return own or c.n_ff[il] // (c.n_expert_used if self.moe and self.moe.split_ff else 1)

    def n_ff_shexp(self, il: int) -> int:
        """Return the width of the shared experts together; 0 for none."""
        assert self.moe is not None
        c, n_ff = self.c, self.n_ff_exp(il)
        return c.n_ff_shexp or {"many": n_ff * c.n_expert_shared, "one": n_ff, "dense": c.n_ff[il]}[self.moe.shared]

    # -------------------------------------------------------------------------------------------------------- the graph

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        """Compute a layer's FFN, [n_embd, n_tokens]: dense, or experts and those that all tokens share."""
        if f"blk.{il}.ffn_gate_inp.weight" not in self.w:
            return self.named(self.ffn(x, f"blk.{il}", il), "ffn_out", il)
        out = self.experts(x, il)
        if f"blk.{il}.ffn_up_shexp.weight" in self.w:
            out = self.g.add(out, self.shared_expert(x, il))
        return self.named(out, "ffn_out", il)

    def shared_expert(self, x: Tensor, il: int) -> Tensor:
        """Compute the experts that all tokens share, and weigh them for each token where they have a gate."""
        out = self.named(self.ffn(x, f"blk.{il}", il, "_shexp"), "ffn_shexp", il)
        weight = self.w.get(f"blk.{il}.ffn_gate_inp_shexp.weight")
        if weight is None:
            return out
        gate = self.shared_weight(self.g.mul_mat(weight, x), il)
        return self.named(self.g.mul(out, gate), "ffn_shexp_out", il)

    def shared_weight(self, score: Tensor, il: int) -> Tensor:
        """Turn a token's score, [1, n_tokens], into the weight of the shared experts."""
        return self.g.sigmoid(score)

    def experts(self, x: Tensor, il: int, logits: Tensor | None = None) -> Tensor:
        """Route each token to its best experts and add up their weighted outputs, [n_embd, n_tokens]."""
        assert self.moe is not None
        logits = self.router_logits(x, il) if logits is None else logits
        probs = self.named(self.probabilities(logits, self.gating()[0]), "ffn_moe_probs", il)
        ids = self.named(self.choose(logits if self.moe.select_logits else probs, il), "ffn_moe_topk", il)
        return self.mix(x, ids, self.weigh(probs, ids), il)

    def router_logits(self, x: Tensor, il: int) -> Tensor:
        """Score the experts for each token, [n_expert, n_tokens]."""
        return self.named(self.linear(x, f"blk.{il}.ffn_gate_inp"), "ffn_moe_logits", il)

    def gating(self) -> tuple[str, bool]:
        """Return how logits become weights, and whether these are made to sum to one."""
        assert self.moe is not None
        gating = GATING.get(self.c.expert_gating_func, self.moe.gating)
        assert gating is not None
        return gating, self.c.expert_weights_norm if self.moe.normalize is None else self.moe.normalize

    def probabilities(self, logits: Tensor, gating: str) -> Tensor:
        """Turn a router's logits into probabilities, as far as that is done before the choice."""
        if gating == "softmax":
            return self.g.soft_max(logits)
        if gating == "sigmoid":
            return self.g.sigmoid(logits)
        return self.g.sqrt(self.g.softplus(logits)) if gating == "sqrt_softplus" else logits

    # ------------------------------------------------------------------------------------------------------- the choice

    def choose(self, scores: Tensor, il: int) -> Tensor:
        """Choose the best experts of each token, of its best groups where there are groups: i32 [n_used, n_tokens].

        Scores that are not numbers come out in some order, but the numbers of experts stay sound.
        """
        g, c = self.g, self.c
        bias = self.w.get(f"blk.{il}.{self.moe.bias_name}") if self.moe else None
        if bias is not None:
            scores = g.add(scores, bias)
        if c.n_expert_groups > 1:
            scores = self.best_groups(scores)
        return g.argsort_top_k(scores, c.n_expert_used)

    def best_groups(self, scores: Tensor) -> Tensor:
        """Leave only the experts of the best groups in the running; a group counts as its two best together."""
        g, c, n_tokens = self.g, self.c, scores.ne[1]
        n_group = c.n_expert_groups
        groups = g.reshape_3d(scores, c.n_expert // n_group, n_group, n_tokens)
        top = g.argsort_top_k(groups, 2)  # [2, n_group, n_tokens]
        top = g.get_rows(g.reshape_4d(groups, 1, *groups.ne[:3]), top)  # [1, 2, n_group, n_tokens]
        total = g.sum_rows(g.reshape_3d(top, *top.ne[1:]))  # [1, n_group, n_tokens]
        best = g.argsort_top_k(g.reshape_2d(total, n_group, n_tokens), c.n_group_used)
        kept = g.set_rows(g.fill(groups, -math.inf), g.get_rows(groups, best), best)
        return g.reshape_2d(kept, c.n_expert, n_tokens)

    def weigh(self, probs: Tensor, ids: Tensor) -> Tensor:
        """Turn the probabilities of the chosen experts ([n_used, n_tokens]) into weights, [1, n_used, n_tokens]."""
        g, (n_used, n_tokens, *_) = self.g, ids.ne
        gating, normalize = self.gating()
        weights = g.get_rows(g.reshape_3d(probs, 1, *probs.ne[:2]), ids)
        if gating == "softmax_weight":
            weights = g.reshape_3d(g.soft_max(g.reshape_2d(weights, n_used, n_tokens)), 1, n_used, n_tokens)
        if normalize:
            weights = g.reshape_2d(weights, n_used, n_tokens)
            total = g.clamp(g.sum_rows(weights), MIN_F16, math.inf)
            weights = g.reshape_3d(g.div(weights, total), 1, n_used, n_tokens)
        if self.c.expert_weights_scale not in (0.0, 1.0):
            weights = g.scale(weights, f32(self.c.expert_weights_scale))
        return self.graph.expand(weights)

    # ------------------------------------------------------------------------------------------------------ the mixture

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, il: int, suffix: str = "_exps") -> Tensor:
        """Compute the chosen experts and add up their outputs by their weights, [n_embd, n_tokens]."""
        assert self.moe is not None
        g, (n_embd, n_tokens, *_), n_used, blk = self.g, x.ne, ids.ne[0], f"blk.{il}"
        cur = g.reshape_3d(x, n_embd, 1, n_tokens)
        if self.moe.weight_first:
            cur = g.mul(g.repeat_4d(cur, n_embd, n_used, n_tokens, 1), weights)
        gate, up = self.gate_and_up(cur, ids, blk, suffix)  # [n_ff, n_used, n_tokens]
        cur = self.expert_linear(self.activate_experts(gate, up, il), f"{blk}.ffn_down{suffix}", ids)
        if not self.moe.weight_first:
            cur = g.mul(cur, weights)  # [n_embd, n_used, n_tokens]
        return self.named(self.add_up(cur, n_embd, n_tokens, n_used), "ffn_moe_out", il)

    def gate_and_up(self, x: Tensor, ids: Tensor, blk: str, suffix: str) -> tuple[Tensor | None, Tensor]:
        """Multiply by the chosen experts' first matrices, which may be one."""
        g = self.g
        if f"{blk}.ffn_gate_up{suffix}.weight" in self.w:
            both = self.expert_linear(x, f"{blk}.ffn_gate_up{suffix}", ids)
            n_ff, (_, n_used, n_tokens, _) = both.ne[0] // 2, both.ne
            gate, up = (
                g.view_3d(both, n_ff, n_used, n_tokens, both.nb[1], both.nb[2], offset)
                for offset in (0, n_ff * both.nb[0])
            )
            return gate, up
        up = self.expert_linear(x, f"{blk}.ffn_up{suffix}", ids)
        has_gate = f"{blk}.ffn_gate{suffix}.weight" in self.w
        return self.expert_linear(x, f"{blk}.ffn_gate{suffix}", ids) if has_gate else None, up

    def activate_experts(self, gate: Tensor | None, up: Tensor, il: int) -> Tensor:
        """Apply the activation within the experts."""
        return self.activate(up, None, il) if gate is None else self.activate(gate, up, il)

    def expert_linear(self, x: Tensor, role: str, ids: Tensor) -> Tensor:
        """Multiply each token by the matrices of its experts; apply those experts' scales and biases where given."""
        g = self.g
        y = g.mul_mat_id(self.w[f"{role}.weight"], x, ids)
        scale, bias = self.w.get(f"{role}.scale"), self.w.get(f"{role}.bias")
        if scale is not None:
            n_expert, n_tokens = scale.ne[0], x.ne[2]
            s = g.repeat_4d(g.reshape_3d(scale, 1, n_expert, 1), 1, n_expert, n_tokens, 1)
            y = g.mul(y, g.get_rows(s, ids))
        return g.add_id(y, bias, ids) if bias is not None else y

    def add_up(self, x: Tensor, n_embd: int, n_tokens: int, n_used: int) -> Tensor:
        """Sum over the experts of each token, from the best to the last."""
        g = self.g
        self.graph.expand(x)
        views = (g.view_2d(x, n_embd, n_tokens, x.nb[2], i * x.nb[1]) for i in range(n_used))
        out, *others = [self.graph.expand(view) for view in views]
        for part in others:
            out = self.graph.expand(g.add(out, part))
        return out if n_used > 1 else g.cont(out)
