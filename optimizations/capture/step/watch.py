"""Compare the current Python state with that of the recording, before each replay.

Entries are compared in bulk (`held_values`). A dict is compared by its version. After a write that changed no relevant
entry, it is compared by its entries. If an entry is a different object, its value is compared: an equal number is no
change, and from then on that entry is compared by value. If a container was replaced, everything that the step reaches
is collected again and compared by names and values (`differences`).
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.signature import PLAIN, exact
from optimizations.capture.step.host_state import LONG, MODULE_HOOKS, Container, Hooks, HostState, is_own
from optimizations.capture.step.tensor_marks import Metadata
from optimizations.torch_internals.held_values import Held, HeldValues

Ignore = Callable[[Any, Any], bool]
"""A predicate that is true of entries (container, key) that may change."""

FEW = 64
"""If optimizers keep more tensors, only some of their addresses are compared before each replay."""

_BY_IDENTITY = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, FunctionType, MethodType, type, enum.Enum)
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)


SIZE = object()
_ANY_SIZE = "any"
"""The size of an ordinary object's `__dict__` is not compared: only attributes that code names matter."""


@dataclass(frozen=True, slots=True)
class Value:
    """Describe one compared entry: its name, container, key and value.

    Attributes:
        key: `SIZE` if the `value` is the number of members of the container.
        token: the compared value; equal tokens are no change.
    """

    name: str
    container: Container
    key: Any
    value: Any
    token: Hashable

    @property
    def current(self) -> Any:
        """Return the current value of the entry, or the current size."""
        return len(self.container.held) if self.key is SIZE else self.container.get(self.key)

    @property
    def is_unchanged(self) -> bool:
        """Return whether the entry has the same object or an equal number, and exists."""
        try:
            now = self.current
            return now is self.value or (is_plain(self.value) and is_plain(now) and exact(now) == exact(self.value))
        except _UNREADABLE:
            return False


_is_unchanged = operator.attrgetter("is_unchanged")


def is_plain(value: Any) -> bool:
    """Return whether a value is of a `PLAIN` type, such as a number or string, or a tuple of such values."""
    kind = type(value)
    return issubclass(kind, PLAIN) or (kind is tuple and all(map(is_plain, value)))


def _token(value: Any) -> Hashable:
    """Return what represents a value: an object's identity, or its class if its content is compared separately."""
    if is_plain(value):
        return exact(value)
    return type(value), id(value) if isinstance(value, _BY_IDENTITY) else None


def compared(state: HostState, ignore: Ignore) -> dict[str, Value]:
    """Return every compared entry by name, including tensors. Members of sets and queues are not compared.

    Equal names, such as those of variables of two functions, get numbers.
    """
    found: dict[str, Value] = {}
    numbers: dict[str, int] = {}
    for container in state.containers:
        held, sized = container.held, container.names is None
        if not container.is_compared or (sized and isinstance(held, (set, deque))):
            continue
        content = container.content() if not sized or len(held) <= LONG else {}
        entries: list[tuple[str, Any, Any, Hashable]] = [
            (container.name_of(key), key, value, _token(value))
            for key, value in content.items()
            if not (ignore(held, key) or _is_own(container, key, value))
        ]
        may_come = container.is_attributes and any(ignore(held, key) for key in content)
        if sized and not may_come:
            token = exact(len(held)) if _is_sized(container) else _ANY_SIZE
            entries.append((f"{container.path} (size)", SIZE, len(held), token))
        for name, *entry in entries:
            unique = name
            while unique in found:
                numbers[name] = numbers.get(name, 1) + 1
                unique = f"{name} ({numbers[name]})"
            found[unique] = Value(unique, container, *entry)
    return found


def _is_sized(container: Container) -> bool:
    """Return whether any added entry is a change, whatever its name."""
    if not container.is_attributes or is_of_module(container):
        return True
    return container.always_read and "param_groups" not in container.held


def is_of_module(container: Container) -> bool:
    """Return whether these are the attributes of a module."""
    return container.names is None and isinstance(container.held, dict) and "_parameters" in container.held


def _is_own(container: Container, key: Any, value: Any) -> bool:
    """Return whether an attribute is internal to PyTorch. A dict of hooks is internal only while it is empty."""
    if not (container.is_attributes and isinstance(key, str)):
        return False
    return not value if key in MODULE_HOOKS else is_own(key)


def is_dropped(name: str, dropped: Collection[str]) -> bool:
    """Return whether an entry, or a container of it, is excluded from the comparison by name."""
    return bool(dropped) and not _and_before(name).isdisjoint(dropped)


@functools.lru_cache(maxsize=65536)
def _and_before(name: str) -> frozenset[str]:
    """Return a name and those of its containers: for `a.b[0]` also `a.b` and `a`."""
    ends = [index for index, letter in enumerate(name) if letter in ".[" or name.startswith(" (", index)]
    return frozenset((name, *(name[:end] for end in ends)))


class Watch:
    """Record the Python state of a step, and compare it before replays.

    Args:
        ignore: entries that may change.
        reads: whether the graph reads a tensor. Tensors of modules and optimizers count as read.
        extra: tensors that are in no container.
        hooks_of_tensors: hooks of parameters ran during the capture, so their changes count.
        dropped: names of excluded entries; the set may grow later.
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
        self._hooks = Hooks(state.parameters() if hooks_of_tensors else (), [*modules, *state.optimizers.values()])
        found = _read_tensors(state, reads, extra, self._dropped)
        kept = _kept_by_optimizers(state, found)
        of_optimizers = {id(one) for group in kept for one in group}
        self._known = tuple(one for one in found if id(one) not in of_optimizers)
        self._metadata = Metadata(self._known)
        self._known_in_place, self.in_place = address_check(self._known), address_check(found)
        self._kept_in_place = address_checks(kept)
        # Later a different tensor may have the same address, so names are compared from then on.
        tensors = {name: one for name, one in compared(state, ignore).items() if isinstance(one.value, torch.Tensor)}
        self._unread = {name for name, one in tensors.items() if not (one.container.always_read or reads(one.value))}
        self._values = self._compared(state)
        self._compare_these()

    def _compared(self, state: HostState) -> dict[str, Value]:
        """Return the entries that count; a tensor only if the graph reads it."""
        every = compared(state, self._ignore)
        return {
            name: one
            for name, one in every.items()
            if not (is_dropped(name, self._dropped) or (name in self._unread and not one.container.always_read))
        }

    def _compare_these(self) -> None:
        """Set up the comparison in C++, and find the entries that have to be compared in Python."""
        by_container: dict[int, list[Value]] = {}
        for one in self._values.values():
            by_container.setdefault(id(one.container), []).append(one)
        held: list[Held] = []
        self._in_python: list[Value] = []
        for values in by_container.values():
            container = values[0].container
            entries = [(one.key, one.value) for one in values if one.key is not SIZE and one.name not in self._by_value]
            size = next((one.value for one in values if one.key is SIZE), None)
            is_written = id(container.held) in self._written
            same = Held(container.held, tuple(entries), size, container.has_attributes, is_written)
            if same.is_comparable:
                held += [same] if entries or size is not None else []
                values = [one for one in values if one.name in self._by_value]
            self._in_python += values
        self._held = HeldValues(held)

    def unchanged(self) -> bool:
        """Return whether nothing changed in the recorded containers."""
        try:
            if not self._held.same():
                others = [one for one in self._values.values() if one.current is not one.value]
                if not all(one.is_unchanged for one in others):
                    return False
                self._by_value.update(one.name for one in others if one.key is not SIZE)
                self._written.update(map(id, self._held.written()))
                self._compare_these()
        except _UNREADABLE:
            return False
        return (
            (not self._in_python or all(map(_is_unchanged, self._in_python)))
            and self._metadata.same(self._known)
            and self._known_in_place()
            and next(self._kept_in_place)()
            and self._hooks.unchanged()
        )

    def can_replay_in(self, state: HostState) -> bool:
        """Return whether a step that reaches this state may be replayed. If so, record its containers."""
        values = self._compared(state)
        then = {name: one.token for name, one in self._values.items() if not is_dropped(name, self._dropped)}
        if then != {name: one.token for name, one in values.items()} or not (
            self._metadata.same(self._known) and self.in_place() and self._hooks.unchanged()
        ):
            return False
        self._values = values
        self._compare_these()
        return True

    def is_over(self, state: HostState | None) -> bool:
        """Return whether a tensor was replaced or moved, so that no call can be replayed again.

        `state`: what the step reaches now; None if this is unknown.
        """
        if state is None or not self.in_place():
            return not self.in_place()
        kinds = (torch.Tensor, torch.nn.Module)
        then = {name: one.token for name, one in self._values.items() if isinstance(one.value, kinds)}
        now = {name: one.token for name, one in self._compared(state).items() if isinstance(one.value, kinds)}
        return any(then[name] != now[name] for name in then.keys() & now.keys())

    def differing(self) -> list[str]:
        """Return the names of changed entries in the recorded containers."""
        return [name for name, one in self._values.items() if not one.is_unchanged]

    def __len__(self) -> int:
        return len(self._values)


def address_check(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """Return a function that checks whether these tensors still have their current addresses."""
    held = list(tensors)
    addresses = [tensor.data_ptr() for tensor in held]
    return functools.partial(torch_internals.data_ptrs_equal, held, addresses, list(range(len(held))))


def address_checks(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[Callable[[], bool]]:
    """Return an endless iterator of address checks. With more than `FEW` tensors, each checks one of several parts.

    Reading an address takes 60 ns, and an optimizer keeps three tensors for each parameter. A program that moves
    tensors (`.data =`), such as to offload them, moves all of them or the same tensor of every group, so that each part
    has some of these.
    """
    ordered = [one for same in itertools.zip_longest(*groups) for one in same if one is not None]
    turns = max(-(-len(ordered) // FEW), 1)
    return itertools.cycle([address_check(ordered[turn::turns]) for turn in range(turns)])


def _read_tensors(
    state: HostState, reads: Callable[[torch.Tensor], bool], extra: Sequence[torch.Tensor], dropped: Collection[str]
) -> list[torch.Tensor]:
    """Return the tensors whose addresses are compared: of modules and optimizers, and those that the graph reads."""
    held = {id(value) for one in state.containers if one.always_read for value in one.content().values()}
    compared = (tensor for path, tensor in state.tensors.items() if not is_dropped(path, dropped))
    reached = (tensor for tensor in compared if id(tensor) in held or reads(tensor))
    return list({id(tensor): tensor for tensor in [*reached, *extra]}.values())


def _kept_by_optimizers(state: HostState, among: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the optimizers' own state tensors, grouped by parameter."""
    others = {id(tensor) for one in state.modules.values() for tensor in [*one.parameters(), *one.buffers()]}
    left = {id(one): one for one in among if id(one) not in others}
    every = (kept for one in state.optimizers.values() for kept in one.state.values() if isinstance(kept, dict))
    found = [[left.pop(id(one)) for one in kept.values() if id(one) in left] for kept in every]
    return list(filter(None, found))
