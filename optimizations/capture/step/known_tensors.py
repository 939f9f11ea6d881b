"""Tensors as they were: where each lies, and its shape, strides, dtype and device, in a call into C++ for each."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from optimizations import torch_internals
from optimizations.capture.step.tensor_marks import looks
from optimizations.torch_internals.tensor_guard import same_metadata


class KnownTensors:
    """These tensors, as they are when this is made.

    Attributes:
        tensors, addresses: they, and where they lay.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._indices = list(range(len(self.tensors)))
        self._all = tuple(self.tensors)
        self._then = looks(self.tensors)
        self._same_metadata = same_metadata(self._all)

    def lie(self) -> bool:
        """Return whether all lie where they lay."""
        return torch_internals.data_ptrs_equal(self.tensors, self.addresses, self._indices)

    def look(self) -> bool:
        """Return whether all have the metadata they had."""
        if not self._same_metadata(self._all):
            if looks(self.tensors) != self._then:
                return False
            self._same_metadata = same_metadata(self._all)  # which compares settings too, such as autocast
        return True
