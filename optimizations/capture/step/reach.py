"""Finds what a step can reach in Python: see `host_state`.

Note [How far it looks]. Variables of the step and of the functions it calls (closures, defaults, globals they name),
what containers hold, modules, optimizers, schedulers and scalers, and attributes of the program's own objects by names
that occur in this code. What a training loop keeps in the same object as the step (a counter, a data loader) has
another name, and may change. Of objects of installed libraries all attributes count, and of their functions all
variables around them, since their code is not read. What a C extension keeps is not seen.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from optimizations.capture.signature import PLAIN
from optimizations.capture.step.host_state import (
    MODULE_HOOKS,
    Container,
    HostState,
    Scope,
    Slots,
    cell_content,
    is_array,
)
from optimizations.torch_internals import hook_registry

MOST_OBJECTS = 200_000
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_CACHED = type(functools.lru_cache(lambda: None))
_PARTIALS = (functools.partial, functools.partialmethod)
_STATEFUL = ("torch.amp.grad_scaler", "torch.optim", "torch.cuda.amp")
"""Modules of PyTorch whose objects hold state of a training loop in Python."""
_PLAIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace)
_KEEPS_BOOKS = ("torch.nn.parallel",)
"""Modules of PyTorch whose modules note something for themselves in every call, which no graph needs."""
_NOT_LOOKED_INTO = (*sorted(sys.stdlib_module_names - {"__main__"}), "torch", "numpy", "optimizations", "triton")
_KEPT_BY_MODULES = ("_parameters", "_buffers", "_modules")


def reach(roots: Iterable[tuple[str, Any]], *, hooks_of_tensors: bool = True) -> HostState:
    """Everything reachable from `roots`, (path, object) pairs. Note [How far it looks].

    `hooks_of_tensors`: what hooks of parameters reach, too: of code that runs a backward.
    """
    hooks = [("hook", hook) for held in hook_registry.global_hooks() for hook in held.values()]
    return _Walk(hooks_of_tensors).run([*roots, *hooks])


class _Walk:
    """`names` are all that occur in code of the step; objects are looked at again when there are more."""

    def __init__(self, hooks_of_tensors: bool) -> None:
        self._hooks_of_tensors = hooks_of_tensors
        self.state = HostState()
        self.names: set[str] = set()
        self._objects: list[tuple[Container | None, Any]] = []
        self._tensors: list[Container] = []
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        self._seen: dict[int, Any] = {}

    def run(self, roots: Iterable[tuple[str, Any]]) -> HostState:
        self._waiting.extend(roots)
        while self._waiting:
            path, value = self._waiting.popleft()
            if not isinstance(value, PLAIN) and id(value) not in self._seen:
                if len(self._seen) >= MOST_OBJECTS:
                    self.state.complete = False
                    break
                self._seen[id(value)] = value
                self._waiting.extend(self._members(path, value))
            if not self._waiting:
                self._look_again()
        return self.state

    def _look_again(self) -> None:
        """Attributes, methods and properties of the program's objects whose names have occurred since."""
        self._look_at_tensors()
        for container, owner in self._objects:
            kind, path = (type(owner), container.path) if container is not None else (owner, owner.__qualname__)
            if container is not None:
                assert container.names is not None
                content = container.content()
                for name in self.names - container.names:
                    if name in content:
                        container.names.add(name)
                        self._waiting.append((f"{container.path}.{name}", content[name]))
                container.absent = frozenset(self.names.difference(content))
            self._waiting.extend(
                (f"{path}.{name}", code)
                for name, code in _methods(kind)
                if (name in self.names or _is_implicit(name) or (container is None and name in _MAKING))
                and id(code) not in self._seen
            )

    def _look_at_tensors(self) -> None:
        """Attributes that programs give to tensors, by names that occur: most tensors have none that do."""
        for container in self._tensors:
            assert container.names is not None
            for name in self.names.intersection(container.held).difference(container.names):
                if not container.names:
                    self.state.containers.append(container)
                container.names.add(name)
                self._waiting.append((f"{container.path}.{name}", container.held[name]))

    def _members(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Notes `value` in the state and gives what it leads to."""
        state = self.state
        if isinstance(value, torch.Tensor):
            state.tensors[path] = value
            if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # holds the tensors it stands for
                state.containers.append(Container(vars(value), path, is_attributes=True, always_read=True))
                yield from ((f"{path}.{name}", member) for name, member in list(vars(value).items()))
            elif attributes := getattr(value, "__dict__", None):
                self._tensors.append(Container(attributes, path, is_attributes=True, names=set()))
            for held in hook_registry.tensor_hooks(value) if self._hooks_of_tensors else ():
                yield from ((f"{path}.hook", hook) for hook in list(held.values()))
        elif is_array(value):
            state.containers.append(Container(value, path))
        elif is_generator(value):
            state.generators[path] = value
        elif isinstance(value, torch.nn.Module):
            yield from self._of_module(path, value)
        elif isinstance(value, (dict, list, set, collections.deque)):
            state.containers.append(Container(value, path))
            yield from _of_container(path, value)
        elif isinstance(value, (tuple, frozenset)):
            yield from _of_container(path, value)
        elif isinstance(value, types.CellType):
            state.containers.append(Container(value, path))
            if (content := cell_content(value)) is not value:
                yield path, content
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, types.MethodType):
            yield _owner_name(path, value), value.__self__
            yield path, value.__func__
        elif isinstance(value, (collections.UserDict, collections.UserList, collections.ChainMap)):
            state.containers.append(Container(vars(value), path, is_attributes=True))
            yield from ((f"{path}.{name}", member) for name, member in vars(value).items())
        elif isinstance(value, (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)):
            yield from _of_container(path, value if isinstance(value, weakref.WeakSet) else dict(value))
        elif isinstance(value, threading.local):
            self._of_object(path, value)
        elif isinstance(value, types.MappingProxyType):
            yield from ((path, behind) for behind in gc.get_referents(value))
        elif isinstance(value, weakref.ref):
            yield path, value()
        elif isinstance(value, _CACHED):
            yield path, value.__wrapped__
        elif isinstance(value, _PARTIALS):
            yield f"{path}.func", value.func
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif isinstance(value, Iterator):
            state.iterators.append(path)
        elif isinstance(value, type) and _is_users(value.__module__):
            names = tuple(name for name, member in vars(value).items() if _is_data(name, member))
            state.containers.append(Container(Slots(value, names), path, is_attributes=True))
            yield from ((f"{path}.{name}", getattr(value, name)) for name in names)
            self._objects.append((None, value))
        elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            return
        elif isinstance(value, torch.optim.Optimizer):
            state.optimizers[path] = value
            yield from self._of_library(path, value)
        elif type(value).__module__.startswith(_STATEFUL):
            yield from self._of_library(path, value)
        elif _is_users(type(value).__module__) or isinstance(value, _PLAIN_OBJECTS):
            self._of_object(path, value)
            if call := dict(_methods(type(value))).get("__call__"):
                yield f"{path}.__call__", call
        elif hasattr(value, "__dict__") and not _belongs_to(type(value).__module__, _NOT_LOOKED_INTO):
            yield from self._of_library(path, value)

    def _of_object(self, path: str, value: Any) -> None:
        if slots := _slots(type(value)):
            self._note(Container(Slots(value, slots), path, is_attributes=True, names=set()), value)
        if hasattr(value, "__dict__"):
            self._note(Container(vars(value), path, is_attributes=True, names=set()), value)

    def _note(self, container: Container, owner: Any) -> None:
        self.state.containers.append(container)
        self._objects.append((container, owner))

    def _of_library(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """An object of an installed library: which of its attributes its code uses is not known."""
        self.state.containers.append(Container(vars(value), path, is_attributes=True, always_read=True))
        for name, member in list(vars(value).items()):
            yield f"{path}.{name}", member
        if isinstance(value, torch.optim.Optimizer):
            for kept in value.state.values():
                if isinstance(kept, dict):
                    self._seen[id(kept)] = kept
                    self.state.containers.append(Container(kept, f"{path}.state[...]", always_read=True))
                    yield from ((f"{path}.state[...].{id(kept)}.{name}", member) for name, member in kept.items())

    def _of_module(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        self.state.modules[path] = module
        attributes = vars(module)
        users = _is_users(type(module).__module__)
        if users:
            # Its `training` is used, and the numbers of its own code.
            self._note(Container(attributes, path, is_attributes=True, names={"training"}), module)
        elif not type(module).__module__.startswith(_KEEPS_BOOKS):
            self.state.containers.append(Container(attributes, path, is_attributes=True))
            for name, member in list(attributes.items()):
                if not name.startswith("_"):
                    yield f"{path}.{name}", member
        if "_orig_mod" in attributes.get("_modules", {}) or attributes.get("_compiled_call_impl") is not None:
            self.state.compiled = True
        for kind in _KEPT_BY_MODULES:
            held = attributes.get(kind, {})
            self._seen[id(held)] = held
            self.state.containers.append(Container(held, path, is_attributes=True, always_read=True))
            for name, member in list(held.items()):
                yield f"{path}.{name}", member
        for kind in MODULE_HOOKS:
            for hook in list(attributes.get(kind, {}).values()):
                yield f"{path}.{kind}", hook
        if users:
            yield f"{path}.forward", type(module).forward

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            self.state.compiled = True
            yield path, original
            return
        if not _is_users_file(function.__code__.co_filename):
            if (wrapped := getattr(function, "__wrapped__", None)) is not None:
                yield path, wrapped
            if not _belongs_to(function.__module__, _NOT_LOOKED_INTO):
                yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
            return
        named = set(_names(function.__code__))
        self.names |= named
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            yield name, cell
        for name, default in (function.__kwdefaults__ or {}).items():
            yield name, default
        yield f"{path}.defaults", function.__defaults__ or ()
        scope = function.__globals__
        used = {name for name in named if name in scope}
        self.state.containers.append(Container(Scope(scope, used), ""))
        imported = {name: sys.modules[name] for name in named - used if name in sys.modules and _is_users(name)}
        for name, value in [*((name, scope[name]) for name in sorted(used)), *sorted(imported.items())]:
            if isinstance(value, types.ModuleType) and _is_users(value.__name__):
                members = {member for member in named if member in vars(value)}
                self.state.containers.append(Container(Scope(vars(value), members), name, is_attributes=True))
                yield from ((f"{name}.{member}", vars(value)[member]) for member in members)
            else:
                yield name, value


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers on the host."""
    if isinstance(value, (random.Random, torch.Generator)):
        return not isinstance(value, torch.Generator) or value.device.type == "cpu"
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _belongs_to(module: str | None, packages: Iterable[str]) -> bool:
    return module is None or module.split(".")[0] in packages


def _is_data(name: str, member: Any) -> bool:
    """Whether a class's attribute holds data that instances share, rather than code."""
    return not name.startswith("__") and not callable(member) and not hasattr(member, "__get__")


def _of_container(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in list(value.items()):
            name = f"[{key!r}]" if isinstance(key, PLAIN) else "[...]"
            yield f"{path}{name}", member
            if isinstance(key, torch.Tensor):
                yield f"{path}.keys.{id(key)}", key
    else:
        for index, member in enumerate(list(value)):
            yield f"{path}[{index}]", member


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Code of the program's own classes among the bases of `kind`: functions, and objects that stand for such."""
    for base in reversed(kind.__mro__):
        if _is_users(base.__module__):
            for name, value in vars(base).items():
                code = _code(value)
                if isinstance(code, (types.FunctionType, _CACHED, *_PARTIALS)) or _is_users_object(code):
                    yield name, code


def _code(member: Any) -> Any:
    """What a member of a class runs when it is looked up, or called."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return getattr(member, "__func__", member)


def _is_users_object(value: Any) -> bool:
    """Whether it is an object of the program's own that acts as a method or property."""
    kind = type(value)
    acts = any(name in vars(base) for base in kind.__mro__ for name in ("__get__", "__call__"))
    return acts and _is_users(kind.__module__) and not isinstance(value, type)


def _is_implicit(name: str) -> bool:
    """Whether Python calls a method of this name by itself: for operators, `with`, iteration, attributes."""
    return name.startswith("__") and name.endswith("__") and name not in _NOT_IN_A_STEP


_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
"""Called for objects that the step makes, of classes it names; not for those that are there."""
_NOT_IN_A_STEP = frozenset(
    {"__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__"}
    | _MAKING
    | {"__deepcopy__", "__init_subclass__", "__class_getitem__", "__set_name__", "__dir__", "__sizeof__"}
)


def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    flat = [name for names in found for name in ((names,) if isinstance(names, str) else names)]
    return tuple(name for name in flat if not name.startswith("__"))


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that code uses: of globals and attributes, and strings that may be such (`getattr`)."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _owner_name(path: str, method: types.MethodType) -> str:
    return path.rsplit(".", 1)[0] if "." in path else type(method.__self__).__name__


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
