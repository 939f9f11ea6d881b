"""Tensors that a step reads and binds to what it made of them: `self.total = self.total + loss.detach()`.

Note [Read and bound again]. A graph reads fixed memory, and eager leaves the tensor from before as it is, for whoever
holds it. So what stands there before a call is passed to the graph as an argument is, and what the call binds is a
result. Nothing is written in place, and the program may put another tensor there between calls. That is so where the
old tensor looks like the new one, neither takes part in differentiation, and the old one stands in no place that the
step reaches, other than those it binds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from optimizations.capture.step.call import Call
from optimizations.capture.step.gradients import gradients
from optimizations.capture.step.host_state import Entry, HostState, Place, Rebound, entries_of, place_of
from optimizations.capture.step.observer import memory
from optimizations.capture.step.tensor_marks import look, looks
from optimizations.lazy_view import is_lazy_view
from optimizations.report.steps import Refusal

Places = frozenset[Place]
STANDS_ELSEWHERE = Refusal(
    "reads a tensor that it binds again, and before each call that might be recorded a value of another kind stands "
    "there, or a tensor that stands in a second place, too, as in the `.grad` of a parameter",
    "bind it to a copy: `self.before = parameter.grad.detach().clone()`",
)


def running_values(
    state: HostState, before: Sequence[Any], holds: Callable[[torch.Tensor], bool], *, but: Collection[Rebound]
) -> list[Rebound]:
    """Entries that a call read and bound again. `before` is a snapshot of the state, `but` are those not read.

    One that was not read counts too if another entry was bound to what it held.
    """
    found = [
        entry
        for entry in state.rebound(list(before))
        if entry.old is not None and _may_run(entry.old, entry.new, holds)
    ]
    if not found:
        return []
    stands_at = _places_by_storage(state, before)
    reached = {memory(tensor) for tensor in state.tensors.values()}
    while True:
        fixed = reached - {memory(_old(entry)) for entry in found}  # one may be bound to what another one held
        together: dict[int, set[Place]] = {}
        for entry in found:
            together.setdefault(id(entry.old), set()).add(entry.place)
        left = [
            entry
            for entry in found
            if memory(entry.new) not in fixed and stands_at.get(memory(_old(entry))) == together[id(entry.old)]
        ]
        if len(left) == len(found):
            break
        found = left
    left_out, handed_on = {entry.place for entry in but}, {memory(entry.new) for entry in found}
    return [entry for entry in found if entry.place not in left_out or memory(_old(entry)) in handed_on]


def _places_by_storage(state: HostState, before: Sequence[Any]) -> dict[int, set[Place]]:
    """Where the memory of tensors is held; two functions of a module may name the same variable."""
    found: dict[int, set[Place]] = {}
    for container, content in zip(state.containers, before, strict=True):
        for key, value in entries_of(container, content):
            for tensor in _tensors(value):
                found.setdefault(memory(tensor), set()).add(place_of(container.held, _hashable(key)))
    for index, gradient in enumerate(gradients(state.parameters())):
        if gradient is not None:
            found.setdefault(memory(gradient), set()).add((0, index))
    return found


def tensors_in_two_places(state: HostState) -> set[int]:
    """Identities of tensors that stand in more than one of the places that are reached."""
    first: dict[int, Place] = {}
    found: set[int] = set()
    for container, content in zip(state.containers, state.snapshot(), strict=True):
        for key, value in entries_of(container, content):
            place = place_of(container.held, _hashable(key))
            found.update(id(tensor) for tensor in _tensors(value) if first.setdefault(id(tensor), place) != place)
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, set, frozenset)):
        for member in value:
            yield from _tensors(member)


def _hashable(key: Any) -> Any:
    return key if isinstance(key, Hashable) else id(key)


def _may_run(old: torch.Tensor, new: torch.Tensor, holds: Callable[[torch.Tensor], bool]) -> bool:
    return _is_plain(old) and _is_plain(new) and holds(old) and holds(new) and look(old) == look(new)


def _is_plain(tensor: torch.Tensor) -> bool:
    """A tensor that a placeholder can stand for, and a result of the graph."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or is_lazy_view(tensor))
        and tensor.is_inference() == torch.is_inference_mode_enabled()
    )


def _old(entry: Rebound) -> torch.Tensor:
    assert entry.old is not None
    return entry.old


def places_of(entries: Collection[Rebound]) -> Places:
    """Where they stand."""
    return frozenset(entry.place for entry in entries)


def entries_at(state: HostState, places: Places, holds: Callable[[torch.Tensor], bool]) -> list[Rebound] | None:
    """The tensors that stand there now, each as old and new; None if something else does.

    That is what cannot be passed to a graph as well, and a tensor that stands in another place too.
    """
    found: dict[Place, Rebound] = {}
    if not places:
        return []
    content = state.snapshot()
    for container, entries in zip(state.containers, content, strict=True):
        for key, value in entries_of(container, entries):
            place = place_of(container.held, _hashable(key))
            if place in places and isinstance(value, torch.Tensor) and _is_plain(value) and holds(value):
                found.setdefault(place, Rebound(container, key, value, value))
    if len(found) < len(places):
        return None
    stands_at = _places_by_storage(state, content)
    alone = all(stands_at.get(memory(entry.new), set()) <= places for entry in found.values())
    return list(found.values()) if alone else None


def with_running(call: Call, entries: Sequence[Rebound]) -> Call:
    """The call with these tensors behind its arguments, and no part of its state."""
    paths = {id(tensor): path for path, tensor in call.state.tensors.items()}
    olds = list(map(_old, entries))
    labels = [paths.get(id(tensor), "a value that it binds again") for tensor in olds]
    left_out = set(map(id, olds))
    rest = {path: tensor for path, tensor in call.state.tensors.items() if id(tensor) not in left_out}
    return replace(
        call,
        tensors=[*call.tensors, *olds],
        labels=[*call.labels, *labels],
        origins=[*call.origins, *labels],
        state=replace(call.state, tensors=rest),
    )


class RunningInputs:
    """The values that stand at these places, read before each launch. They look as they do when this is made."""

    def __init__(self, entries: Sequence[Rebound]) -> None:
        self._entries = tuple([Entry(entry.container, entry.key) for entry in entries])
        self._looks = looks(map(_old, entries))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add_to(self, found: list[Any]) -> bool:
        """Append them to the tensors of a call. False where something else stands there."""
        for entry in self._entries:
            value = entry.current()
            if type(value) is not torch.Tensor:
                return False
            found.append(value)
        return True

    def behind(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The tensors of a call, and these behind them. None where they look otherwise than those that were there."""
        found = list(tensors)
        if not self.add_to(found):
            return None
        ours = found[len(tensors) :]
        return found if looks(ours) == self._looks else None
