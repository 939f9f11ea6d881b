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

import collections
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from optimizations.capture.signature import PLAIN, containers, objects
from optimizations.capture.step.counted_names import behind
from optimizations.capture.step.host_state import ClassCode, ClassData, Container, HostState, Scope
from optimizations.capture.step.members import PLAIN_OBJECTS, Given, Members, Method, Object, Passed
from optimizations.capture.step.name_uses import MATCHED
from optimizations.capture.step.program_code import (
    MAKING,
    compares_fields,
    data,
    is_clock,
    is_implicit,
    is_plain,
    is_users,
    loads,
    methods,
    names,
    of_modules,
    used_by,
)
from optimizations.torch_internals import hook_registry

MOST_OBJECTS = 200_000
_COUNTED_BY_SCHEDULERS = frozenset({"last_epoch", "_step_count", "T_cur", "T_i"}) | frozenset(
    {"best", "num_bad_epochs", "cooldown_counter", "_is_initial", "_get_lr_called_within_step"}
)
"""Numbers that PyTorch's schedulers of learning rates keep for themselves, and change between calls."""
_TELL_COUNTS = _COUNTED_BY_SCHEDULERS | frozenset(
    {"get_last_lr", "get_lr", "_last_lr", "_get_closed_form_lr", "state_dict", "in_cooldown"}
)
"""By these, code may have what a scheduler counts."""
_READ_UNSEEN = frozenset({"__getattribute__", "__getstate__", "getattr_static", "getmembers_static"})
"""By these, code may have an attribute of an object whose class is not asked for it."""


def reach(roots: Iterable[tuple[str, Any]], *, hooks_of_tensors: bool = True) -> HostState:
    """Everything reachable from `roots`, (path, object) pairs. Note [How far it looks].

    `hooks_of_tensors`: what hooks of parameters reach, too: of code that runs a backward.
    """
    hooks = [("hook", hook) for held in hook_registry.global_hooks() for hook in held.values()]
    return _Walk(hooks_of_tensors).run([*roots, *hooks])


def of_argument(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Roots for `reach`: objects that an argument holds, and the program's own classes of its containers."""
    yield from ((where, Passed(one)) for where, one in objects(value, name))
    kinds = {type(held): where for where, held in containers(value, name)}
    yield from ((where, Given(kind)) for kind, where in kinds.items() if is_users(kind.__module__))


class _Walk(Members):
    """`names` are those that count; objects are looked at again when there are more."""

    def __init__(self, hooks_of_tensors: bool) -> None:
        super().__init__(hooks_of_tensors)
        self._plain: dict[tuple[type, type], bool] = {}
        self._code: dict[type, Container] = {}
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()

    def run(self, roots: Iterable[tuple[str, Any]]) -> HostState:
        self._waiting.extend(roots)
        while self._waiting:
            path, value = self._waiting.popleft()
            if isinstance(value, Passed):
                value = value.value
                self.passed.add(id(value))
            value = behind(value)
            if isinstance(value, Method):
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
        self._leave_out_counters()
        if not self.names.named.isdisjoint(_READ_UNSEEN):
            for container in self.state.containers:
                container.owner = None
        return self.state

    def _leave_out_counters(self) -> None:
        """What PyTorch's schedulers count. Libraries hold them next to what a step uses, and of their objects all
        counts. But schedulers are called behind the step, and what they do to it is the learning rate alone."""
        names = self.names
        if names.in_whole or names.by_strings or not names.named.isdisjoint(_TELL_COUNTS):
            return
        for container in self._schedulers:
            container.unread = _COUNTED_BY_SCHEDULERS

    def _look_again(self) -> None:
        """Attributes, methods and properties of the program's objects whose names have occurred since."""
        names = self.names
        names.settle()
        self._look_at_variables()
        self._look_at_sparse()
        with_keys = names.with_keys
        running: dict[tuple[type, bool], list[tuple[str, Any, bool]]] = {}
        for one in self._objects:
            of_libraries = self._inherited[one.kind]
            if (container := one.container) is not None:
                assert container.names is not None
                content = container.content()
                used = names.attributes if self._is_plain(one.kind, but=torch.nn.Module) else with_keys
                if of_libraries:
                    used = used | used_by(of_libraries, with_keys)
                # An object may get what code asks of its class so far.
                used = used | names.looked_up_unnamed([*content, *data(one.kind)] if names.by_variable else content)
                if MATCHED in names.attributes and isinstance(matched := getattr(one.kind, MATCHED, ()), tuple):
                    used = used.union(matched)
                if names.in_whole and issubclass(one.kind, PLAIN_OBJECTS):
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
                    self._waiting.append((f"{one.path}.{name}", Method(code)))
        for kind in {one.kind for one in self._objects}:
            for name in names.asked:
                if all(name not in vars(base) for base in kind.__mro__):
                    self._look_at_code(kind, object, name)

    def _running(
        self,
        one: Object,
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
            content = scope.every() if scope is not None else container.content()
            used = self._names_for(container) | self.names.looked_up_unnamed(content)
            for name in used.intersection(content).difference(container.names):
                if scope is not None:
                    if isinstance(content[name], Iterator) or is_clock(content[name]):
                        continue  # another function's, for all that is known
                    scope.names.add(name)
                if not container.names and not container.absent:
                    self.state.containers.append(container)
                container.names.add(name)
                self._waiting.append((f"{container.path}.{name}", content[name]))
            if not isinstance(container.held, ClassData) and (
                absent := self.names.asked.difference(content, getattr(scope, "own", ()))
            ):
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


def _is_a_number(value: Any) -> bool:
    """Whether it is a number or string without attributes of the program's own."""
    return isinstance(value, PLAIN) and (type(value) in PLAIN or not is_users(type(value).__module__))
