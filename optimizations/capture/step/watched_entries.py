"""Which entries of dicts, lists, cells and objects a recording depends on, and how they are read without a change."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from optimizations.capture.signature import PLAIN
from optimizations.capture.step.host_state import (
    KEPT_BY_MODULES,
    MODULE_HOOKS,
    Computed,
    Container,
    Scope,
    Slots,
    copy_of,
)
from optimizations.capture.step.program_code import PARTIALS

LONG = 1000
"""Lists with more members (data, not settings) are compared by their length, and so are tensors of such dicts that no
kernel reads."""
_OBJECTS = (dict, list, torch.nn.Module)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, *PARTIALS)
UNREADABLE = KeyError, IndexError, TypeError, ValueError
"""What reading entries that are gone raises; the last of an empty cell."""


class Cell:
    """A closure cell with the look of a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError as error:
            raise KeyError(key) from error


class _Present:
    """The entries that a dict has, read in such a way that it gets no others: a `defaultdict` makes what it lacks."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = held

    def __getitem__(self, key: Any) -> Any:
        if (value := dict.get(self._held, key, _ABSENT)) is _ABSENT:
            raise KeyError(key)
        return value


_ABSENT = object()


def as_readable(owner: Any) -> Any:
    """Something that gives the entries of `owner`, and changes nothing."""
    return _Present(owner) if isinstance(owner, dict) and hasattr(type(owner), "__missing__") else owner


def own_entries(container: Container, ignore: Callable[[Any, Any], bool]) -> tuple[Any, list[tuple[Any, Any]], bool]:
    """What to look into, its keys and values, and whether these are all of a container's own."""
    held = container.held
    if isinstance(held, types.CellType):
        return Cell(held), [] if ignore(held, None) else [("cell_contents", container.content())], False
    names = container.names
    if isinstance(held, (Scope, Slots)):
        found = [
            (key, value)
            for key, value in held.content().items()
            if (names is None or key in names) and not ignore(held, key)
        ]
        return held.scope if isinstance(held, Scope) and not isinstance(held, Computed) else held, found, False
    if isinstance(held, dict):
        found = [
            (key, value)
            for key, value in copy_of(held).items()
            if (names is None or key in names) and not ignore(held, key)
        ]
        if container.is_attributes:
            by_name = names is not None
            found = [(key, value) for key, value in found if not _is_own(key, value, by_name=by_name)]
        return held, found, not any(ignore(held, key) for key in held)
    members = list(enumerate(held)) if isinstance(held, (list, deque)) and len(held) <= LONG else []
    left: list[tuple[Any, Any]] = [(index, value) for index, value in members if not ignore(held, index)]
    return held, left, len(left) == len(members)


def is_number(value: Any) -> bool:
    """Something compared by its value: numbers, strings, and tuples of such."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_number, value)))


def is_watched(value: Any, container: Container) -> bool:
    """Whether an entry is looked at: of a library's objects only what they do not exchange for themselves, and of its
    modules functions, such as a `forward` that the program gave one."""
    if container.is_attributes and container.names is None:
        if isinstance(value, _FUNCTIONS):
            return isinstance(container.held, dict) and "_parameters" in container.held
        return is_number(value) or isinstance(value, (torch.Tensor, *_OBJECTS))
    return True


def _is_own(key: Any, value: Any, *, by_name: bool) -> bool:
    """What objects of libraries keep for themselves: containers are looked at on their own, but those that hold a
    module's members and hooks may be exchanged for others.

    `by_name`: the program's code uses what has this name.
    """
    if by_name or key in KEPT_BY_MODULES or key in MODULE_HOOKS:  # as `del` on `nn.Sequential` does it
        return key in _MODULES_OWN
    return key in _MODULES_OWN or (isinstance(key, str) and key.startswith("_") and isinstance(value, (dict, list)))


_MODULES_OWN = frozenset({"_is_full_backward_hook", "_compiled_call_impl"})
