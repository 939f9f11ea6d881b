"""Find the memory that a recording writes. Inputs that share it cannot be copied before the graph runs.

A write into a copy does not reach the caller. If an input shares memory that the graph writes, its copy has the values
from before these writes, but the step itself would read the values from after them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from optimizations.capture.step.observer import storage
from optimizations.graph.memory import overlaps


class Writes:
    """Find the tensors that a captured call writes. Create it before the call with the `tensors` to check.

    PyTorch counts versions, but not for inference tensors, for writes through `.data`, or for the running statistics of
    batch normalisation. These writes are found by the observed operators (`note` is for `Observer.before_write`).
    Compiled code is not observed. If there is some, every inference tensor counts as written, except those whose
    elements overlap, which cannot be written.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, compiled: bool) -> None:
        self._versions = {id(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}
        self._compiled = compiled
        self._storages: set[int] = set()

    def note(self, tensor: torch.Tensor) -> None:
        self._storages.add(storage(tensor))

    def include(self, tensor: torch.Tensor) -> bool:
        """Return, after the call, whether it wrote the memory of a tensor."""
        if self.counted(tensor) or (storage(tensor) and storage(tensor) in self._storages):
            return True
        return tensor.is_inference() and self._compiled and storage(tensor) > 0 and not overlaps(tensor)

    def counted(self, tensor: torch.Tensor) -> bool:
        """Return, after the call, whether the version of a tensor changed."""
        if tensor.is_inference():
            return False
        return bool(tensor._version != self._versions.get(id(tensor), tensor._version))


def storages(tensors: Iterable[torch.Tensor | None]) -> set[int]:
    """Return the addresses of the storages of tensors that have memory."""
    return {storage(tensor) for tensor in tensors if tensor is not None} - {0}
