"""Compare where tensors lie, and their metadata, with what they were, in few calls into C++."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from optimizations import torch_internals
from optimizations.capture.step.tensor_marks import looks
from optimizations.torch_internals.tensor_guard import same_metadata

FEW = 64
"""Addresses up to which all are compared each time."""


class KnownTensors:
    """Compare tensors with what they are when this is made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._addresses = Addresses(self._tensors)
        self._metadata = Metadata(self._tensors)

    def lie(self) -> bool:
        """Return whether all lie where they lay."""
        return self._addresses.same()

    def look(self) -> bool:
        """Return whether all have the metadata they had."""
        return self._metadata.same(self._tensors)


class Metadata:
    """Keep the metadata of tensors, and not the tensors."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._then = looks(tensors)
        self._same = same_metadata(tensors)

    def same(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return whether these tensors, in the same order, have that metadata."""
        if not self._same(tensors):
            if looks(tensors) != self._then:
                return False
            self._same = same_metadata(tensors)  # which compares settings too, such as autocast
        return True


class Addresses:
    """Compare the addresses of tensors. Those of several groups are compared in turn: each time of one tensor of each
    group.

    PyTorch takes 60 ns for an address, and an optimizer keeps three tensors for each parameter. What moves one of a
    group in place (`.data =`) moves all of them, or the same ones of other groups, such as when they are offloaded.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        self._all = _Lying([*tensors, *(one for group in groups for one in group)])
        turns = max(map(len, groups), default=0) if sum(map(len, groups)) > FEW else 0
        self._turns = [
            _Lying([group[(place + turn) % len(group)] for place, group in enumerate(groups)]) for turn in range(turns)
        ]
        self._turn = 0

    def same(self) -> bool:
        """Return whether all tensors lie where they lay."""
        return self._all.same()

    def same_in_turn(self) -> bool:
        """Return whether those lie there whose turn it is."""
        if not self._turns:
            return self._all.same()
        self._turn = (self._turn + 1) % len(self._turns)
        return self._turns[self._turn].same()


class _Lying:
    """Hold tensors, and where they lie."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._indices = tensors, list(range(len(tensors)))
        self._addresses = [tensor.data_ptr() for tensor in tensors]

    def same(self) -> bool:
        return torch_internals.data_ptrs_equal(self._tensors, self._addresses, self._indices)
