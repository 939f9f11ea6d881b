"""Tensors as they were: where each lies and how it looks, compared by a call into C++ for each of the two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from optimizations import torch_internals
from optimizations.capture.step.guard import Guard
from optimizations.capture.step.tensor_marks import looks
from optimizations.torch_internals.tensor_guard import same_metadata


class KnownTensors:
    """These tensors, as they are when this is made.

    Attributes:
        tensors, addresses: they, and where they lay.
        indices: of all of them, as `data_ptrs_equal` takes them.
        then: how they looked.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.indices = list(range(len(self.tensors)))
        self.then = looks(self.tensors)
        self._looks = Guard(functools.partial(_compared, tuple(self.tensors)))

    def compared_looks(self) -> Callable[[], bool]:
        """A function that tells whether all look as now, under the settings of now: autocast and inference mode are
        part of looks."""
        return _compared(tuple(self.tensors))

    def lie(self) -> bool:
        """Whether all lie where they lay."""
        return torch_internals.data_ptrs_equal(self.tensors, self.addresses, self.indices)

    def look(self) -> bool:
        """Whether all look as they did."""
        if not self._looks.holds():
            if looks(self.tensors) != self.then:
                return False
            self._looks.was_wrong()
        return True


def _compared(tensors: tuple[torch.Tensor, ...]) -> Callable[[], bool]:
    return functools.partial(same_metadata(tensors), tensors)
