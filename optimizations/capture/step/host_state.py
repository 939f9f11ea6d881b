"""What a step can reach in Python: the containers it could change, the tensors, modules and optimizers in them.

A graph repeats the work of the GPU and no Python. So what a call changes on the host has to be found (it is refused),
what others change between calls has to be noticed (numbers and tensors that a recording was made with), and what a
recording changed before it failed has to be put back, because the call then runs from its beginning.

Note [How far it looks]. Variables of the step and of the functions it calls (closures, defaults, globals they name),
attributes of objects, and what containers hold; not the insides of libraries. What a C extension keeps, or a class,
is not seen.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations.capture.signature import PLAIN

MOST_OBJECTS = 200_000
_ABSENT = object()
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_STATEFUL = ("torch.amp.grad_scaler", "torch.optim", "torch.cuda.amp")
"""Modules of PyTorch whose objects hold state of a training loop in Python."""
_PLAIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace)
_KEEPS_BOOKS = ("torch.nn.parallel",)
"""Modules of PyTorch whose modules note something for themselves in every call, which no graph needs."""


@dataclass(slots=True)
class Container:
    """Something that holds values: a dict (an object's attributes too), list, set or closure cell."""

    held: Any
    path: str
    is_attributes: bool = False

    def content(self) -> Any:
        """A shallow copy."""
        if isinstance(self.held, types.CellType):
            return _cell(self.held)
        return copy_of(self.held)

    def restore(self, content: Any) -> None:
        """Put a shallow copy back, in place."""
        held = self.held
        if isinstance(held, types.CellType):
            held.cell_contents = content
        elif isinstance(held, dict):
            held.clear()
            held.update(content)
        elif isinstance(held, list):
            held[:] = content
        elif isinstance(held, (set, collections.deque)):
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(content)


@dataclass(slots=True)
class HostState:
    """What a step reaches. `tensors` by path; `iterators` are paths of objects that `next` changes."""

    containers: list[Container] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    iterators: list[str] = field(default_factory=list)
    compiled: bool = False
    complete: bool = True

    def parameters(self) -> list[torch.Tensor]:
        """Leaves that collect gradients, each once."""
        found = {id(t): t for t in self.tensors.values() if t.requires_grad and t.is_leaf}
        return list(found.values())

    def snapshot(self) -> list[Any]:
        """Shallow copies of all containers."""
        return [container.content() for container in self.containers]

    def changes(self, before: list[Any]) -> Iterator[str]:
        """What is no longer as in `before`, as text with the program's names.

        A container that was replaced is compared with what stands in its place now.
        """
        contents = {id(container.held): old for container, old in zip(self.containers, before, strict=True)}
        replaced: set[int] = set()
        for container, old in zip(self.containers, before, strict=True):
            new = container.content()
            if id(container.held) in replaced or new is old:
                continue
            replaced |= _replaced(old, new)
            if not alike(old, new, contents):
                yield from _named_changes(container, old, new, contents)

    def restore(self, before: list[Any]) -> None:
        """Put back what was changed since `before`."""
        for container, old in zip(self.containers, before, strict=True):
            if not _identical(old, container.content()):
                container.restore(old)


def reach(roots: Iterable[tuple[str, Any]]) -> HostState:
    """Everything reachable from `roots`, (path, object) pairs. Note [How far it looks]."""
    state = HostState()
    waiting = collections.deque(roots)
    seen: dict[int, Any] = {}
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        if len(seen) >= MOST_OBJECTS:
            state.complete = False
            break
        seen[id(value)] = value
        waiting.extend(_members(path, value, state))
    return state


def _members(path: str, value: Any, state: HostState) -> Iterator[tuple[str, Any]]:
    """Notes `value` in `state` and gives what it leads to."""
    if isinstance(value, torch.Tensor):
        state.tensors[path] = value
    elif isinstance(value, torch.nn.Module):
        yield from _of_module(path, value, state)
    elif isinstance(value, (dict, list, set, collections.deque)):
        state.containers.append(Container(value, path))
        yield from _of_container(path, value)
    elif isinstance(value, (tuple, frozenset)):
        yield from _of_container(path, value)
    elif isinstance(value, types.CellType):
        state.containers.append(Container(value, path))
        if (content := _cell(value)) is not value:
            yield path, content
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value, state)
    elif isinstance(value, types.MethodType):
        yield _owner_name(path, value), value.__self__
        yield path, value.__func__
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield f"{path}.args", value.args
        yield f"{path}.keywords", value.keywords
    elif isinstance(value, Iterator):
        state.iterators.append(path)
    elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return
    elif _is_users(type(value).__module__) or _is_stateful(value) or isinstance(value, _PLAIN_OBJECTS):
        yield from _of_object(path, value, state)


def _of_object(path: str, value: Any, state: HostState) -> Iterator[tuple[str, Any]]:
    if slots := _slots(type(value)):
        held = Slots(value, slots)
        state.containers.append(Container(held, path, is_attributes=True))
        yield from ((f"{path}.{name}", member) for name, member in held.content().items())
    if hasattr(value, "__dict__"):
        if isinstance(value, torch.optim.Optimizer):
            state.optimizers[path] = value
        state.containers.append(Container(vars(value), path, is_attributes=True))
        yield from ((f"{path}.{name}", member) for name, member in list(vars(value).items()))
        if callable(value) and isinstance(call := vars(type(value)).get("__call__"), types.FunctionType):
            yield f"{path}.__call__", call


def _of_module(path: str, module: torch.nn.Module, state: HostState) -> Iterator[tuple[str, Any]]:
    state.modules[path] = module
    attributes = vars(module)
    users = _is_users(type(module).__module__)
    if not type(module).__module__.startswith(_KEEPS_BOOKS):
        state.containers.append(Container(attributes, path, is_attributes=True))
    if "_orig_mod" in attributes.get("_modules", {}) or attributes.get("_compiled_call_impl") is not None:
        state.compiled = True
    for kind in ("_parameters", "_buffers", "_modules"):
        held = attributes.get(kind, {})
        state.containers.append(Container(held, path, is_attributes=True))
        for name, member in list(held.items()):
            yield f"{path}.{name}", member
    for name, member in list(attributes.items()):
        if not name.startswith("_") and name != "training":
            yield f"{path}.{name}", member
    if users and isinstance(forward := type(module).forward, types.FunctionType):
        yield f"{path}.forward", forward


def _of_container(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in list(value.items()):
            name = f"[{key!r}]" if isinstance(key, PLAIN) else "[...]"
            yield f"{path}{name}", member
            if isinstance(key, torch.Tensor):
                yield f"{path}.keys", key
    else:
        for index, member in enumerate(list(value)):
            yield f"{path}[{index}]", member


def _of_function(path: str, function: types.FunctionType, state: HostState) -> Iterator[tuple[str, Any]]:
    original = getattr(function, "_torchdynamo_orig_callable", None)
    if original is not None:
        state.compiled = True
        yield path, original
        return
    if not _is_users_file(function.__code__.co_filename):
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield path, wrapped
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield name, cell
    for name, default in (function.__kwdefaults__ or {}).items():
        yield name, default
    yield f"{path}.defaults", function.__defaults__ or ()
    scope = function.__globals__
    named = set(_names(function.__code__))
    used = {name for name in named if name in scope}
    state.containers.append(Container(Scope(scope, used), ""))
    for name in used:
        value = scope[name]
        if isinstance(value, types.ModuleType) and _is_users(value.__name__):
            members = {member for member in named if member in vars(value)}
            state.containers.append(Container(Scope(vars(value), members), name, is_attributes=True))
            yield from ((f"{name}.{member}", vars(value)[member]) for member in members)
        else:
            yield name, value


class Slots(dict):
    """The slots of an object, read and written where they are."""

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


def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    flat = [name for names in found for name in ((names,) if isinstance(names, str) else names)]
    return tuple(name for name in flat if not name.startswith("__"))


class Scope(dict):
    """Those of a module's globals that a function names, read and written where they are."""

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


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _owner_name(path: str, method: types.MethodType) -> str:
    return path.rsplit(".", 1)[0] if "." in path else type(method.__self__).__name__


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return cell


def copy_of(held: Any) -> Any:
    """A shallow copy of a container's content."""
    if isinstance(held, (Scope, Slots)):
        return held.content()
    return dict(held) if isinstance(held, dict) else type(held)(held) if type(held) in (list, set) else list(held)


def alike(old: Any, new: Any, contents: Mapping[int, Any], depth: int = 4) -> bool:
    """Whether a value was left as it was, or replaced by an equal one: numbers, and containers of such.

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
        return bool(old == new)
    if depth and isinstance(old, dict):
        return _keys(old) == _keys(new) and all(alike(old[key], new[key], contents, depth - 1) for key in old)
    if depth and isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(alike(a, b, contents, depth - 1) for a, b in zip(old, new, strict=True))
    return bool(depth and isinstance(old, (set, frozenset)) and {id(x) for x in old} == {id(x) for x in new})


def _replaced(old: Any, new: Any) -> set[int]:
    """Containers in `old` in whose place `new` holds something else."""
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
    return old is new


def _keys(mapping: dict[Any, Any]) -> set[Any]:
    return {id(key) if isinstance(key, torch.Tensor) else key for key in mapping}


def _named_changes(container: Container, old: Any, new: Any, contents: Mapping[int, Any]) -> Iterator[str]:
    path = container.path
    if isinstance(old, dict) and isinstance(new, dict):
        by_name = {key_name(key): key for key in [*old, *new]}
        for name, key in by_name.items():
            if key not in old or key not in new or not alike(old[key], new[key], contents):
                dotted = f"{path}.{name}" if container.is_attributes and path else f"{path}[{name!r}]" if path else name
                yield _change(dotted, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) != len(new):
        yield f"{path} has {len(new)} members instead of {len(old)}"
    else:
        yield _change(path, old, new)


def _change(path: str, old: Any, new: Any) -> str:
    if isinstance(new, torch.Tensor):
        return f"{path} is bound to another tensor"
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return f"{path} changes from {old!r} to {new!r}"
    return f"{path} changes" if new is not _ABSENT else f"{path} is deleted"


def key_name(key: Any) -> str:
    """A key as text; not the values of a tensor, which would be read from the GPU."""
    return key if isinstance(key, str) else repr(key) if isinstance(key, PLAIN) else "..."


@functools.lru_cache(maxsize=4096)
def _is_users(module: str) -> bool:
    """Whether a module is part of the user's program, and not of Python or an installed library."""
    root = module.split(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return False
    if root in ("torch", "optimizations", "numpy"):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return path is None or _is_users_file(path)


def _is_users_file(path: str) -> bool:
    return not path.startswith(_LIBRARIES) and "site-packages" not in path and not path.startswith("<frozen")


def _is_stateful(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) or type(value).__module__.startswith(_STATEFUL)
