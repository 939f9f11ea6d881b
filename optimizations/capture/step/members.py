"""What one value leads to: the members of containers, of objects, and of what libraries make."""

from __future__ import annotations

import argparse
import collections
import contextvars
import gc
import logging
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.signature import PLAIN
from optimizations.capture.step.function_members import NOT_LOOKED_INTO, FunctionMembers, belongs_to
from optimizations.capture.step.host_state import (
    KEPT_BY_MODULES,
    MODULE_HOOKS,
    ClassData,
    Container,
    ContextContent,
    Scope,
    Slots,
    StepAttributes,
    cell_content,
    is_array,
)
from optimizations.capture.step.name_uses import asks_for_equality
from optimizations.capture.step.program_code import (
    CACHED,
    PARTIALS,
    attributes_of,
    behind_step,
    data,
    inherited,
    is_clock,
    is_users,
    is_users_file,
    methods,
    slots,
)
from optimizations.torch_internals import hook_registry

_STATEFUL = ("torch.amp.grad_scaler", "torch.optim", "torch.cuda.amp", "torch.distributions.")
"""Modules of PyTorch whose objects hold state of a training loop in Python."""
PLAIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace)
_VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
"""They show a dict as it is at the time."""
_QUEUES = ("queue", "_queue", "multiprocessing.queues")
"""Modules whose objects give something else each time they are asked."""
_SHARED = ("multiprocessing.synchronize.Event", "multiprocessing.sharedctypes.SynchronizedBase")
"""Classes whose objects other processes write. Locks are none: nobody decides by them."""
_LOOKED_INTO = ("configparser", "concurrent.futures._base")
"""Modules of Python whose objects hold what programs decide by."""
_KEEPS_BOOKS = ("torch.nn.parallel",)
"""Modules of PyTorch whose modules note something for themselves in every call, which no graph needs."""
_SETTINGS_OF_THESE = ("training", "require_backward_grad_sync")
"""What such a module is told: the latter by `no_sync()`, whether a backward exchanges gradients."""


@dataclass(frozen=True, slots=True)
class Given:
    """A container among the arguments: another one in each call, but of the same class, whose methods may run."""

    kind: type


@dataclass(frozen=True, slots=True)
class Passed:
    """An object among the arguments. A call's signature has its class, and nothing holds it behind the call."""

    value: Any


@dataclass(frozen=True, slots=True)
class Object:
    """One of the program's own, of whose `kind` methods may run. `container`: attributes that count by their names.

    `is_made`: code names the class, and may make others.
    """

    path: str
    kind: type
    container: Container | None = None
    is_made: bool = False
    value: Any = None


@dataclass(frozen=True, slots=True)
class Method:
    """A function that is reached as a method: its first parameter is the object."""

    function: Any


class Members(FunctionMembers):
    """Notes values in `state`, and gives what they lead to. `hooks_of_tensors`: as in `reach`."""

    def __init__(self, hooks_of_tensors: bool) -> None:
        super().__init__()
        self._hooks_of_tensors = hooks_of_tensors
        self._objects: list[Object] = []
        self._classes: set[type] = set()
        self._bases: set[type] = set()
        self._inherited: dict[type, Mapping[str, frozenset[str]]] = {}
        self._seen: dict[int, Any] = {}
        self._alike: dict[str, int] = {}
        self._schedulers: list[Container] = []
        self.passed: set[int] = set()

    def _alone(self, path: str, taken: Mapping[str, Any]) -> str:
        """The path, or one like it where another stands under it: variables of two functions have one name."""
        if path not in taken:
            return path
        self._alike[path] = number = self._alike.get(path, 1) + 1
        return f"{path} ({number})"

    def _members(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Notes `value` in the state and gives what it leads to."""
        state = self.state
        if isinstance(value, torch.Tensor):
            path = self._alone(path, state.tensors)
            state.tensors[path] = value
            if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # holds the tensors it stands for
                state.containers.append(Container(vars(value), path, is_attributes=True, always_read=True))
                yield from ((f"{path}.{name}", member) for name, member in list(vars(value).items()))
            elif (attributes := attributes_of(value)) is not None:
                self._sparse.append(Container(attributes, path, is_attributes=True, names=set()))
            if is_users(type(value).__module__):
                self._of_code(path, type(value))
            for held in hook_registry.tensor_hooks(value) if self._hooks_of_tensors else ():
                yield from ((f"{path}.hook", hook) for hook in list(held.values()))
        elif is_array(value):
            state.containers.append(Container(value, path))
            if value.dtype.hasobject:
                yield from _of_container(path, value.ravel().tolist())
        elif isinstance(value, random.SystemRandom):
            state.entropy.append(path)
        elif is_generator(value):
            state.generators[self._alone(path, state.generators)] = value
        elif isinstance(value, torch.Generator):
            state.device_generators.append(value)
        elif isinstance(value, torch.nn.Module):
            yield from self._of_module(path, value)
        elif isinstance(value, (dict, list, set, collections.deque)):
            state.containers.append(Container(value, path))
            if isinstance(value, dict):
                self.names.strings.update(key for key in list(value) if isinstance(key, str) and key.isidentifier())
            if isinstance(value, collections.defaultdict):
                yield f"{path}.default_factory", value.default_factory
            yield from _of_container(path, value)
            self._of_subclass(path, value)
        elif isinstance(value, (tuple, frozenset)):
            yield from _of_container(path, value)
            self._of_subclass(path, value)
        elif isinstance(value, types.CellType):
            state.containers.append(Container(value, path))
            if (content := cell_content(value)) is not value:
                yield path, content
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, types.MethodType):
            yield _owner_name(path, value), value.__self__
            if isinstance(value.__func__, types.FunctionType):
                self.names.is_of(value.__func__, value.__self__)
            yield path, Method(value.__func__)
            if not is_users_file(getattr(getattr(value.__func__, "__code__", None), "co_filename", "")):
                self.names.occurs(value.__name__)  # a library's, of which the name is all that is known
        elif isinstance(value, (collections.UserDict, collections.UserList, collections.ChainMap)):
            state.containers.append(Container(vars(value), path, is_attributes=True))
            yield from ((f"{path}.{name}", member) for name, member in list(vars(value).items()))
            self._of_code(path, type(value))
        elif isinstance(value, (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)):
            yield path, vars(value)["data"]
        elif isinstance(value, threading.local):
            self._of_object(path, value)
        elif isinstance(value, _VIEWS):
            yield from ((path, behind) for behind in gc.get_referents(value))
        elif isinstance(value, weakref.ref):
            yield path, value()
        elif isinstance(value, contextvars.ContextVar):
            content = ContextContent(value)
            state.containers.append(Container(content, path, is_attributes=True, names={"get"}))
            yield path, content["get"]
        elif isinstance(value, CACHED):
            yield path, value.__wrapped__
        elif (function := behind_step(value)) is not value:
            self._kept_in_step(path, value)
            yield path, function
        elif isinstance(value, PARTIALS):
            yield f"{path}.func", value.func
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif isinstance(value, Iterator):
            state.iterators.append(path)
        elif any(base.__module__ in _QUEUES for base in type(value).__mro__):
            state.queues.append(path)
        elif any(f"{base.__module__}.{base.__name__}" in _SHARED for base in type(value).__mro__):
            state.shared.append(path)
        elif isinstance(value, Given):
            self._of_code(path, value.kind)
        elif isinstance(value, type) and is_users(value.__module__):
            self._of_class(path, value)
            self._inherited.setdefault(value, inherited(value))
            self._objects.append(Object(path, value, is_made=True))
        elif isinstance(value, types.ModuleType) and is_users(value.__name__):
            self._sparse.append(Container(Scope(vars(value), set()), path, is_attributes=True, names=set()))
        elif isinstance(value, types.BuiltinFunctionType):
            if is_clock(value):
                state.clocks.append(path)
            self.names.is_held(value)
            yield path, value.__self__  # of `settings.get`; a module where it is a function
        elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
            for name in (one for one in value.__reduce__()[1] if isinstance(one, str)):
                self.names.occurs(*name.split("."))
                self.names.compares = self.names.compares or asks_for_equality(name)
            yield path, value.__reduce__()[1]
        elif isinstance(value, (type, types.ModuleType)):
            self.names.texts = self.names.texts or value is str  # under another name
        elif isinstance(value, type(os.environ)):
            yield path, vars(value)["_data"]
        elif isinstance(value, torch.optim.Optimizer):
            path = self._alone(path, state.optimizers)
            state.optimizers[path] = value
            yield from self._of_library(path, value)
            self._of_code(path, type(value))
        elif any(base.__module__.startswith(_STATEFUL) for base in type(value).__mro__):
            yield from self._of_library(path, value)
            self._of_code(path, type(value))
        elif is_users(type(value).__module__) or isinstance(value, PLAIN_OBJECTS):
            self._of_object(path, value)
            for call in [code for _, name, code in methods(type(value)) if name == "__call__"][-1:]:
                yield f"{path}.__call__", Method(call)
        elif isinstance(value, logging.Logger):  # whether it writes is asked, and decided by those above it, too
            state.containers.append(Container(vars(value), path, is_attributes=True, names={"level", "disabled"}))
            state.containers.append(Container(vars(value.manager), path, is_attributes=True, names={"_disable"}))
            yield f"{path}.parent", value.parent
        elif isinstance(value, logging.LoggerAdapter):
            yield f"{path}.logger", value.logger
        elif attributes_of(value) is not None and (
            not belongs_to(type(value).__module__, NOT_LOOKED_INTO)
            or isinstance(value, threading.Event)
            or type(value).__module__ in _LOOKED_INTO
        ):
            yield from self._of_library(path, value)

    def _of_object(self, path: str, value: Any) -> None:
        kind = type(value)
        found: list[Any] = [Slots(value, names) for names in [slots(kind)] if names]
        found += [held for held in [attributes_of(value)] if held is not None]
        for held in found:
            self._note(Container(held, path, is_attributes=True, names=set()), kind, value)
        if not found:
            self._of_code(path, kind)
        self._note_class(path, value)

    def _note_class(self, path: str, value: Any) -> None:
        if id(value) not in self.passed and _has_plain_class(value):
            self._note_parts(path, value, ("__class__",))

    def _of_subclass(self, path: str, value: Any) -> None:
        """What a container of a class of the program's own has next to what it contains."""
        if is_users(type(value).__module__):
            self._of_object(path, value)

    def _note(self, container: Container, kind: type, value: Any) -> None:
        self.state.containers.append(container)
        self._of_code(container.path, kind, container, value)

    def _of_code(self, path: str, kind: type, container: Container | None = None, value: Any = None) -> None:
        """What a class of the program's own holds and runs for an object of it."""
        self._inherited.setdefault(kind, inherited(kind))
        self._objects.append(Object(path, kind, container, value=value))
        if is_users(kind.__module__):
            self._of_class(kind.__name__, kind)

    def _of_class(self, path: str, kind: type) -> None:
        if kind in self._classes:
            return
        self._classes.add(kind)
        if found := data(kind):
            self._sparse.append(Container(ClassData(kind, found), path, is_attributes=True, names=set()))
        for base in kind.__mro__:
            if base not in self._bases:  # `Module` is one of many classes
                self._bases.add(base)
                for name, value in list(vars(base).items()):
                    self._kept_in_step(f"{path}.{name}", value)
        if is_users(type(kind).__module__):
            self._of_code(path, type(kind))

    def _kept_in_step(self, path: str, step: Any) -> None:
        """Attributes of what `graph_step` made that the program gave it, if that is what it is."""
        if behind_step(step) is not step and (own := getattr(step, "own_attributes", None)) is not None:
            kept = StepAttributes(vars(step), own)
            self._sparse.append(Container(kept, path, is_attributes=True, names=set()))

    def _of_library(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """An object of an installed library: which of its attributes its code uses is not known."""
        container = Container(vars(value), path, is_attributes=True, always_read=True)
        container.owner = None if belongs_to(type(value).__module__, ("torch",)) else value
        self.state.containers.append(container)
        self._note_class(path, value)
        if type(value).__module__ == torch.optim.lr_scheduler.__name__:
            self._schedulers.append(container)
        for name, member in list(vars(value).items()):
            if not is_clock(member):  # for logs and timeouts of its own
                yield f"{path}.{name}", member
        if isinstance(value, torch.optim.Optimizer):
            for kept in value.state.values():
                if isinstance(kept, dict):
                    self._seen[id(kept)] = kept
                    self.state.containers.append(Container(kept, f"{path}.state[...]", always_read=True))
                    yield from ((f"{path}.state[...].{id(kept)}.{name}", member) for name, member in kept.items())

    def _of_module(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        path = self._alone(path, self.state.modules)
        self.state.modules[path] = module
        self._note_class(path, module)
        attributes = vars(module)
        users = is_users(type(module).__module__)
        if users:
            # Its `training`, parts and hooks are used, and the numbers of its own code.
            self.names.attributes.add("forward")
            named = {"training", *KEPT_BY_MODULES, *MODULE_HOOKS}
            self._note(Container(attributes, path, is_attributes=True, names=named), type(module), module)
        elif not type(module).__module__.startswith(_KEEPS_BOOKS):
            self.state.containers.append(Container(attributes, path, is_attributes=True))
            for name, member in list(attributes.items()):
                if not name.startswith("_"):
                    yield f"{path}.{name}", member
        else:
            self.state.containers.append(Container(Slots(module, _SETTINGS_OF_THESE), path, is_attributes=True))
        if "_orig_mod" in attributes.get("_modules", {}) or attributes.get("_compiled_call_impl") is not None:
            self.state.compiled = True
        for kind in KEPT_BY_MODULES:
            held = attributes.get(kind, {})
            self._seen[id(held)] = held
            self.state.containers.append(Container(held, path, is_attributes=True, always_read=True))
            for name, member in list(held.items()):
                yield f"{path}.{name}", member
        for kind in MODULE_HOOKS:
            for hook in list(attributes.get(kind, {}).values()):
                yield f"{path}.{kind}", hook
        if users:
            yield f"{path}.forward", Method(type(module).forward)


def _has_plain_class(value: Any) -> bool:
    """Whether nothing but Python answers for an object that is asked for its class."""
    kind = type(value)
    if kind.__getattribute__ is not object.__getattribute__:
        return False
    return not any("__class__" in vars(base) for base in kind.__mro__ if base is not object)


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers on the host."""
    if isinstance(value, (random.Random, torch.Generator)):
        return not isinstance(value, torch.Generator) or value.device.type == "cpu"
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _of_container(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in list(value.items()):
            name = f"[{key!r}]" if isinstance(key, PLAIN) else "[...]"
            yield f"{path}{name}", member
            if isinstance(key, (torch.Tensor, weakref.ref)):
                yield f"{path}.keys.{id(key)}", key
            else:
                yield from ((f"{path}.keys().{type(part).__name__}", part) for part in _objects_of(key))
    else:
        for index, member in enumerate(list(value)):
            yield f"{path}[{index}]", member


def _objects_of(key: Any) -> Iterator[Any]:
    """Of a key, which may be a tuple of several, what is more than a number or string."""
    if type(key) in (tuple, frozenset):
        for member in key:
            yield from _objects_of(member)
    elif type(key) not in PLAIN:
        yield key


def _owner_name(path: str, method: types.MethodType) -> str:
    return path.rsplit(".", 1)[0] if "." in path else type(method.__self__).__name__
