"""Check tensors that replays return again and again: did callers leave everything but their values unchanged?

CUDAGraph Trees keep one tensor object per result and return it in each call. What a caller did to the object, and not
to its values, would stay for the next one: a shape changed in place (`squeeze_`, `t_`), other memory (`set_`, `.data`),
`requires_grad_`, a history. So each object is checked before it is returned again, all in two calls into C++. That goes
for what a forward saves too: hooks of saved tensors get the very object, and `grad_fn.saved_tensors` gives it out.

Note [What is attached to results]. C++ does not see attributes (`y.name = ...`, the marks of `mark_dynamic`), nor a
gradient, nor `retain_grad()`: the next result would come with the gradient of this one, or be left without its own. Nor
does it see hooks, which stay where a gradient was required and is not any more (`detach_`), and would change the next
result's gradient; those of a forward lose theirs in each call (`results`). Nor does it see weak references: what a
program keeps for a tensor as long as that is alive (`WeakTensorKeyDictionary`) would be found for the next result,
which has other values. Python is asked, of results that callers see: all of an inference and of a backward
(`torch.autograd.grad` gives out the very tensors), and of a forward those that it returns
(`RecordableFunction.callers_get`). What a forward saves has no other user, until hooks of saved tensors get it; where
it is not known what that is, all are checked.

Note [Marks of AOTAutograd]. Where shapes are dynamic, AOTAutograd marks each result of each call with its dynamic
dimensions, in an attribute that `maybe_mark_dynamic` uses too. Programs of changing sizes (detection) would have all
their results made again in each call. So that mark is taken off what comes back with nothing else attached.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.report.recordings import Direction
from optimizations.torch_internals.tensor_guard import same_metadata_of_each

MOST_LOOKS = 4
"""Looks that are compared in C++: what surrounds a call is part of them (autocast, inference mode)."""
FIRST_CALLS = 4
"""Calls that are compared in Python. Laying out looks for C++ takes longer, and not every graph is replayed often."""
MOST_LAID_OUT = 8
"""How often looks are laid out for one recording; what keeps changing is compared in Python."""


def choosing(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that gives the values at these places, in one call."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    if not places:
        return lambda values: ()
    (place,) = places
    return lambda values: (values[place],)


class HandedOut:
    """Hold the metadata that tensors of one recording have while unchanged. It holds none of the tensors.

    Args:
        results: tensors as they were made, None at other places.
        direction: of a forward autograd gives them a history in each call, and so may take the one of the call before.
        seen: the places of those that callers may see; None where it may be all.

    Attributes:
        asks_some: whether Python is asked of some of them only. Note [What is attached to results].
    """

    def __init__(
        self, results: Sequence[torch.Tensor | None], direction: Direction, seen: Iterable[int] | None = None
    ) -> None:
        self._places = [place for place, result in enumerate(results) if result is not None]
        self._all = len(self._places) == len(results)
        self._chosen = choosing(self._places)
        self._has_histories = direction == "forward"
        # Note [What is attached to results]
        self._seen = set(self._places if seen is None else set(self._places).intersection(seen))
        self.asks_some = len(self._seen) < len(self._places)
        self._with_history: set[int] = set()
        self._choose_who_is_asked()
        made = [result for result in results if result is not None]
        self._addresses = [None if result is None else result.data_ptr() for result in results]
        self._geometry = {place: _geometry(result) for place, result in zip(self._places, made, strict=True)}
        self._inference = {place: result.is_inference() for place, result in zip(self._places, made, strict=True)}
        self._calls = 0
        self._laid_out = 0
        self._looks: list[Callable[..., bool]] = []

    def changed(self, results: list[Any]) -> list[int]:
        """Return the places of the tensors that have changed, in the list that keeps them."""
        looks = self._looks
        if looks and torch_internals.data_ptrs_equal(results, self._addresses, self._places):
            chosen = self.tensors(results)
            for look in looks:
                if look(*chosen):
                    asked = self._asked(results) if self.asks_some else chosen
                    without_history = self._asked_without_history(results) if self._has_histories else asked
                    if not self._anything_attached(asked, without_history):
                        return []
                    del asked, without_history
                    break
            del chosen
        changed = [
            place
            for place in self._places
            if not self._is_as_it_was(results[place], place)
            or (place in self._seen and self._anything_attached([results[place]], self._plain(results, place)))
        ]
        self._calls += 1
        if not changed and self._calls > FIRST_CALLS and self._laid_out < MOST_LAID_OUT:
            self._laid_out += 1
            looks.insert(0, same_metadata_of_each([results[place] for place in self._places]))
            del looks[MOST_LOOKS:]
        return changed

    def ask_all(self) -> None:
        """Callback: hooks also get the saved tensors."""
        self._seen, self.asks_some = set(self._places), False
        self._choose_who_is_asked()

    def tensors(self, results: list[Any]) -> Sequence[Any]:
        """Return the tensors of the list that keeps them, without the list's other entries."""
        return results if self._all else self._chosen(results)

    def has_moved(self, results: list[Any], place: int) -> bool:
        """Return whether the tensor at a place was given other memory."""
        return bool(results[place].data_ptr() != self._addresses[place])

    def was_inference(self, place: int) -> bool:
        """Return whether the tensor at a place was made in inference mode."""
        return self._inference[place]

    def _choose_who_is_asked(self) -> None:
        self._asked = choosing(sorted(self._seen))
        self._asked_without_history = choosing(sorted(self._seen - self._with_history))

    def _plain(self, results: list[Any], place: int) -> Sequence[Any]:
        return [] if place in self._with_history else [results[place]]

    def _anything_attached(self, asked: Sequence[Any], without_history: Sequence[Any]) -> bool:
        """Return whether anything is attached. Note [What is attached to results]. `grad` of a non-leaf warns."""
        if any(map(_weak_references, asked)) or (any(map(_attributes, asked)) and not _only_marked(asked)):
            return True
        if any(map(_retains_grad if self._has_histories else _hooks, asked)):
            return True
        return list(map(_grad, without_history)).count(None) < len(without_history)

    def _is_as_it_was(self, result: Any, place: int) -> bool:
        if type(result) is not torch.Tensor or result.data_ptr() != self._addresses[place]:
            return False
        if result.requires_grad:
            if not (self._has_histories and result.grad_fn is not None):
                return False
            self._seen.add(place)
            self._with_history.add(place)
            self._choose_who_is_asked()
        return _geometry(result) == self._geometry[place] and result.is_inference() == self._inference[place]


_attributes = operator.attrgetter("__dict__")
_grad = operator.attrgetter("grad")
_hooks = operator.attrgetter("_backward_hooks")
_retains_grad = operator.attrgetter("retains_grad")
_weak_references = weakref.getweakrefcount


def _only_marked(tensors: Iterable[Any]) -> bool:
    """Return whether none has an attribute but AOTAutograd's mark, which is removed. Note [Marks of AOTAutograd]."""
    for tensor in tensors:
        attributes = tensor.__dict__
        if not attributes:
            continue
        if not torch_internals.DYNAMIC_MARKS.issuperset(attributes):
            return False
        attributes.clear()
    return True


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    names = torch_internals.has_names(tensor)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg(), names
