"""The states of recurrent layers: one row for each sequence, and the graph inputs that say which.

A layer that is recurrent keeps a fixed number of values of all that it has seen, and no way back to an earlier token.
This file owns their tensors and who has which row. It offers what `KVCache` offers to `Memory` and to a session; what
the values mean is the architecture's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggufpy.backend import Buffer, Device
from ggufpy.batch import MicroBatch
from ggufpy.errors import ContextLengthError
from ggufpy.gguf import GGMLType
from ggufpy.graph import Context, Graph, Inputs, Tensor

__all__ = ["Rows", "StateCache", "StateInputs"]


@dataclass(slots=True)
class Rows:
    """Where a micro-batch's sequences find their states, and where they leave them; a `Placement` to sessions."""

    streams: list[int]  # the sequences by their order in the micro-batch
    read: npt.NDArray[np.int32]
    write: npt.NDArray[np.int32]
    n_kv: int = 0


class StateCache:
    """The states of some layers, for all sequences of a session (llama.cpp's llama_memory_recurrent).

    The last row is that of sequences with no tokens, and stays zero. Forked sequences share a row until they write.
    """

    def __init__(
        self,
        widths: Mapping[int, Mapping[str, int]],
        *,
        n_seq_max: int,
        n_stream: int,
        device_of: Callable[[int], Device],
    ) -> None:
        """Make the states that `widths` says each layer has: how many values, by their name."""
        self.n_stream, self.empty = n_stream, n_seq_max
        self.rows, self.n_past = [self.empty] * n_seq_max, [0] * n_seq_max
        self._context = Context(sum(map(len, widths.values())))
        self.tensors: dict[tuple[str, int], Tensor] = {}
        by_device: dict[Device, list[Tensor]] = {}
        for il, layer in widths.items():
            for name, width in layer.items():
                state = self._context.new_tensor(GGMLType.F32, width, n_seq_max + 1, name=f"cache_{name}_l{il}")
                self.tensors[name, il] = state
                by_device.setdefault(device_of(il), []).append(state)
        self._buffers = [Buffer.zeros(device, tensors) for device, tensors in by_device.items()]

    @property
    def nbytes(self) -> int:
        """Return the size of all states in bytes."""
        return sum(buffer.size for buffer in self._buffers)

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._buffers:
            buffer.close()

    def find(self, ubatch: MicroBatch) -> Rows:
        """Find the rows for a micro-batch: a sequence's own, or one that nobody has in the place of a shared one."""
        read, write, rows = [], [], self.rows.copy()
        for seq_id, _ in ubatch.runs:
            row = rows[seq_id]
            read.append(row)
            if row == self.empty or rows.count(row) > 1:
                row = rows[seq_id] = next(r for r in range(self.empty) if r not in rows)
            write.append(row)
        return Rows(list(range(len(read))), np.array(read, np.int32), np.array(write, np.int32))

    def take(self, ubatch: MicroBatch, rows: Rows) -> None:
        """Give the sequences the rows found for them."""
        for (seq_id, n), row in zip(ubatch.runs, rows.write.tolist(), strict=True):
            self.n_past[seq_id] += n  # first: cut short here, a sequence's tokens tell that its state is lost
            self.rows[seq_id] = row

    def room_behind(self, rows: Rows) -> int:
        """Return how often a placement can be repeated: without end, as it keeps its rows."""
        return 2**31 - 1

    def snapshot(self) -> tuple[list[int], list[int]]:
        """Return who has which row, to `restore` it."""
        return self.rows.copy(), self.n_past.copy()

    def restore(self, before: tuple[list[int], list[int]]) -> None:
        """Go back to what `snapshot` returned, if nothing was computed since."""
        self.rows, self.n_past = before

    def inputs(self, g: Context, rows: Rows, n_tokens: int) -> StateInputs:
        """Make the inputs of a graph for micro-batches of a shape."""
        return StateInputs(g, self, len(rows.streams))

    def check_trim(self, seq_id: int, n: int) -> None:
        """Raise ContextLengthError where a sequence cannot be cut to its first n tokens."""
        if 0 < n < self.n_past[seq_id]:
            raise ContextLengthError(
                f"cannot trim sequence {seq_id} from {self.n_past[seq_id]} to {n} tokens: its recurrent layers keep "
                f"no earlier state; trim it to 0"
            )

    def trim(self, seq_id: int, n: int) -> None:
        """Forget a sequence if n is 0."""
        if not n:
            self.rows[seq_id], self.n_past[seq_id] = self.empty, 0

    def clear(self) -> None:
        """Forget all sequences."""
        for seq_id in range(len(self.rows)):
            self.trim(seq_id, 0)

    def fork(self, src: int, dst: int) -> None:
        """Let sequence dst begin with the state of src."""
        self.rows[dst], self.n_past[dst] = self.rows[src], self.n_past[src]


class StateInputs:
    """The inputs of one graph that concern states: the rows to read and to write."""

    __slots__ = ("_arrays", "cache", "g", "n_seqs", "read", "write")

    def __init__(self, g: Context, cache: StateCache, n_seqs: int) -> None:
        self.g, self.cache, self.n_seqs = g, cache, n_seqs
        self.read = g.input(GGMLType.I32, n_seqs, name="rs_s_copy")
        self.write = g.input(GGMLType.I32, n_seqs, name="rs_s_write")

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The inputs that need memory even where no node uses them."""
        return self.read, self.write

    def load(self, name: str, il: int) -> Tensor:
        """Read the sequences' states: [width, n_seqs]."""
        return self.g.get_rows(self.cache.tensors[name, il], self.read)

    def save(self, graph: Graph, state: Tensor, name: str, il: int) -> None:
        """Add the nodes that write the sequences' states, of any shape that is contiguous."""
        target = self.cache.tensors[name, il]
        state = self.g.reshape_2d(state, target.ne[0], self.n_seqs)
        graph.expand(self.g.set_rows(target, state, self.write))

    def attach(self, inputs: Inputs) -> None:
        """Find the arrays to write the inputs through, once they have memory."""
        self._arrays = inputs.array(self.read), inputs.array(self.write)

    def set(self, ubatch: MicroBatch, rows: Rows) -> None:
        """Write the inputs for a micro-batch of the shape this graph was built for."""
        read, write = self._arrays
        read[:], write[:] = rows.read, rows.write

    def follower(self, runs: Sequence[tuple[int, int]], positions: npt.NDArray[np.int32]) -> Callable[[], None]:
        """Return a function that writes the inputs for one more token of each sequence, of those last placed."""
        (read, write), n_past = self._arrays, self.cache.n_past
        rows = [self.cache.rows[seq_id] for seq_id, _ in runs]

        def follow() -> None:
            read[:] = write[:] = rows
            for seq_id, _ in runs:
                n_past[seq_id] += 1

        return follow
