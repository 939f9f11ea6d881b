"""What a recording was made with and Python may change between calls: numbers, and which tensors stand where.

Looked at before every launch, so everything is compared in bulk, in C: numbers by value, all of one set of keys at
once; tensors and other objects by identity, over live views of the dicts and lists they stand in; the memory of tensors
by its address. (What an optimizer keeps is compared by identity only: `load_state_dict` puts other tensors there.)
Names are looked up only where something differs.
"""

from __future__ import annotations

import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.signature import PLAIN
from optimizations.capture.step.host_state import Container, HostState, Scope, Slots, copy_of, key_name

LONG = 1000
"""Lists with more members (data, not settings) are compared by their length."""
_OBJECTS = (dict, list, torch.nn.Module)


class Watch:
    """Containers, closure cells and addresses of a step, as they were when this was made.

    `ignore`: entries (container, key) that may change. `reads`: whether the graph reads a tensor that belongs to no
    module or optimizer; where it does not, another may take its place. `extra`: tensors that stand in no container.
    """

    def __init__(
        self,
        state: HostState,
        ignore: Callable[[Any, Any], bool],
        reads: Callable[[torch.Tensor], bool],
        extra: Sequence[torch.Tensor],
    ) -> None:
        self._entries: list[tuple[str, Any, Any, Any]] = []
        self._views: list[Iterable[Any]] = []
        self._sized: list[Any] = []
        scalars: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        owners: list[Any] = []
        keys: list[Any] = []
        self._single: list[Any] = []
        for container in state.containers:
            owner, entries = _entries(container, ignore)
            watched = [
                (key, value)
                for key, value in entries
                if _is_watched(value, container)
                and (container.always_read or not isinstance(value, torch.Tensor) or reads(value))
            ]
            self._entries += [(f"{container.path}.{key_name(key)}", owner, key, value) for key, value in watched]
            if numbers := tuple([key for key, value in watched if _is_number(value)]):
                scalars[numbers].append(owner)
            objects = [(key, value) for key, value in watched if not _is_number(value)]
            plain = type(owner) in (dict, list) and container.names is None
            if objects and plain and len(objects) == len(owner):
                self._views.append(owner.values() if type(owner) is dict else owner)
                continue
            for key, value in objects:
                owners.append(owner)
                keys.append(key)
                self._single.append(value)
            if not container.is_attributes and isinstance(container.held, (dict, list, set)):
                self._sized.append(container.held)
        self._owners, self._keys = owners, keys
        self._scalars = [(operator.itemgetter(*found), held) for found, held in scalars.items()]
        self._numbers = [list(map(getter, held)) for getter, held in self._scalars]
        self._sizes = list(map(len, self._sized))
        self._members = list(chain.from_iterable(self._views))
        by_optimizers = {
            id(value)
            for optimizer in state.optimizers.values()
            for kept in optimizer.state.values()
            if isinstance(kept, dict)
            for value in kept.values()
        }
        held = {
            id(value)
            for container in state.containers
            if container.always_read and isinstance(container.held, dict)
            for value in container.held.values()
        }
        reached = [
            tensor
            for tensor in state.tensors.values()
            if id(tensor) not in by_optimizers and (id(tensor) in held or reads(tensor))
        ]
        self._tensors = list({id(tensor): tensor for tensor in [*reached, *extra]}.values())
        self._indices = list(range(len(self._tensors)))
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        try:
            for (getter, held), numbers in zip(self._scalars, self._numbers, strict=True):
                if list(map(getter, held)) != numbers:
                    return False
            return list(map(len, self._sized)) == self._sizes and self._objects_stand()
        except (KeyError, IndexError, TypeError):
            return False

    def _objects_stand(self) -> bool:
        """Whether the same objects stand in the same places, and tensors have the same memory."""
        members = list(chain.from_iterable(self._views))
        return (
            len(members) == len(self._members)
            and all(map(operator.is_, members, self._members))
            and all(map(operator.is_, map(operator.getitem, self._owners, self._keys), self._single))
            and bool(torch_internals.data_ptrs_equal(self._tensors, self._addresses, self._indices))
        )

    def host_key(self) -> tuple[Any, ...]:
        """What is different now, with its values: calls for which this is equal may share a recording. () for none."""
        found = []
        for name, owner, key, old in self._entries:
            try:
                new = owner[key]
            except (KeyError, IndexError):
                new = None
            if new is not old and not (_is_number(new) and _is_number(old) and new == old):
                found.append((name, new if _is_number(new) else id(new)))
        sizes = map(len, self._sized)
        found += [("size", now) for now, then in zip(sizes, self._sizes, strict=True) if now != then]
        return tuple(found)

    def moved(self) -> bool:
        """Whether something else stands in the place of a tensor or object: the recording cannot be used again."""
        try:
            return not self._objects_stand()
        except (KeyError, IndexError, TypeError):
            return True

    def __len__(self) -> int:
        return len(self._entries)


class _Cell:
    """A closure cell with the look of a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError as error:
            raise KeyError(key) from error


def _entries(container: Container, ignore: Callable[[Any, Any], bool]) -> tuple[Any, list[tuple[Any, Any]]]:
    """What to look into, and its keys and values."""
    held = container.held
    if isinstance(held, types.CellType):
        return _Cell(held), [] if ignore(held, None) else [("cell_contents", container.content())]
    names = container.names
    if isinstance(held, (Scope, Slots)):
        found = [
            (key, value)
            for key, value in held.content().items()
            if (names is None or key in names) and not ignore(held, key)
        ]
        return _Scoped(held.scope) if isinstance(held, Scope) else held, found
    if isinstance(held, dict):
        found = [
            (key, value)
            for key, value in copy_of(held).items()
            if (names is None or key in names) and not ignore(held, key)
        ]
        if container.is_attributes:
            found = [(key, value) for key, value in found if not _is_own(key, value)]
        if any(ignore(held, key) for key in held):
            return _Scoped(held), found
        return held, found
    return held, list(enumerate(held)) if isinstance(held, list) and len(held) <= LONG else []


class _Scoped:
    """A dict of which only some entries are looked at."""

    def __init__(self, scope: dict[Any, Any]) -> None:
        self._scope = scope

    def __getitem__(self, key: Any) -> Any:
        return self._scope[key]


def _is_number(value: Any) -> bool:
    """Something compared by its value: numbers, strings, and tuples of such."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_number, value)))


def _is_watched(value: Any, container: Container) -> bool:
    """Whether an entry is looked at: of a library's objects only what they do not exchange for themselves."""
    if container.is_attributes and container.names is None:
        return _is_number(value) or isinstance(value, (torch.Tensor, *_OBJECTS))
    return True


def _is_own(key: Any, value: Any) -> bool:
    """What objects of libraries keep for themselves: containers are looked at on their own, and hooks do not change."""
    return isinstance(key, str) and key.startswith("_") and (isinstance(value, (dict, list)) or key in _MODULES_OWN)


_MODULES_OWN = frozenset({"_is_full_backward_hook", "_compiled_call_impl", "_backward_hooks", "_forward_hooks"})
