"""`Inputs`: the arrays through which the inputs of an allocated graph are written between its computations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggufpy.graph.tensor import Tensor

__all__ = ["Inputs"]


class Inputs:
    """Arrays for the inputs of one graph: their own memory where the host can write it, copies for `send` elsewhere.

    Has to be dropped before the graph's memory is given to another graph.
    """

    def __init__(self) -> None:
        """Begin without arrays."""
        self._far: list[tuple[Tensor, np.ndarray[Any, Any]]] = []

    def array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Return the array to write a tensor through: its shape (in NumPy's order) and dtype, contiguous."""
        if tensor.is_host:
            return tensor.numpy_view(writable=True)
        array = np.empty_like(tensor.get())
        self._far.append((tensor, array))
        return array

    def send(self) -> None:
        """Copy what was written to where the host cannot write."""
        for tensor, array in self._far:
            tensor.set(array)
