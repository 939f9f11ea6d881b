"""Hold the Python state that a step reaches: containers, and the tensors, modules and optimizers in them.

A graph repeats the work of the GPU and runs no Python. So a call that changes Python's state is refused, what the
program changes between calls is compared before each replay, and what a failed capture changed is put back: the call
then runs from its beginning.
"""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, exact

_ABSENT = object()

KEPT_BY_MODULES = ("_parameters", "_buffers", "_modules")
Place = tuple[int, Any]
"""Where a value stands: the identity of what holds it, and its key."""

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks."""


@dataclass(slots=True)
class Container:
    """Describe something that holds values: a dict (an object's attributes too), list, set or closure cell.

    Attributes:
        is_attributes: its keys are written as attributes or variables, and not in brackets.
        always_read: it belongs to a module or optimizer, whose tensors compiled code reads without an operator.
        of_library: its owner's code is a library's, which may read any entry by its name.
        is_compared: its numbers are compared between calls. Where they are not, it is only checked for what a call
            changes itself.
    """

    held: Any
    path: str
    is_attributes: bool = False
    always_read: bool = False
    of_library: bool = False
    is_compared: bool = True

    def name_of(self, key: Any) -> str:
        """Return how a program would write an entry."""
        if isinstance(self.held, types.CellType):
            return self.path
        if self.is_attributes:
            return f"{self.path}.{key_name(key)}" if self.path else key_name(key)
        return f"{self.path}[{key!r}]" if isinstance(key, PLAIN) else f"{self.path}[...]"

    def entries(self) -> list[tuple[Any, Any]]:
        """Return its keys and values; a cell has the key "cell_contents", and an empty one no entry."""
        held = self.held
        if isinstance(held, types.CellType):
            content = cell_content(held)
            return [] if content is held else [("cell_contents", content)]
        if isinstance(held, (Scope, Slots)):
            return list(held.content().items())
        if isinstance(held, dict):
            return list(dict(held).items())
        return list(enumerate(held)) if isinstance(held, (list, collections.deque)) else []

    def content(self) -> Any:
        """Return a shallow copy."""
        if isinstance(self.held, types.CellType):
            return cell_content(self.held)
        return copy_of(self.held)

    def restore(self, content: Any) -> None:
        """Put a shallow copy back, in place."""
        held = self.held
        if isinstance(held, types.CellType):
            held.cell_contents = content
        elif is_array(held):
            held[...] = content
        elif isinstance(held, dict):
            held.clear()
            held.update(content)
        elif isinstance(held, list):
            held[:] = content
        elif isinstance(held, (set, collections.deque)):
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(content)


@dataclass(frozen=True, slots=True)
class Entry:
    """Name an entry of a container. `key` is None for a closure cell."""

    container: Container
    key: Any

    @property
    def place(self) -> Place:
        """Return where it stands."""
        return place_of(self.container.held, self.key)

    def current(self) -> Any:
        """Return what the entry holds now; None if it is gone."""
        content = self.container.held
        if isinstance(content, types.CellType):
            return cell_content(content)
        if isinstance(content, list):
            return content[self.key] if self.key < len(content) else None
        if isinstance(content, Slots):
            return content.content().get(self.key)
        return (content.scope if isinstance(content, Scope) else content).get(self.key)

    def bind(self, value: torch.Tensor) -> None:
        """Let the entry hold `value`."""
        held = self.container.held
        if isinstance(held, types.CellType):
            held.cell_contents = value
        elif isinstance(held, (Scope, Slots)):
            held.update({self.key: value})
        else:
            held[self.key] = value


@dataclass(frozen=True, slots=True)
class Rebound(Entry):
    """Record an entry of a container that a call bound to another tensor."""

    old: torch.Tensor | None
    new: torch.Tensor


class ChangeKind(enum.Enum):
    """Name what became of something in Python."""

    BOUND_TO_A_TENSOR = enum.auto()
    BOUND_TO_A_TUPLE = enum.auto()
    GREW = enum.auto()
    NUMBER = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True, slots=True)
class Change:
    """Describe something in Python that a call changed, in `words`. `name`: where it stands, or of what grew."""

    words: str
    name: str
    kind: ChangeKind


@dataclass(slots=True)
class HostState:
    """Hold everything that a step reaches.

    Attributes:
        tensors, modules, optimizers: by path.
        iterators: paths of objects that `next` changes; `static_loaders`: of those that fetch for the step.
        generators: sources of random numbers on the host, by path.
        device_generators: those of the GPU.
        code: that of the program's own functions among what is reached.
        compiled: a module or function is compiled; `compiled_code` is that of such functions.
        complete: not more objects are reached than can be compared.
    """

    containers: list[Container] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    iterators: list[str] = field(default_factory=list)
    static_loaders: set[str] = field(default_factory=set)
    generators: dict[str, Any] = field(default_factory=dict)
    device_generators: list[torch.Generator] = field(default_factory=list)
    code: list[types.CodeType] = field(default_factory=list)
    compiled_code: list[types.CodeType] = field(default_factory=list)
    compiled: bool = False
    complete: bool = True

    def parameters(self) -> list[torch.Tensor]:
        """Return leaves that collect gradients, or did before they were frozen, each once."""
        found = {
            id(t): t
            for t in self.tensors.values()
            if t.is_leaf and (t.requires_grad or isinstance(t, torch.nn.Parameter))
        }
        return list(found.values())

    def arrays(self) -> dict[str, Any]:
        """Return arrays of NumPy, by path."""
        return {container.path: container.held for container in self.containers if is_array(container.held)}

    def snapshot(self) -> list[Any]:
        """Return shallow copies of all containers."""
        return [container.content() for container in self.containers]

    def rebound(self, before: list[Any], *, added: bool = False) -> list[Rebound]:
        """Return entries that held a tensor or None in `before` and another tensor now, and those that were `added`."""
        found = []
        for container, old in zip(self.containers, before, strict=True):
            new = container.content()
            pairs: list[tuple[Any, Any, Any]]
            if isinstance(container.held, types.CellType):
                pairs = [(None, old, new)]
            elif isinstance(old, dict) and isinstance(new, dict):
                pairs = [(key, old.get(key), value) for key, value in new.items() if added or key in old]
            elif isinstance(old, list) and isinstance(container.held, list) and len(old) == len(new):
                pairs = [(key, was, now) for key, (was, now) in enumerate(zip(old, new, strict=True))]
            else:
                continue
            found += [
                Rebound(container, key, was, now)
                for key, was, now in pairs
                if type(now) is torch.Tensor and now is not was and (was is None or type(was) is torch.Tensor)
            ]
        return found

    def changes(self, before: list[Any], but: Iterable[Rebound] = ()) -> Iterator[Change]:
        """Yield what differs from `before`, in the program's names. Entries in `but` are left out.

        A container that was replaced is compared with what stands in its place now.
        """
        left_out = {(id(entry.container.held), entry.key) for entry in but}
        contents = {id(container.held): old for container, old in zip(self.containers, before, strict=True)}
        replaced: set[int] = set()
        for container, old in zip(self.containers, before, strict=True):
            new = container.content()
            if id(container.held) in replaced or new is old:
                continue
            replaced |= _replaced(old, new)
            if (id(container.held), None) in left_out:
                continue
            if not alike(old, new, contents):
                yield from _named_changes(container, old, new, contents, left_out)
            if not (container.is_attributes or container.always_read) and _reordered(old, new):
                words = f"{container.path} has its entries in another order"
                yield Change(words, container.path, ChangeKind.OTHER)

    def restore(self, before: list[Any]) -> None:
        """Put back what was changed since `before`."""
        for container, old in zip(self.containers, before, strict=True):
            if not _identical(old, container.content()):
                container.restore(old)


class Slots(dict):
    """Read and write the slots of an object where they are."""

    def __init__(self, value: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.value, self.names = value, names

    def content(self) -> dict[str, Any]:
        return {name: getattr(self.value, name) for name in self.names if hasattr(self.value, name)}

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.value, name)
        except AttributeError as error:
            raise KeyError(name) from error

    def clear(self) -> None:
        for name in self.content():
            object.__delattr__(self.value, name)

    def update(self, content: Any) -> None:  # type: ignore[override]
        for name, member in content.items():
            object.__setattr__(self.value, name, member)


class Inherited(Slots):
    """Hold the values that an object has of its class, unless it hides them by its own."""

    def clear(self) -> None:
        """Leave all: `update` writes what is other than it was."""

    def update(self, content: Any) -> None:  # type: ignore[override]
        super().update({name: old for name, old in content.items() if getattr(self.value, name, _ABSENT) is not old})


class ClassData(Slots):
    """Hold the values that a class and its bases hold for all their objects."""

    def clear(self) -> None:
        """Do nothing: `update` writes what is other than it was, where it stands."""

    def update(self, content: Any) -> None:  # type: ignore[override]
        for name, member in content.items():
            if getattr(self.value, name, _ABSENT) is not member:
                holder = next((base for base in self.value.__mro__ if name in vars(base)), self.value)
                type.__setattr__(holder, name, member)


class Scope(dict):
    """Read and write those of a module's globals that code names, where they are."""

    def __init__(self, scope: dict[str, Any], names: set[str]) -> None:
        super().__init__()
        self.scope, self.names = scope, names

    def content(self) -> dict[str, Any]:
        return {name: self.scope[name] for name in self.names if name in self.scope}

    def clear(self) -> None:
        for name in self.names:
            self.scope.pop(name, None)

    def update(self, content: Any) -> None:  # type: ignore[override]
        self.scope.update(content)


def cell_content(cell: types.CellType) -> Any:
    """Return what a closure cell holds; the cell itself if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return cell


def place_of(held: Any, key: Any) -> Place:
    """Return where an entry of a container's `held` stands: the same in each call."""
    return id(held.scope if isinstance(held, Scope) else held.value if isinstance(held, Slots) else held), key


def entries_of(container: Container, content: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values in a copy of a container's content; that of a closure cell has the key None."""
    if isinstance(container.held, types.CellType):
        return ((None, content),)
    if isinstance(content, dict):
        return content.items()
    return enumerate(content) if isinstance(content, (list, set)) else ((None, content),)


def is_array(value: Any) -> bool:
    """Return whether it is an array of NumPy, whose content changes without a trace."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def copy_of(held: Any) -> Any:
    """Return a shallow copy of a container's content."""
    if isinstance(held, (Scope, Slots)):
        return held.content()
    if is_array(held):
        return held.copy()
    return dict(held) if isinstance(held, dict) else type(held)(held) if type(held) in (list, set) else list(held)


def alike(old: Any, new: Any, contents: Mapping[int, Any], depth: int = 4) -> bool:
    """Return whether a value was left as it was, or replaced by an equal one: numbers, and containers of such.

    `contents`: what containers held at the time of the old value, by the id of the container.
    """
    if old is new:
        return True
    old = contents.get(id(old), old) if isinstance(old, (dict, list, set)) else old
    if isinstance(old, dict) and isinstance(new, dict):
        old, new = dict(old), dict(new)
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or type(old) is not type(new):
        return False
    if isinstance(old, PLAIN):
        return exact(old) == exact(new)
    if is_array(old):
        return _same_bytes(old, new)
    if depth and isinstance(old, dict):
        same_keys = _keys(old).keys() == _keys(new).keys() and not _reordered(old, new)
        return same_keys and all(alike(old[key], new[key], contents, depth - 1) for key in old)
    if depth and isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(alike(a, b, contents, depth - 1) for a, b in zip(old, new, strict=True))
    return bool(depth and isinstance(old, (set, frozenset)) and {id(x) for x in old} == {id(x) for x in new})


def _replaced(old: Any, new: Any) -> set[int]:
    """Return containers in `old` in whose place `new` holds something else."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(value, new.get(key, _ABSENT)) for key, value in old.items()]
    elif isinstance(old, list) and isinstance(new, list):
        pairs = list(zip(old, new, strict=False))
    else:
        pairs = [(old, new)]
    return {id(was) for was, now in pairs if was is not now and isinstance(was, (dict, list, set))}


def _identical(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return list(map(id, old)) == list(map(id, new)) and all(old[key] is new[key] for key in old)
    if isinstance(old, (list, set)) and type(old) is type(new):
        return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
    return _same_bytes(old, new) if is_array(old) and is_array(new) else old is new


def _same_bytes(old: Any, new: Any) -> bool:
    return bool(old.shape == new.shape and old.dtype == new.dtype and old.tobytes() == new.tobytes())


def _reordered(old: Any, new: Any) -> bool:
    """Return whether a dict has the keys that it had, in another order."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return False
    then, now = _keys(old), _keys(new)
    return then.keys() == now.keys() and [then[key] for key in now] != list(now.values())


def _keys(mapping: dict[Any, Any]) -> dict[Any, int]:
    """Return the keys, and which of them each is. A tensor would be compared element by element."""
    return {id(key) if isinstance(key, torch.Tensor) else key: index for index, key in enumerate(mapping)}


def _named_changes(
    container: Container, old: Any, new: Any, contents: Mapping[int, Any], left_out: Collection[tuple[int, Any]]
) -> Iterator[Change]:
    path = container.path
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            name = key_name(key)
            if (id(container.held), key) in left_out:
                continue
            if key not in old or key not in new or not alike(old[key], new[key], contents):
                dotted = f"{path}.{name}" if container.is_attributes and path else f"{path}[{name!r}]" if path else name
                yield _change(dotted, name, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) != len(new):
        yield Change(f"{path} has {len(new)} members instead of {len(old)}", path, ChangeKind.GREW)
    elif isinstance(container.held, list):
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            if (id(container.held), index) not in left_out and not alike(was, now, contents):
                yield _change(f"{path}[{index}]", path, was, now)
    else:
        yield _change(path, path, old, new)


def _change(path: str, name: str, old: Any, new: Any) -> Change:
    if isinstance(new, torch.Tensor):
        return Change(f"{path} is bound to another tensor", name, ChangeKind.BOUND_TO_A_TENSOR)
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return Change(f"{path} changes from {old!r} to {new!r}", name, ChangeKind.NUMBER)
    if isinstance(new, (tuple, list)) and any(isinstance(member, torch.Tensor) for member in new):
        words = f"{path} is bound to another {type(new).__name__} of tensors"
        return Change(words, name, ChangeKind.BOUND_TO_A_TUPLE)
    words = f"{path} is deleted" if new is _ABSENT else f"{path} is set to None" if new is None else f"{path} changes"
    return Change(words, name, ChangeKind.OTHER)


def key_name(key: Any) -> str:
    """Return a key as text; not the values of a tensor, which would be read from the GPU."""
    return key if isinstance(key, str) else repr(key) if isinstance(key, PLAIN) else "..."
