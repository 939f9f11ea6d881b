"""Gradients from before a call that runs as it is and is looked at.

They are not held meanwhile: where the step sets them to None before it computes others, eager computes the others in
their memory. Held, all gradients would be there twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations.capture.step.set_aside import held_by_nobody_else, is_plain


class EarlierGradients:
    """What is known of them. Made before the call of a list, which is empty then.

    Attributes:
        places: addresses of their storages.
    """

    def __init__(self, before: list[torch.Tensor | None]) -> None:
        self._alone = held_by_nobody_else(before, as_gradients=True)
        self._gradients = [None if one is None else weakref.ref(one) for one in before]
        self._storages = [StorageWeakRef(one.untyped_storage()) if is_plain(one) else None for one in before]
        self._places = [one.untyped_storage().data_ptr() if is_plain(one) else None for one in before]
        before.clear()
        self._at = dict(zip(self._places, self._storages, strict=True))
        self.places = frozenset(place for place in self._places if place is not None)

    def gone(self, address: int) -> bool:
        """Whether one lay there that is gone, so that something else may lie there now."""
        storage = self._at.get(address)
        return storage is not None and storage.expired()

    def replaced(self, after: Sequence[torch.Tensor | None]) -> bool:
        """Whether a parameter has another gradient behind the call, or none."""
        return any(
            new is not None if old is None else new is None or old() is not new
            for old, new in zip(self._gradients, after, strict=True)
        )

    def dropped(self, after: Sequence[torch.Tensor | None], outside: Collection[int]) -> bool:
        """Behind the call: whether it set all of them to None or others, read none, and keeps none.

        `after` are the gradients of the same parameters, `outside` storages that it read and did not make.
        """
        there = [index for index, gradient in enumerate(self._gradients) if gradient is not None]
        if not there or any(self._is_still_there(index, after[index]) for index in there):
            return False
        if any(self._places[index] is None or self._places[index] in outside for index in there):
            return False
        return all(self._is_gone(index) or not self._alone[index] for index in there)

    def _is_still_there(self, index: int, after: torch.Tensor | None) -> bool:
        gradient = self._gradients[index]
        return after is not None and gradient is not None and gradient() is after

    def _is_gone(self, index: int) -> bool:
        storage = self._storages[index]
        return storage is not None and storage.expired()
