"""Check that callers left everything but the values of repeatedly returned tensors unchanged.

CUDAGraph Trees keep one tensor object per result. For an inference or a forward, callers get a new tensor over the same
memory in each call (`results`). Gradients and saved tensors are too many for that, so each call returns the same
objects. A caller's change of the object would persist: a shape changed in place (`squeeze_`, `t_`), other memory
(`set_`, `.data`), `requires_grad_`, an autograd history. So each object is checked before it is returned again, all in
two calls into C++.

Note [What is attached to results]. The comparison in C++ does not cover attributes (`y.name = ...`), a gradient, or
hooks, which remain after `detach_`. Nor does it cover weak references: an entry of a `WeakTensorKeyDictionary` would be
found for the next result, which has other values. For the results of a backward Python checks these as well, because
`torch.autograd.grad` returns the same objects. Saved tensors are only reachable through saved-tensor hooks, which get
new tensors, and `grad_fn.saved_tensors`.
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


class LiveResults:
    """Hold the metadata of one recording's unchanged tensors, without references to the tensors.

    Args:
        results: tensors as they were made, None at other positions.
        seen: whether callers can access them, and attach something. Note [What is attached to results].
    """

    def __init__(self, results: Sequence[torch.Tensor | None], *, seen: bool) -> None:
        self._places = [place for place, result in enumerate(results) if result is not None]
        self._chosen = picker(self._places)
        self._seen = seen
        self._addresses = [None if result is None else result.data_ptr() for result in results]
        self._metadata = {place: _metadata(result) for place, result in enumerate(results) if result is not None}
        self._checks = MetadataChecks()

    def changed(self, results: list[Any]) -> list[int]:
        """Return the positions of the tensors that have changed, in the list that keeps them."""
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
        if not changed:
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
    """Return all metadata that a program may change; first whether the tensor was made in inference mode."""
    made = tensor.is_inference(), tensor.requires_grad, tensor.data_ptr(), tensor.dtype
    flags = tensor.is_conj(), tensor.is_neg(), torch_internals.has_names(tensor)
    return *made, tuple(tensor.shape), tensor.stride(), *flags
