"""What a function of the program's leads to: variables around it, defaults, modules, and their code's names."""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from optimizations.capture.step.counted_names import CountedNames, looks_up_variables
from optimizations.capture.step.host_state import Container, HostState, Parts, Scope
from optimizations.capture.step.name_uses import chains, handed_on, imported_as, relative_imports
from optimizations.capture.step.program_code import (
    is_clock,
    is_users,
    is_users_file,
    loads,
    names,
    reads_a_date,
    strings,
    texts,
)
from optimizations.torch_internals.entry_words import PARTS_OF_FUNCTIONS

NOT_LOOKED_INTO = (*sorted(sys.stdlib_module_names - {"__main__"}), "torch", "numpy", "optimizations", "triton")


@dataclass(frozen=True, slots=True)
class Function:
    """One of the program's own, with its `globals`: those that it names, and its globals' modules by their names."""

    function: types.FunctionType
    variables: Container
    modules: tuple[tuple[str, types.ModuleType, Container], ...]


class FunctionMembers:
    """Notes functions in `state`, and the names in their code in `names`."""

    def __init__(self) -> None:
        self.state = HostState()
        self.names = CountedNames()
        self._functions: list[Function] = []
        self._sparse: list[Container] = []
        self._shadowed: dict[int, set[str]] = {}
        self._in_libraries: set[tuple[int, str]] = set()

    def _note_parts(self, path: str, value: Any, names: tuple[str, ...]) -> None:
        self.state.containers.append(Container(Parts(value, names), path, is_attributes=True, names=set(names)))

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
            if not belongs_to(function.__module__, NOT_LOOKED_INTO):
                yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
            return
        self.state.code.append(function.__code__)
        self._note_parts(path, function, PARTS_OF_FUNCTIONS)
        uses, asked = self.names.take_in(function, named)
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
        known = self._shadowed.setdefault(id(scope), set())
        absent = frozenset(missing.difference(known))
        built_in = {name for name in absent if hasattr(builtins, name)}
        known |= built_in  # each is looked for once, however many functions name it
        for name in built_in:
            yield from self._put_in_a_library(name, builtins, name)
        variables = Container(Scope(scope, used), "", absent=absent)
        self.state.containers.append(variables)
        imported = dict(_imported(function, named - used))
        for owner, *rest in chains(function.__code__):
            yield from self._taken_from_a_library(".".join((owner, *rest)), scope.get(owner), rest)
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
        self._functions.append(Function(function, variables, tuple(modules)))

    def _taken_from_a_library(self, path: str, owner: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """What the program may have put into a module of a library, from which code takes it."""
        module, last = None, ""
        found = owner
        for name in names:
            if not isinstance(found, types.ModuleType) or is_users(found.__name__):
                return
            module, last = found, name
            found = vars(found).get(name)
        if module is not None:
            yield from self._put_in_a_library(path, module, last)

    def _put_in_a_library(self, path: str, module: types.ModuleType, name: str) -> Iterator[tuple[str, Any]]:
        """What stands there under this name, if it is the program's, or a number that it may set."""
        found = vars(module).get(name)
        if isinstance(found, types.ModuleType) or (id(module), name) in self._in_libraries:
            return
        own = is_users_file(found.__code__.co_filename) if isinstance(found, types.FunctionType) else is_own(found)
        if own or (type(found) in _NUMBERS and name in vars(module)):
            self._in_libraries.add((id(module), name))
            held = Container(Scope(vars(module), {name}), module.__name__, is_attributes=True, names={name})
            self.state.containers.append(held)
            yield path, found


_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


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


def is_own(value: Any) -> bool:
    """Whether it is a class of the program's own, or an object of such a class."""
    return is_users((value if isinstance(value, type) else type(value)).__module__)


def belongs_to(module: str | None, packages: Iterable[str]) -> bool:
    return module is None or module.split(".")[0] in packages
