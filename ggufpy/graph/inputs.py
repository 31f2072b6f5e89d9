"""Writing the inputs of an allocated graph between its computations: `Inputs` are arrays, masks have a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufpy._ffi.lib import C, ffi
from ggufpy.graph.tensor import Tensor

__all__ = ["NO_LIMIT", "Inputs", "mask_writer"]

NO_LIMIT = 2**31 - 1


class Inputs:
    """Arrays for the inputs of one graph: their own memory where the host can write it, copies for `send` elsewhere.

    Has to be dropped before the graph's memory is given to another graph.
    """

    def __init__(self) -> None:
        """Begin without arrays."""
        self.far: list[tuple[Tensor, np.ndarray[Any, Any]]] = []

    def array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Return the array to write a tensor through: its shape (in NumPy's order) and dtype, contiguous."""
        if tensor.is_host:
            return tensor.numpy_view(writable=True)
        array = np.empty_like(tensor.get())
        self.far.append((tensor, array))
        return array

    def send(self) -> None:
        """Copy what was written to where the host cannot write."""
        for tensor, array in self.far:
            tensor.set(array)


def mask_writer(
    mask: npt.NDArray[Any], cells: npt.NDArray[np.int32], has: npt.NDArray[np.bool_],
    positions: npt.NDArray[np.int32], before: int, after: int, chunk: int = 0, alibi: bool = False,
) -> Callable[[], None]:  # fmt: skip
    """Return a function that writes one sequence's part of an attention mask, f16 or f32 [n_tokens, n_cells].

    Tokens at `positions` see cells that the sequence `has`, whose positions (`cells`) lie from `before` the token's own
    (or the start of its `chunk`) to `after` behind it: 0 there, or with `alibi` minus the distance, and -inf elsewhere.
    Arrays are contiguous and read at each call; `cells` and `has` may be longer than the mask's rows.
    """
    pointer, (n, n_cells) = ffi.from_buffer, mask.shape
    return partial(
        C.ggufpy_write_mask, pointer(mask), mask.itemsize == 2, pointer("int32_t[]", cells), pointer("bool[]", has),
        n_cells, pointer("int32_t[]", positions), n, before, after, chunk, alibi,
    )  # fmt: skip
