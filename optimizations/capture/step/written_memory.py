"""Memory that a recording writes, and whether inputs of a call lie in it.

Inputs are read from copies made before the graph runs, so one that lies in what the graph writes would be read as it
was before, and the step would have read it as it is then. Addresses that were looked at are not looked at again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch

from optimizations import torch_internals
from optimizations.captured.displaced import size_bytes


class WrittenMemory:
    """The memory of `tensors`, as it is when this is made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(_range(tensor) for tensor in tensors if _has_memory(tensor)):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)
        self._clear: list[int] = []
        self._all: list[int] = []

    def holds_one_of(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether one of these lies in it, wholly or in part. Inputs have the same shapes and strides each time."""
        if not self._begins:
            return False
        if len(self._clear) != len(inputs):
            self._clear, self._all = [0] * len(inputs), list(range(len(inputs)))
        elif torch_internals.data_ptrs_equal(inputs, self._clear, self._all):
            return False
        found = False
        for index, tensor in enumerate(inputs):
            if tensor.data_ptr() == self._clear[index]:
                continue
            begin, end = _range(tensor)
            place = bisect_left(self._begins, end) - 1
            if place >= 0 and self._ends[place] > begin:
                found = True
            else:
                self._clear[index] = begin
        return found


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + size_bytes(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and size_bytes(tensor) > 0
