"""Decoders some of whose layers keep a state instead of keys and values, and how states go through a convolution."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ggufpy.arch.decoder import Decoder, Has, States, Tensor, TensorSpec

__all__ = ["Hybrid"]


class Hybrid(Decoder):
    """Layers without heads of keys and values are recurrent; an architecture says what these do in `recur`."""

    headless = True

    def recurrent_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        """List what a recurrent layer has in the place of attention's tensors."""
        raise NotImplementedError

    def recur(self, x: Tensor, il: int) -> Tensor:
        """Compute a recurrent layer in the place of attention, [n_embd, n_tokens], and save its states."""
        raise NotImplementedError

    def attention_tensors(self, il: int, has: Has) -> Iterator[TensorSpec]:
        yield from (super().attention_tensors if self.c.n_head_kv[il] else self.recurrent_tensors)(il, has)

    def attention(self, x: Tensor, il: int) -> Tensor:
        return super().attention(x, il) if self.c.n_head_kv[il] else self.recur(x, il)

    def store_only(self, x: Tensor, il: int) -> None:
        if self.c.n_head_kv[il]:
            super().store_only(x, il)
        else:
            self.recur(self.attention_input(x, il), il)  # without what follows the states, which no node asks for

    @property
    def memory(self) -> States:
        """The states of the sequences that are computed."""
        assert self.inputs.states is not None
        return self.inputs.states

    def by_sequence(self, x: Tensor, *ne: int) -> Tensor:
        """Split the tokens in sequences: [*ne, n_tokens each, n_seqs], of one or two dimensions `ne`."""
        n_seqs = self.memory.n_seqs
        shape = (*ne, x.n_elements // math.prod(ne) // n_seqs, n_seqs)
        return self.g.reshape_3d(x, *shape) if len(ne) == 1 else self.g.reshape_4d(x, *shape)

    def behind_state(self, x: Tensor, width: int, il: int) -> Tensor:
        """Put a sequence's x ([n, n_tokens each, n_seqs]) behind the `width` before it, and save its last as many.

        Returns [width + n_tokens, n, n_seqs].
        """
        g, n, n_seqs = self.g, x.ne[0], self.memory.n_seqs
        state = g.reshape_3d(self.memory.load("r", il), width, n, n_seqs)
        joined = g.concat(state, g.cont(g.transpose(x)), 0)
        offset = (joined.ne[0] - width) * 4
        last = g.view_3d(joined, width, n, n_seqs, joined.nb[1], joined.nb[2], offset)
        self.memory.save(self.graph, g.cont(last), "r", il)
        return joined
