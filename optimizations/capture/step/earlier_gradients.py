"""Track gradients from before a call that runs as it is and is observed.

They are not held meanwhile: where the step sets them to None before it computes others, eager computes the others in
their memory. Held, all gradients would be there twice. Such a call runs on the side stream, which may have to read them
when they are freed: see `Device.may_read`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations.capture.sole_references import have_no_other_reference, is_plain
from optimizations.capture.step.observer import storage


class EarlierGradients:
    """Hold what is known of these gradients. Made before the call of a list, which is empty then.

    Attributes:
        places: addresses of their storages.
    """

    def __init__(self, before: list[torch.Tensor | None]) -> None:
        self._alone = have_no_other_reference(before, as_gradients=True)
        self._gradients = [None if one is None else weakref.ref(one) for one in before]
        self._plain = [is_plain(one) for one in before]
        self._places = [0 if one is None else storage(one) for one in before]
        self._storages = [
            StorageWeakRef(one.untyped_storage()) if one is not None and (is_plain(one) or place) else None
            for one, place in zip(before, self._places, strict=True)
        ]
        before.clear()
        self._at = dict(zip(self._places, self._storages, strict=True))
        self.places = frozenset(filter(None, self._places))

    def gone(self, address: int) -> bool:
        """Return whether one lay there that is gone, so that something else may lie there now."""
        lay_there = self._at.get(address)
        return lay_there is not None and lay_there.expired()

    def replaced(self, after: Sequence[torch.Tensor | None]) -> bool:
        """Return whether a parameter has another gradient after the call, or none."""
        return any(
            new is not None if old is None else new is None or old() is not new
            for old, new in zip(self._gradients, after, strict=True)
        )

    def dropped(self, after: Sequence[torch.Tensor | None], outside: Collection[int]) -> bool:
        """Return whether the call set all of them to None or others, read none, and keeps none.

        `after` are the gradients of the same parameters, `outside` storages that it read and did not make.
        """
        there = [index for index, gradient in enumerate(self._gradients) if gradient is not None]
        if not there or any(self._is_still_there(index, after[index]) for index in there):
            return False
        if any(not self._plain[index] or self._places[index] in outside for index in there):
            return False
        return all(self._is_gone(index) or not self._alone[index] for index in there)

    def _is_still_there(self, index: int, after: torch.Tensor | None) -> bool:
        gradient = self._gradients[index]
        return after is not None and gradient is not None and gradient() is after

    def _is_gone(self, index: int) -> bool:
        its_own = self._storages[index]
        return its_own is not None and its_own.expired()
