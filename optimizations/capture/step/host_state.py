"""Represent the Python state that a step reaches: containers, and the tensors, modules and optimizers in them.

A graph repeats the work of the GPU and runs no Python. So a call that changes Python state is refused. State that the
program changes between calls is compared before each replay. State that a failed capture changed is restored, and the
call then runs from its beginning.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, exact
from optimizations.torch_internals import hook_registry

_ABSENT = object()
CELL = "cell_contents"
"""The only key of a closure cell."""
KEPT_BY_MODULES = ("_parameters", "_buffers", "_modules")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks."""
Content = dict[Any, Any]
"""Keys and values of a container. The keys of a list are its indices, those of a set the ids of its members."""


class Part:
    """Give access to some attributes of an object, or to some entries of a dict such as a module's globals."""

    def __init__(self, holder: Any, names: Iterable[str]) -> None:
        self.holder, self.names = holder, set(names)

    def content(self) -> Content:
        found = ((name, self.get(name)) for name in sorted(self.names))
        return {name: value for name, value in found if value is not _ABSENT}

    def get(self, name: str) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(name, _ABSENT)
        return getattr(self.holder, name, _ABSENT)

    def put(self, name: str, value: Any) -> None:
        """Write an entry in place. For a class this is the base class that defines it."""
        if isinstance(self.holder, dict):
            self.holder[name] = value
        elif isinstance(self.holder, type):
            type.__setattr__(next((one for one in self.holder.__mro__ if name in vars(one)), self.holder), name, value)
        else:
            object.__setattr__(self.holder, name, value)

    def drop(self, name: str) -> None:
        if isinstance(self.holder, dict):
            del self.holder[name]
        else:
            object.__delattr__(self.holder, name)


@dataclass(slots=True)
class Container:
    """Describe a container: a dict (also that of an object's attributes), list, set, closure cell or `Part`.

    Attributes:
        is_attributes: its keys are attributes or variables, so names have no brackets.
        always_read: it belongs to a module or optimizer, whose tensors compiled code reads without an operator.
        of_library: its owner is library code, which may read any entry by its name.
        is_compared: its numbers are compared between calls. If not, only changes during a call are checked.
    """

    held: Any
    path: str
    is_attributes: bool = False
    always_read: bool = False
    of_library: bool = False
    is_compared: bool = True

    def name_of(self, key: Any) -> str:
        """Return the expression by which a program refers to an entry."""
        if isinstance(self.held, types.CellType):
            return self.path
        if self.is_attributes:
            return f"{self.path}.{key_name(key)}" if self.path else key_name(key)
        return f"{self.path}[{key!r}]" if isinstance(key, PLAIN) else f"{self.path}[...]"

    @property
    def is_sequence(self) -> bool:
        return isinstance(self.held, (list, set, collections.deque))

    def content(self) -> Content:
        """Return a shallow copy."""
        return content_of(self.held)

    def get(self, key: Any) -> Any:
        """Return the value of an entry; None if it no longer exists."""
        held = self.held
        if isinstance(held, dict):
            return dict.get(held, key)
        return self.content().get(key)

    def put(self, key: Any, value: Any) -> None:
        """Set the value of an entry."""
        held = self.held
        if isinstance(held, types.CellType):
            held.cell_contents = value
        elif isinstance(held, Part):
            held.put(key, value)
        else:
            held[key] = value

    def restore(self, content: Content) -> None:
        """Restore the entries from a shallow copy, in place."""
        held = self.held
        if isinstance(held, (types.CellType, Part)):
            now = self.content()
            for key, value in content.items():
                if now.pop(key, _ABSENT) is not value:
                    self.put(key, value)
            if isinstance(held, Part):
                for key in now:
                    held.drop(key)
        elif isinstance(held, dict):
            held.clear()
            held.update(content)
        elif isinstance(held, list):
            held[:] = content.values()
        else:
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(content.values())


@dataclass(frozen=True, slots=True)
class Rebound:
    """Record an entry of a container that a call bound to another tensor."""

    container: Container
    key: Any
    old: torch.Tensor | None
    new: torch.Tensor

    @property
    def name(self) -> str:
        return self.container.name_of(self.key)


BOUND_TO_A_TENSOR = "write into it in place (`total += value`, `average.lerp_(value, 0.1)`)"
BOUND_TO_A_TUPLE = (
    "keep each in an attribute or variable of its own, or at its place in a list (`hidden[0] = h`), or write into them "
    "in place"
)
GREW = "return the tensor, and keep it after the step: `losses.append(step(batch))`"
NUMBER = "do it outside of the step, or count in a tensor on the GPU that is written in place: `count += 1`"
OTHER = "do it outside of the step, or keep the value in a tensor on the GPU and write it in place"


@dataclass(frozen=True, slots=True)
class Change:
    """Describe in `words` a change of Python state by a call. `name` is the entry, or the container that grew."""

    words: str
    name: str
    advice: str


@dataclass(slots=True)
class HostState:
    """Store everything that a step reaches.

    Attributes:
        tensors, modules, optimizers: by path.
        iterators: paths of objects that `next` changes.
        static_loaders: those of them that are static loaders.
        generators: random generators of the host, by path.
        device_generators: random generators of the GPU.
        code: code objects of the program's own functions that the step reaches.
        compiled: whether a module or function is compiled. `compiled_code` has the code objects of such functions.
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

    def parameters(self) -> list[torch.Tensor]:
        """Return each leaf that accumulates gradients, or did so before it was frozen, once."""
        found = {
            id(t): t
            for t in self.tensors.values()
            if t.is_leaf and (t.requires_grad or isinstance(t, torch.nn.Parameter))
        }
        return list(found.values())

    def snapshot(self) -> list[Content]:
        """Return shallow copies of all containers."""
        return [container.content() for container in self.containers]

    def rebound(self, before: list[Content]) -> list[Rebound]:
        """Return entries that were a tensor or None in `before` and are a different tensor now."""
        return [
            Rebound(container, key, was, now)
            for container, old in zip(self.containers, before, strict=True)
            for key, now in container.content().items()
            if type(now) is torch.Tensor
            and now is not (was := old.get(key, _ABSENT))
            and (was is None or type(was) is torch.Tensor)
            and not isinstance(container.held, (set, collections.deque))
        ]

    def changes(self, before: list[Content], but: Iterable[Rebound] = ()) -> Iterator[Change]:
        """Yield the differences from `before`, with the program's names. Entries in `but` are skipped.

        A container that was replaced is compared with its replacement.
        """
        left_out = {(id(entry.container.held), entry.key) for entry in but}
        contents = {id(container.held): old for container, old in zip(self.containers, before, strict=True)}
        replaced: set[int] = set()
        for container, old in zip(self.containers, before, strict=True):
            if id(container.held) in replaced:
                continue
            new, path = container.content(), container.path
            if container.is_sequence and len(old) != len(new):
                yield Change(f"{path} has {len(new)} members instead of {len(old)}", path, GREW)
                continue
            ordered = not (container.is_sequence or container.is_attributes or container.always_read)
            places = {key: place for place, key in enumerate(old)} if ordered and old.keys() == new.keys() else {}
            if places and [places[key] for key in new] != list(places.values()):
                yield Change(f"{path} has its entries in another order", path, OTHER)
            for key in dict.fromkeys([*old, *new]):
                was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
                if was is now or (id(container.held), key) in left_out:
                    continue
                replaced.add(id(was))
                if not is_unchanged(was, now, contents):
                    of_place = container.is_sequence or isinstance(container.held, types.CellType)
                    yield _change(container.name_of(key), path if of_place else key_name(key), was, now)

    def restore(self, before: list[Content]) -> None:
        """Restore all containers that changed since `before`."""
        for container, old in zip(self.containers, before, strict=True):
            new = container.content()
            if list(map(id, old)) != list(map(id, new)) or any(old[key] is not new[key] for key in old):
                container.restore(old)


def content_of(held: Any) -> Content:
    """Return a shallow copy of a container."""
    if isinstance(held, dict):
        return dict(held)
    if isinstance(held, (set, frozenset)):
        return {id(member): member for member in held}
    if isinstance(held, types.CellType):
        return {} if (content := cell_content(held)) is held else {CELL: content}
    return held.content() if isinstance(held, Part) else dict(enumerate(held))


def cell_content(cell: types.CellType) -> Any:
    """Return the content of a closure cell; the cell itself if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return cell


def is_unchanged(old: Any, new: Any, contents: Mapping[int, Content], depth: int = 4) -> bool:
    """Return whether a value is the same object, or was replaced by an equal number or container of numbers.

    `contents`: earlier contents of containers, by the id of the container.
    """
    if old is new:
        return True
    if isinstance(old, torch.Tensor) or type(old) is not type(new):
        return False
    if isinstance(old, PLAIN):
        return exact(old) == exact(new)
    if not depth or not isinstance(old, (dict, list, tuple, set, frozenset)):
        return False
    then, now = contents.get(id(old)), content_of(new)
    then = content_of(old) if then is None else then
    return then.keys() == now.keys() and all(is_unchanged(then[key], now[key], contents, depth - 1) for key in then)


def _change(path: str, name: str, old: Any, new: Any) -> Change:
    if isinstance(new, torch.Tensor):
        return Change(f"{path} is bound to another tensor", name, BOUND_TO_A_TENSOR)
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return Change(f"{path} changes from {old!r} to {new!r}", name, NUMBER)
    if isinstance(new, (tuple, list)) and any(isinstance(member, torch.Tensor) for member in new):
        words = f"{path} is bound to another {type(new).__name__} of tensors"
        return Change(words, name, BOUND_TO_A_TUPLE)
    words = f"{path} is deleted" if new is _ABSENT else f"{path} is set to None" if new is None else f"{path} changes"
    return Change(words, name, OTHER)


def key_name(key: Any) -> str:
    """Return a key as text. Values of a tensor are left out: printing them would read them from the GPU."""
    return key if isinstance(key, str) else repr(key) if isinstance(key, PLAIN) else "..."


def hooks_of(tensors: Iterable[torch.Tensor], attributes: Iterable[dict[str, Any]]) -> list[dict[int, Any]]:
    """Return the dicts of hooks: global ones, those of these tensors, and those in these `vars` of modules."""
    of_tensors = [held for tensor in tensors for held in hook_registry.tensor_hooks(tensor)]
    of_modules = [held for own in attributes for name in MODULE_HOOKS if (held := own.get(name)) is not None]
    return [*hook_registry.global_hooks(), *of_tensors, *of_modules]


class Hooks:
    """Detect changes of the registered hooks of parameters, modules and optimizers.

    PyTorch numbers registrations, so the latest number is compared first. A removal does not change that number, so the
    sizes of the dicts that had hooks are compared too. All dicts are read only if one of these differs.

    `tensors` are those whose gradients a step computes. Modules are not referenced: one that was passed as an argument
    may be freed.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module] = ()) -> None:
        self._tensors, self._attributes = list(tensors), [vars(module) for module in modules]
        self._then = self._now()
        self._store()

    def _now(self) -> list[Callable[..., Any]]:
        return [hook for held in hooks_of(self._tensors, self._attributes) for hook in held.values()]

    def _store(self) -> None:
        self._registered = hook_registry.registered()
        self._filled = [held for held in hooks_of(self._tensors, self._attributes) if held]
        self._sizes = list(map(len, self._filled))

    def unchanged(self) -> bool:
        """Return whether exactly the same hooks are registered."""
        if self._registered == hook_registry.registered() and (
            not self._filled or list(map(len, self._filled)) == self._sizes
        ):
            return True
        now = self._now()
        if len(now) != len(self._then) or any(one is not other for one, other in zip(now, self._then, strict=True)):
            return False
        self._store()
        return True
