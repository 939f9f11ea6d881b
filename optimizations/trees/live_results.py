"""Check tensors that replays return or save again and again: did others leave all but their values unchanged?

CUDAGraph Trees keep one tensor object per result. What a caller gets of an inference or a forward is a new tensor over
the same memory in each call (`results`). The gradients of a backward and what a forward saves are too many for that:
they are the very objects of the call before. What a caller did to the object, and not to its values, would stay: a
shape changed in place (`squeeze_`, `t_`), other memory (`set_`, `.data`), `requires_grad_`, a history. So each object
is checked before it is returned again, all in two calls into C++.

Note [What is attached to results]. C++ does not see attributes (`y.name = ...`), nor a gradient, nor hooks, which stay
where a gradient was required and is not any more (`detach_`). Nor does it see weak references: what a program keeps for
a tensor as long as that is alive (`WeakTensorKeyDictionary`) would be found for the next result, which has other
values. Python is asked, of the results of a backward (`torch.autograd.grad` gives out the very tensors). What a forward
saves is given to others by hooks of saved tensors alone, which get new tensors, and by `grad_fn.saved_tensors`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.geometry import picker
from optimizations.torch_internals.tensor_guard import MetadataChecks

FIRST_CALLS = 4
"""Calls that are compared in Python. Making a comparison in C++ takes longer, and not every graph is replayed often."""


class LiveResults:
    """Hold the metadata that tensors of one recording have while unchanged. It holds none of the tensors.

    Args:
        results: tensors as they were made, None at other places.
        seen: whether callers see them, and may attach something. Note [What is attached to results].
    """

    def __init__(self, results: Sequence[torch.Tensor | None], *, seen: bool) -> None:
        self._places = [place for place, result in enumerate(results) if result is not None]
        self._chosen = picker(self._places)
        self._seen = seen
        self._addresses = [None if result is None else result.data_ptr() for result in results]
        self._metadata = {place: _metadata(result) for place, result in enumerate(results) if result is not None}
        self._calls = 0
        self._checks = MetadataChecks()

    def changed(self, results: list[Any]) -> list[int]:
        """Return the places of the tensors that have changed, in the list that keeps them."""
        checks = self._checks
        if checks and torch_internals.data_ptrs_equal(results, self._addresses, self._places):
            chosen = self._chosen(results)
            for check in checks:
                if check(chosen):
                    if not (self._seen and _is_anything_attached(chosen)):
                        return []
                    break
            del chosen
        changed = [
            place
            for place in self._places
            if type(results[place]) is not torch.Tensor
            or _metadata(results[place]) != self._metadata[place]
            or (self._seen and _is_anything_attached([results[place]]))
        ]
        self._calls += 1
        if not changed and self._calls > FIRST_CALLS:
            checks.add(self._chosen(results))
        return changed

    def has_moved(self, results: list[Any], place: int) -> bool:
        """Return whether the tensor at a place was given other memory."""
        return place in self._metadata and results[place].data_ptr() != self._addresses[place]

    def was_inference(self, place: int) -> bool:
        """Return whether the tensor at a place was made in inference mode."""
        return bool(self._metadata[place][0])


_attributes = operator.attrgetter("__dict__")
_grad = operator.attrgetter("grad")
_hooks = operator.attrgetter("_backward_hooks")
_weak_references = weakref.getweakrefcount


def _is_anything_attached(tensors: Sequence[Any]) -> bool:
    """Return whether anything is attached to one of these, which have no history: `grad` would warn."""
    if any(map(_weak_references, tensors)) or any(map(_attributes, tensors)) or any(map(_hooks, tensors)):
        return True
    return list(map(_grad, tensors)).count(None) < len(tensors)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a program may change of a tensor besides its values; first whether inference mode made it."""
    made = tensor.is_inference(), tensor.requires_grad, tensor.data_ptr(), tensor.dtype
    flags = tensor.is_conj(), tensor.is_neg(), torch_internals.has_names(tensor)
    return *made, tuple(tensor.shape), tensor.stride(), *flags
