"""Keep the gradients that a graph knows: the memory that each lies in, and how it looks.

What a program does to the tensor in a `.grad` may leave it the same object, at the same address: `t_()`,
`requires_grad_()`, `.data = gradient.data[:4]`, `resize_` to fewer elements, another `__class__`. The graph would go on
with the memory as it knows it, and eager with the tensor as it is now. So such a tensor counts as another one, and so
does one whose memory was exchanged. The graph's memory is kept, and gets a tensor of its own, that looks as the graph's
gradient does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from optimizations.capture.step.known_tensors import KnownTensors
from optimizations.capture.step.tensor_marks import look
from optimizations.graph.memory import size_bytes

TURNS = 8
"""Calls in which gradients that stand where the graph left them are compared by their memory, each in one of these."""
FEW = 32
"""Number of places that each call compares at least."""


class _Place:
    """Keep the memory of a gradient, and how the gradient lies in it."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._storage = gradient.untyped_storage()
        self._start = self._storage.data_ptr()
        self._offset, self._shape, self._strides = gradient.storage_offset(), gradient.shape, gradient.stride()
        self._dtype, self._device = gradient.dtype, gradient.device
        self._inference, self._requires_grad = gradient.is_inference(), gradient.requires_grad
        self.address, self.look = gradient.data_ptr(), look(gradient)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies there, and looks as the gradient did."""
        return tensor.data_ptr() == self.address and look(tensor) == self.look

    def lasts(self) -> bool:
        """Return whether the memory is where it was: `resize_` of a tensor, or of its storage, may give it back."""
        return self._storage.data_ptr() == self._start

    def tensor(self) -> torch.Tensor:
        """Return another tensor that lies there."""
        with torch.inference_mode(self._inference), torch.no_grad():
            made = torch.empty(0, dtype=self._dtype, device=self._device)
            made.set_(self._storage, self._offset, self._shape, self._strides)
            return made.requires_grad_() if self._requires_grad else made


class GradientPlaces:
    """Hold the places of these gradients, each once. They are lost where memory is gone: then no launch may follow."""

    def __init__(self, gradients: Iterable[torch.Tensor | None]) -> None:
        found = list({id(one): one for one in gradients if one is not None}.values())
        self._places = [(one, _Place(one)) for one in found if _has_memory(one)]
        self._others = [(one, look(one)) for one in found if not _has_memory(one)]
        self._lost = False
        self._compare_these()

    def _compare_these(self) -> None:
        self._known = KnownTensors(one for one, _ in self._places)
        turns = min(TURNS, len(self._places) // FEW) or 1
        self._parts = [KnownTensors(one for one, _ in self._places[turn::turns]) for turn in range(turns)]
        self._turn = 0

    def renewed(self) -> dict[int, torch.Tensor] | None:
        """Return tensors that stand, from now on, for those that are others now, by the identity of these.

        None if one is lost.
        """
        if self._lost or not self.others_stand():
            return None
        if self._known.lie() and self._known.look():
            return {}
        if self.lost():
            return None
        found = {id(one): place.tensor() for one, place in self._places if not place.is_of(one)}
        places = [(found.get(id(one), one), place) for one, place in self._places]
        if not all(place.is_of(one) for one, place in places):  # such as one that stood for conjugates
            self._lost = True
            return None
        self._places = places
        self._compare_these()
        return found

    def some_stand(self) -> bool:
        """Return whether some have the memory and metadata they had: all are compared in `TURNS` calls.

        A program that exchanges the memory of gradients (`.data =`) does so with all of them.
        """
        self._turn = (self._turn + 1) % len(self._parts)
        part = self._parts[self._turn]
        return not self._lost and part.lie() and part.look() and self.others_stand()

    def lost(self) -> bool:
        """Return whether the memory of one is gone, or no other tensor can be made that looks as it did."""
        self._lost = self._lost or not all(place.lasts() for _, place in self._places) or not self.others_stand()
        return self._lost

    def others_stand(self) -> bool:
        """Return whether those that are no plain tensors with memory look as they did."""
        return all(look(one) == then for one, then in self._others)


def _has_memory(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and size_bytes(gradient) > 0
