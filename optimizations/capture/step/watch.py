"""Compare the Python state that a recording was made with, before each replay.

Entries are compared in bulk (`held_values`): a dict by its version, and by its entries once it was written though all
that counts in it is as it was. Where an entry holds another object, its value counts: an equal number is no change, and
from then on that entry is compared by its value. Where a container was exchanged, the state is reached once more and
compared by names and values (`differences`).
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.signature import PLAIN, exact
from optimizations.capture.step.host_state import (
    MODULE_HOOKS,
    Container,
    Hooks,
    HostState,
    Part,
)
from optimizations.capture.step.reach import LONG, is_own
from optimizations.capture.step.tensor_marks import Metadata
from optimizations.torch_internals.dictionary_writes import have_versions
from optimizations.torch_internals.held_values import Held, HeldValues, can_be_compared, is_dict

Ignore = Callable[[Any, Any], bool]
"""Whether an entry (what holds it, key) may change."""

FEW = 64
"""Tensors kept by optimizers up to which all addresses are compared each time."""

_FUNCTIONS = (types.FunctionType, types.MethodType, type)
_BY_IDENTITY = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, *_FUNCTIONS, enum.Enum)
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Value:
    """Hold one compared entry: its name, where it stands, and what stands there.

    Attributes:
        key: `SIZE` for the number of members of a container, which is the `value` then.
        token: what it is compared by; equal tokens are no change.
    """

    name: str
    container: Container
    key: Any
    value: Any
    token: Hashable

    @property
    def is_plain(self) -> bool:
        """Return whether it is compared by its value, and not by identity or type."""
        return not isinstance(self.token, _Token)

    @property
    def dropped_as(self) -> str:
        """Return the name under which it is left out of the comparison."""
        by_name = self.container.is_attributes or isinstance(self.key, str)
        return self.name if by_name else self.container.path


SIZE = object()
_ANY_SIZE = "any"
"""Of attributes of ordinary objects: they get some at any time, of which only those count that code names."""


@dataclass(frozen=True, slots=True)
class _Token:
    """Stand for an object: by its identity, or by its class where its content is compared by itself."""

    kind: type
    identity: int = 0


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, string or the like, or a tuple of such."""
    kind = type(value)
    return issubclass(kind, PLAIN) or (kind is tuple and all(map(is_plain, value)))


def _token(value: Any) -> Hashable:
    if is_plain(value):
        return exact(value)
    return _Token(type(value), id(value) if isinstance(value, _BY_IDENTITY) else 0)


def compared(state: HostState, ignore: Ignore) -> Iterator[Value]:
    """Yield every entry that calls are compared by; tensors among them. Members of sets and queues are not."""
    for container in state.containers:
        held = container.held
        if not container.is_compared or isinstance(held, (set, deque)):
            continue
        sized = isinstance(held, (dict, list))
        entries = container.content() if not sized or len(held) <= LONG else {}
        for key, value in entries.items():
            if not (ignore(held, key) or _is_own(container, key, value)):
                yield Value(container.name_of(key), container, key, value, _token(value))
        may_come = container.is_attributes and any(ignore(held, key) for key in entries)
        if sized and not may_come:
            token = exact(len(held)) if _is_sized(container) else _ANY_SIZE
            yield Value(f"{container.path} (size)", container, SIZE, len(held), token)


def _is_sized(container: Container) -> bool:
    """Return whether it matters that entries are added, whatever their names."""
    if not container.is_attributes or is_of_module(container):
        return True
    return container.always_read and "param_groups" not in container.held


def is_of_module(container: Container) -> bool:
    """Return whether these are the attributes of a module."""
    return isinstance(container.held, dict) and "_parameters" in container.held


def by_name(values: Iterable[Value]) -> dict[str, Value]:
    """Return entries by their names, with numbers where several have one name, as variables of two functions may."""
    found: dict[str, Value] = {}
    for one in values:
        name, number = one.name, 1
        while name in found:
            number += 1
            name = f"{one.name} ({number})"
        found[name] = one if number == 1 else replace(one, name=name)
    return found


def _is_own(container: Container, key: Any, value: Any) -> bool:
    """Return whether PyTorch keeps something for itself there. Dicts of hooks count where they hold some (`hooks`)."""
    if not (container.is_attributes and isinstance(key, str)):
        return False
    return not value if key in MODULE_HOOKS else is_own(key)


def is_dropped(name: str, dropped: Collection[str]) -> bool:
    """Return whether an entry, or what it stands in, is among the names left out of the comparison."""
    return bool(dropped) and not _and_before(name).isdisjoint(dropped)


@functools.lru_cache(maxsize=65536)
def _and_before(name: str) -> frozenset[str]:
    """Return a name and those of what it stands in: of `a.b[0]` also `a.b` and `a`."""
    ends = [index for index, letter in enumerate(name) if letter in ".[" or name.startswith(" (", index)]
    return frozenset((name, *(name[:end] for end in ends)))


class Watch:
    """Hold the state of a step as it is when this is made.

    Args:
        ignore: entries that may change.
        reads: whether the graph reads a tensor. Tensors of modules and optimizers count as read.
        extra: tensors that stand in no container.
        hooks_of_tensors: those of parameters run in the graph, so that others are a change.
        dropped: names of entries that are left out; it may grow later.
    """

    def __init__(
        self,
        state: HostState,
        ignore: Ignore,
        reads: Callable[[torch.Tensor], bool],
        extra: Sequence[torch.Tensor],
        *,
        hooks_of_tensors: bool = True,
        dropped: set[str] | None = None,
    ) -> None:
        self._ignore = ignore
        self._dropped = set() if dropped is None else dropped
        self._by_value: set[str] = set()
        self._written: set[int] = set()
        modules = [module for module in state.modules.values() if not ignore(vars(module), MODULE_HOOKS[0])]
        self._hooks = Hooks(state.parameters() if hooks_of_tensors else (), modules)
        found = _read_tensors(state, reads, extra, self._dropped)
        kept = _kept_by_optimizers(state, found)
        of_optimizers = {id(one) for group in kept for one in group}
        self._known = tuple(one for one in found if id(one) not in of_optimizers)
        self._metadata = Metadata(self._known)
        self._known_lie, self._all_lie = lying(self._known), lying(found)
        self._kept_lie = lying_in_turn(kept)
        # An address says nothing later, when another tensor may lie there: from then on names count.
        every = by_name(compared(state, ignore))
        self._unread = {
            name for name, one in every.items() if isinstance(one.value, torch.Tensor) and not reads(one.value)
        }
        self._take_in(state)

    def _take_in(self, state: HostState) -> None:
        self._looks_again = False
        self._values = self._compared(state)
        self._compare_these()

    def _compared(self, state: HostState) -> dict[str, Value]:
        return {name: one for name, one in by_name(compared(state, self._ignore)).items() if self._counts(name, one)}

    def _counts(self, name: str, one: Value) -> bool:
        """Return whether an entry is compared; a tensor only if the graph reads what stands there."""
        return (one.container.always_read or name not in self._unread) and not is_dropped(name, self._dropped)

    def _compare_these(self) -> None:
        """Make the comparison in C++, and find what is to be compared in Python."""
        by_container: dict[int, list[Value]] = {}
        for one in self._values.values():
            by_container.setdefault(id(one.container), []).append(one)
        held: list[Held] = []
        self._in_python: list[Value] = []
        for values in by_container.values():
            content = values[0].container.held
            holder = content.holder if isinstance(content, Part) else content
            attributes = isinstance(content, Part) and not isinstance(holder, dict)
            is_written = id(holder) in self._written
            size = next((one.value for one in values if one.key is SIZE), None)
            entries = tuple(
                [(one.key, one.value) for one in values if one.key is not SIZE and one.name not in self._by_value]
            )
            by_version = is_dict(holder) and have_versions() and not (attributes or is_written)
            if attributes or by_version or can_be_compared(holder, [key for key, _ in entries]):
                if entries or size is not None:
                    held.append(Held(holder, entries, None if attributes else size, attributes, is_written))
                values = [one for one in values if one.name in self._by_value]
            self._in_python += values
        self._held = HeldValues(held)

    def unchanged(self) -> bool:
        """Return whether everything is as it was, as far as the same containers show it."""
        if self._looks_again:
            return False
        try:
            if not self._held.same():
                others = [one for one in self._values.values() if _current(one) is not one.value]
                if not all(map(_stands, others)):
                    return False
                self._by_value.update(one.name for one in others if one.key is not SIZE)
                self._written.update(map(id, self._held.written()))
                self._compare_these()
            return (
                (not self._in_python or all(map(_stands, self._in_python)))
                and self._metadata.same(self._known)
                and self._known_lie()
                and next(self._kept_lie)()
                and self._hooks.unchanged()
            )
        except _UNREADABLE:
            return False

    def differences(self, state: HostState) -> list[tuple[Value | None, Value | None]]:
        """Return the entries that are not as they were in what the step reaches now: as they were, and as they are."""
        now, then = self._compared(state), self._values
        pairs = [(then.get(name), now.get(name)) for name in {**then, **now}]
        return [
            (old, new)
            for old, new in pairs
            if (old.token if old else None) != (new.token if new else None)
            and not (old and is_dropped(old.name, self._dropped))
        ]

    def stands_in(self, state: HostState) -> bool:
        """Return whether a step that reaches this state may be replayed. Containers of it are compared from then on."""
        if self.differences(state) or not (
            self._metadata.same(self._known) and self.in_place() and self._hooks.unchanged()
        ):
            return False
        self._take_in(state)
        return True

    def look_again(self) -> None:
        """Compare by what a step reaches before the next replay."""
        self._looks_again = True

    def in_place(self) -> bool:
        """Return whether tensors have the same memory."""
        return self._all_lie()

    def is_over(self, state: HostState) -> bool:
        """Return whether another tensor stands where one stood, or it lies elsewhere: no call can be replayed again."""
        if not self.in_place():
            return True
        kinds = (torch.Tensor, torch.nn.Module)
        reached = self._compared(state).values()
        now = {one.name: one.token for one in reached if isinstance(one.value, kinds)}
        then = {one.name: one.token for one in self._values.values() if isinstance(one.value, kinds)}
        return any(then[name] != token for name, token in now.items() if name in then)

    def differing(self) -> list[str]:
        """Return the names of entries that are not as they were, as far as the same containers show it."""
        found = []
        for one in self._values.values():
            try:
                same = _stands(one)
            except _UNREADABLE:
                same = False
            if not same:
                found.append(one.name)
        return found

    def __len__(self) -> int:
        return len(self._values)


def _current(one: Value) -> Any:
    """Return what an entry holds now, or how many members there are."""
    return len(one.container.held) if one.key is SIZE else one.container.get(one.key)


def _stands(one: Value) -> bool:
    """Return whether an entry holds what it held, or an equal number."""
    now = _current(one)
    return now is one.value or (one.is_plain and is_plain(now) and exact(now) == exact(one.value))


def lying(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """Return a function that checks whether these tensors lie where they lie now."""
    held = list(tensors)
    addresses = [tensor.data_ptr() for tensor in held]
    return functools.partial(torch_internals.data_ptrs_equal, held, addresses, list(range(len(held))))


def lying_in_turn(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[Callable[[], bool]]:
    """Return such functions without end: if there are more than `FEW` tensors, each checks one of every group.

    PyTorch takes 60 ns for an address, and an optimizer keeps three tensors for each parameter. What moves one of a
    group in place (`.data =`) moves all of them, or the same ones of other groups, such as when they are offloaded.
    """
    if sum(map(len, groups)) <= FEW:
        return itertools.repeat(lying(one for group in groups for one in group))
    longest = max(map(len, groups))
    return itertools.cycle(
        [lying(group[(place + turn) % len(group)] for place, group in enumerate(groups)) for turn in range(longest)]
    )


def _read_tensors(
    state: HostState, reads: Callable[[torch.Tensor], bool], extra: Sequence[torch.Tensor], dropped: Collection[str]
) -> list[torch.Tensor]:
    """Return the tensors whose memory is compared: those of modules and optimizers, and those that the graph reads."""
    held = {
        id(value)
        for container in state.containers
        if container.always_read and isinstance(container.held, dict)
        for value in container.held.values()
    }
    compared = [tensor for path, tensor in state.tensors.items() if not is_dropped(path, dropped)]
    reached = (tensor for tensor in compared if id(tensor) in held or reads(tensor))
    return list({id(tensor): tensor for tensor in [*reached, *extra]}.values())


def _kept_by_optimizers(state: HostState, among: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors that optimizers keep and that are nothing else, grouped by the parameters they belong to."""
    others = {id(tensor) for one in state.modules.values() for tensor in [*one.parameters(), *one.buffers()]}
    left = {id(one): one for one in among if id(one) not in others}
    every = (kept for one in state.optimizers.values() for kept in one.state.values() if isinstance(kept, dict))
    found = [[left.pop(id(one)) for one in kept.values() if id(one) in left] for kept in every]
    return list(filter(None, found))
