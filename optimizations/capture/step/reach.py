"""Finds what a step can reach in Python: see `host_state`.

Note [How far it looks]. Variables of the step and of the functions it calls (closures, defaults, globals they name),
what containers hold, modules, optimizers, schedulers and scalers, and attributes of the program's own objects by names
that are attributes' in this code; likewise what its classes, modules, functions and containers have as attributes. Of
containers among the arguments, a batch of a class of the program's own, it is what methods of that class reach. What a
training loop keeps in the same object as the step (a counter, a data loader) has another name, and may change. Of
objects of installed libraries all attributes count, and of their functions all variables around them, since their code
is not followed. What a C extension keeps is not seen. Which names count: see the Note in `counted_names`.
"""

from __future__ import annotations

import argparse
import builtins
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, containers, objects
from optimizations.capture.step.counted_names import CountedNames, behind, looks_up_variables
from optimizations.capture.step.host_state import (
    KEPT_BY_MODULES,
    MODULE_HOOKS,
    ClassCode,
    ClassData,
    Container,
    ContextContent,
    HostState,
    Scope,
    Slots,
    cell_content,
    is_array,
)
from optimizations.capture.step.name_uses import (
    MATCHED,
    asks_for_equality,
    chains,
    handed_on,
    imported_as,
    relative_imports,
)
from optimizations.capture.step.program_code import (
    CACHED,
    MAKING,
    PARTIALS,
    compares_fields,
    data,
    inherited,
    is_clock,
    is_implicit,
    is_plain,
    is_users,
    is_users_file,
    loads,
    methods,
    names,
    of_modules,
    reads_a_date,
    slots,
    strings,
    texts,
    used_by,
)
from optimizations.torch_internals import hook_registry

MOST_OBJECTS = 200_000
_STATEFUL = ("torch.amp.grad_scaler", "torch.optim", "torch.cuda.amp", "torch.distributions.")
"""Modules of PyTorch whose objects hold state of a training loop in Python."""
_PLAIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace)
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
_NOT_LOOKED_INTO = (*sorted(sys.stdlib_module_names - {"__main__"}), "torch", "numpy", "optimizations", "triton")


def reach(roots: Iterable[tuple[str, Any]], *, hooks_of_tensors: bool = True) -> HostState:
    """Everything reachable from `roots`, (path, object) pairs. Note [How far it looks].

    `hooks_of_tensors`: what hooks of parameters reach, too: of code that runs a backward.
    """
    hooks = [("hook", hook) for held in hook_registry.global_hooks() for hook in held.values()]
    return _Walk(hooks_of_tensors).run([*roots, *hooks])


@dataclass(frozen=True, slots=True)
class _Given:
    """A container among the arguments: another one in each call, but of the same class, whose methods may run."""

    kind: type


def of_argument(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Roots for `reach`: objects that an argument holds, and the program's own classes of its containers."""
    yield from objects(value, name)
    kinds = {type(held): where for where, held in containers(value, name)}
    yield from ((where, _Given(kind)) for kind, where in kinds.items() if is_users(kind.__module__))


@dataclass(frozen=True, slots=True)
class _Object:
    """One of the program's own, of whose `kind` methods may run. `container`: attributes that count by their names.

    `is_made`: code names the class, and may make others.
    """

    path: str
    kind: type
    container: Container | None = None
    is_made: bool = False
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Method:
    """A function that is reached as a method: its first parameter is the object."""

    function: Any


@dataclass(frozen=True, slots=True)
class _Function:
    """One of the program's own, with its `globals`: those that it names, and its globals' modules by their names."""

    function: types.FunctionType
    variables: Container
    modules: tuple[tuple[str, types.ModuleType, Container], ...]


class _Walk:
    """`names` are those that count; objects are looked at again when there are more."""

    def __init__(self, hooks_of_tensors: bool) -> None:
        self._hooks_of_tensors = hooks_of_tensors
        self.state = HostState()
        self.names = CountedNames()
        self._functions: list[_Function] = []
        self._plain: dict[tuple[type, type], bool] = {}
        self._objects: list[_Object] = []
        self._sparse: list[Container] = []
        self._classes: set[type] = set()
        self._code: dict[type, Container] = {}
        self._inherited: dict[type, Mapping[str, frozenset[str]]] = {}
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        self._seen: dict[int, Any] = {}

    def run(self, roots: Iterable[tuple[str, Any]]) -> HostState:
        self._waiting.extend(roots)
        while self._waiting:
            path, value = self._waiting.popleft()
            value = behind(value)
            if isinstance(value, _Method):
                value = value.function
            elif isinstance(value, types.FunctionType):
                self.names.is_reached_alone(value)
            elif isinstance(value, str):
                self.names.held_in_data(value)
            if not _is_a_number(value) and id(value) not in self._seen:
                if len(self._seen) >= MOST_OBJECTS:
                    self.state.complete = False
                    break
                self._seen[id(value)] = value
                self._waiting.extend(self._members(path, value))
            while not self._waiting:
                self._look_again()
                if not self.names.met_another:
                    break
        return self.state

    def _look_again(self) -> None:
        """Attributes, methods and properties of the program's objects whose names have occurred since."""
        names = self.names
        names.settle()
        self._look_at_variables()
        self._look_at_sparse()
        with_keys = names.with_keys
        running: dict[tuple[type, bool], list[tuple[str, Any, bool]]] = {}
        pieces = names.pieces_looked_up
        for one in self._objects:
            of_libraries = self._inherited[one.kind]
            if (container := one.container) is not None:
                assert container.names is not None
                content = container.content()
                used = names.attributes if self._is_plain(one.kind, but=torch.nn.Module) else with_keys
                if of_libraries:
                    used = used | used_by(of_libraries, with_keys)
                if pieces:
                    used = used.union(name for name in content if name.startswith(pieces) or name.endswith(pieces))
                if MATCHED in names.attributes and isinstance(matched := getattr(one.kind, MATCHED, ()), tuple):
                    used = used.union(matched)
                if names.in_whole and issubclass(one.kind, _PLAIN_OBJECTS):
                    used = used.union(content)
                if issubclass(one.kind, torch.nn.Module):  # a method of PyTorch's may be replaced
                    used = used | names.of_others.union(of_modules().keys() & used_by(of_modules(), with_keys))
                for name in used - container.names:
                    if name in content:
                        container.names.add(name)
                        self._waiting.append((f"{container.path}.{name}", content[name]))
                container.absent = frozenset(used.difference(content))
            for name, code, of_objects in self._running(one, of_libraries, with_keys, running):
                if isinstance(code, types.FunctionType):
                    names.is_of(code, one.value if of_objects else None)
                if id(code) not in self._seen:
                    self._waiting.append((f"{one.path}.{name}", _Method(code)))
        for kind in {one.kind for one in self._objects}:
            for name in names.asked:
                if all(name not in vars(base) for base in kind.__mro__):
                    self._look_at_code(kind, object, name)

    def _running(
        self,
        one: _Object,
        of_libraries: Mapping[str, frozenset[str]],
        with_keys: set[str],
        known: dict[tuple[type, bool], list[tuple[str, Any, bool]]],
    ) -> list[tuple[str, Any, bool]]:
        """Methods that may run for an object: their names and code, and whether they are given the object itself."""
        key = one.kind, one.is_made
        if key in known:
            return known[key]
        found = known[key] = []
        called = self.names.attributes if self._is_plain(one.kind) else with_keys
        if issubclass(one.kind, torch.nn.Module):
            called = called | (of_modules().keys() & used_by(of_modules(), with_keys))
        called = called | self.names.called_unnamed
        reads_fields = self.names.reads_fields
        for definer, name, code in methods(one.kind):
            if not reads_fields and compares_fields(definer, name):
                continue
            # `**` calls `keys`.
            if (
                name in called
                or is_implicit(name)
                or name == "keys"
                or name in of_libraries
                or (one.is_made and name in MAKING)
            ):
                self._look_at_code(one.kind, definer, name)
                found.append((name, code, isinstance(vars(definer)[name], (types.FunctionType, property))))
                makes_another = isinstance(vars(definer)[name], classmethod)
                if makes_another and id(one.kind) not in self._seen:
                    self._waiting.append((one.path, one.kind))
        return found

    def _look_at_variables(self) -> None:
        """Variables of modules by names that occur."""
        counted = self.names
        every = counted.attributes | counted.named | counted.strings if counted.by_strings else set()
        scopes = {id(one.function.__globals__): one for one in self._functions}
        for one in scopes.values():
            scope, variables = one.function.__globals__, one.variables.held
            for name in every.intersection(scope).difference(variables.names):
                variables.names.add(name)
                if not is_clock(scope[name]):
                    self._waiting.append((name, scope[name]))
        for one in self._functions:
            for name, module, container in one.modules:
                named = counted.attributes
                if not (counted.by_strings or counted.by_variable):
                    named = named & set(names(one.function.__code__))
                for member in named.intersection(vars(module)).difference(container.held.names):
                    container.held.names.add(member)
                    found = vars(module)[member]
                    if not is_clock(found) or (name, member) in loads(one.function.__code__):
                        self._waiting.append((f"{name}.{member}", found))

    def _look_at_code(self, kind: type, definer: type, name: str) -> None:
        """Another method may get this name: in the class that defines it, or in one that `kind` asks before."""
        for base in kind.__mro__:
            if is_users(base.__module__):
                if (container := self._code.get(base)) is None:
                    container = Container(ClassCode(base), base.__name__, is_attributes=True, names=set())
                    self._code[base] = container
                    self.state.containers.append(container)
                assert container.names is not None
                if name in container.held.scope:
                    container.names.add(name)
                    container.held.names.add(name)
                else:
                    container.absent |= {name}
            if base is definer:
                return

    def _look_at_sparse(self) -> None:
        """Attributes of tensors, functions, classes and modules by names that occur: most have none that do."""
        for container in self._sparse:
            assert container.names is not None
            scope = container.held if isinstance(container.held, Scope) else None
            content = scope.scope if scope is not None else container.content()
            for name in self._names_for(container).intersection(content).difference(container.names):
                if scope is not None:
                    if isinstance(content[name], Iterator) or is_clock(content[name]):
                        continue  # another function's, for all that is known
                    scope.names.add(name)
                if not container.names and not container.absent:
                    self.state.containers.append(container)
                container.names.add(name)
                self._waiting.append((f"{container.path}.{name}", content[name]))
            if scope is not None and (absent := self.names.asked.difference(content)):
                if not container.names and not container.absent:
                    self.state.containers.append(container)
                container.absent = frozenset(absent)

    def _is_plain(self, kind: type, but: type = object) -> bool:
        """Whether a class has nothing of a library's, other than this one, whose code might look up names."""
        key = kind, but
        if key not in self._plain:
            self._plain[key] = is_plain(kind, but)
        return self._plain[key]

    def _names_for(self, container: Container) -> set[str]:
        """Names that count for what is looked at by them: all for a tensor, and for a class that a library made."""
        held = container.held
        plain = self._is_plain(held.value) if isinstance(held, ClassData) else isinstance(held, Scope)
        return self.names.attributes if plain else self.names.with_keys

    def _members(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Notes `value` in the state and gives what it leads to."""
        state = self.state
        if isinstance(value, torch.Tensor):
            state.tensors[path] = value
            if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # holds the tensors it stands for
                state.containers.append(Container(vars(value), path, is_attributes=True, always_read=True))
                yield from ((f"{path}.{name}", member) for name, member in list(vars(value).items()))
            elif attributes := getattr(value, "__dict__", None):
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
            state.generators[path] = value
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
            yield path, _Method(value.__func__)
            if not is_users_file(getattr(getattr(value.__func__, "__code__", None), "co_filename", "")):
                self.names.occurs(value.__name__)  # a library's, of which the name is all that is known
        elif isinstance(value, (collections.UserDict, collections.UserList, collections.ChainMap)):
            state.containers.append(Container(vars(value), path, is_attributes=True))
            yield from ((f"{path}.{name}", member) for name, member in vars(value).items())
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
        elif isinstance(value, _Given):
            self._of_code(path, value.kind)
        elif isinstance(value, type) and is_users(value.__module__):
            self._of_class(path, value)
            self._inherited.setdefault(value, inherited(value))
            self._objects.append(_Object(path, value, is_made=True))
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
            state.optimizers[path] = value
            yield from self._of_library(path, value)
            self._of_code(path, type(value))
        elif any(base.__module__.startswith(_STATEFUL) for base in type(value).__mro__):
            yield from self._of_library(path, value)
            self._of_code(path, type(value))
        elif is_users(type(value).__module__) or isinstance(value, _PLAIN_OBJECTS):
            self._of_object(path, value)
            for call in [code for _, name, code in methods(type(value)) if name == "__call__"][-1:]:
                yield f"{path}.__call__", _Method(call)
        elif isinstance(value, logging.Logger):  # whether it writes is asked, and decided by those above it, too
            state.containers.append(Container(vars(value), path, is_attributes=True, names={"level", "disabled"}))
            state.containers.append(Container(vars(value.manager), path, is_attributes=True, names={"_disable"}))
            yield f"{path}.parent", value.parent
        elif isinstance(value, logging.LoggerAdapter):
            yield f"{path}.logger", value.logger
        elif hasattr(value, "__dict__") and (
            not _belongs_to(type(value).__module__, _NOT_LOOKED_INTO)
            or isinstance(value, threading.Event)
            or type(value).__module__ in _LOOKED_INTO
        ):
            yield from self._of_library(path, value)

    def _of_object(self, path: str, value: Any) -> None:
        kind = type(value)
        found = [Slots(value, names) for names in [slots(kind)] if names]
        found += [vars(value)] if getattr(value, "__dict__", value) is not value else []
        for held in found:
            self._note(Container(held, path, is_attributes=True, names=set()), kind, value)
        if not found:
            self._of_code(path, kind)

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
        self._objects.append(_Object(path, kind, container, value=value))
        if is_users(kind.__module__):
            self._of_class(kind.__name__, kind)

    def _of_class(self, path: str, kind: type) -> None:
        if kind in self._classes:
            return
        self._classes.add(kind)
        if found := data(kind):
            self._sparse.append(Container(ClassData(kind, found), path, is_attributes=True, names=set()))
        if is_users(type(kind).__module__):
            self._of_code(path, type(kind))

    def _of_library(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """An object of an installed library: which of its attributes its code uses is not known."""
        self.state.containers.append(Container(vars(value), path, is_attributes=True, always_read=True))
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
        self.state.modules[path] = module
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
            yield f"{path}.forward", _Method(type(module).forward)

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            self.state.compiled = True
            yield path, original
            return
        named = set(names(function.__code__))
        if not named.isdisjoint(("environ", "getenv")):
            yield "os.environ", os.environ
        if not is_users_file(function.__code__.co_filename):
            if (wrapped := getattr(function, "__wrapped__", None)) is not None:
                yield path, wrapped
                yield path, getattr(function, "registry", None)  # of `functools.singledispatch`
            if not _belongs_to(function.__module__, _NOT_LOOKED_INTO):
                yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
            return
        self.state.code.append(function.__code__)
        uses, asked = self.names.take_in(function, named)
        if vars(function):
            self._sparse.append(Container(vars(function), path, is_attributes=True, names=set()))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            yield name, cell
        if function.__kwdefaults__:
            self.state.containers.append(Container(function.__kwdefaults__, path, is_attributes=True))
            yield from function.__kwdefaults__.items()
        yield f"{path}.defaults", function.__defaults__ or ()
        scope = function.__globals__
        if reads_a_date(named, scope):
            self.state.clocks.append(f"datetime in {path}")
        counted = named if looks_up_variables(named) else uses.globals
        used = {name for name in counted if name in scope}
        missing = {name for name in named.difference(scope) if (name,) in loads(function.__code__)}
        if "globals" in named:
            missing.update(name for name in strings(function.__code__) if name not in scope)
        absent = frozenset(name for name in missing if not hasattr(builtins, name))
        variables = Container(Scope(scope, used), "", absent=absent)
        self.state.containers.append(variables)
        imported = dict(_imported(function, named - used))
        for owner, *rest in chains(function.__code__):
            yield from _put_in_a_library(".".join((owner, *rest)), scope.get(owner), rest)
        modules: list[tuple[str, types.ModuleType, Container]] = []
        for name, value in [*((name, scope[name]) for name in sorted(used)), *sorted(imported.items())]:
            if isinstance(value, types.ModuleType) and is_users(value.__name__):
                taken = {attribute for owner, *rest in loads(function.__code__) if owner == name for attribute in rest}
                absent = frozenset(taken.union(asked).difference(vars(value)))
                of_module = Container(Scope(vars(value), set()), name, is_attributes=True, absent=absent)
                self.state.containers.append(of_module)
                modules.append((name, value, of_module))
                given = handed_on(function.__code__)
                if name in given or (name in imported and not given.isdisjoint(imported_as(function.__code__))):
                    yield name, value  # other code may look attributes up
                if "__getattr__" in vars(value):
                    yield f"{name}.__getattr__", vars(value)["__getattr__"]
            elif not is_clock(value) or (name,) in loads(function.__code__):  # imported by its name
                yield name, value
        self._functions.append(_Function(function, variables, tuple(modules)))


def _imported(function: types.FunctionType, named: Iterable[str]) -> Iterator[tuple[str, types.ModuleType]]:
    """The program's own modules that a function may import or look up itself, by their names."""
    found = {*named, *(text for text in texts(function.__code__) if "." in text)}
    parts = str(function.__globals__.get("__package__") or function.__globals__.get("__name__")).split(".")
    for level, name in relative_imports(function.__code__):
        parents = parts[: len(parts) - level + 1]
        found.add(".".join([*parents, name] if name else parents))
    for name in found:
        if is_users(name) and isinstance(module := sys.modules.get(name), types.ModuleType):
            yield name, module


def _put_in_a_library(path: str, owner: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What the program has put into a module of a library, from which code takes it."""
    found = owner
    for name in names:
        if not isinstance(found, types.ModuleType) or is_users(found.__name__):
            return
        found = vars(found).get(name)
    if found is owner or isinstance(found, types.ModuleType):
        return
    if is_users_file(found.__code__.co_filename) if isinstance(found, types.FunctionType) else is_own(found):
        yield path, found


def is_own(value: Any) -> bool:
    """Whether it is a class of the program's own, or an object of such a class."""
    return is_users((value if isinstance(value, type) else type(value)).__module__)


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers on the host."""
    if isinstance(value, (random.Random, torch.Generator)):
        return not isinstance(value, torch.Generator) or value.device.type == "cpu"
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _is_a_number(value: Any) -> bool:
    """Whether it is a number or string without attributes of the program's own."""
    return isinstance(value, PLAIN) and (type(value) in PLAIN or not is_users(type(value).__module__))


def _belongs_to(module: str | None, packages: Iterable[str]) -> bool:
    return module is None or module.split(".")[0] in packages


def _of_container(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in list(value.items()):
            name = f"[{key!r}]" if isinstance(key, PLAIN) else "[...]"
            yield f"{path}{name}", member
            if isinstance(key, (torch.Tensor, weakref.ref)):
                yield f"{path}.keys.{id(key)}", key
    else:
        for index, member in enumerate(list(value)):
            yield f"{path}[{index}]", member


def _owner_name(path: str, method: types.MethodType) -> str:
    return path.rsplit(".", 1)[0] if "." in path else type(method.__self__).__name__
