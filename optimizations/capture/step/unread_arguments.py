"""Arguments that a step's code never reads: a number there may differ from call to call.

Training loops pass the number of a batch to every step, and most steps have no use for it. Many hand it on, to the
`training_step` of a model that has none either.

Note [Numbers that are handed on]. Before each call the functions that a number is handed on to are looked up, as the
code would find them, without running any code of the program: they may be exchanged. That they are those which are
really called is watched in the calls that are observed and captured (`followed_calls`). Once one is not, numbers that
are handed on count as read. In all calls, the step is given its numbers as they are.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.step.followed_calls import CallSite
from optimizations.capture.step.name_uses import FIRST, FREE, GLOBAL, Owner
from optimizations.capture.step.parameter_uses import (
    Handed,
    ParameterUses,
    parameter_at,
    parameter_named,
    parameter_uses,
)
from optimizations.report.steps import Refusal

_NUMBERS = (bool, int, float, str)
_NOTHING = object()
_DEEPEST = 6
"""Calls from one function to the next that an argument is followed through."""
_MOST_FOLLOWED = 64
"""Functions that one argument is followed to."""
HANDED_ELSEWHERE = Refusal(
    "hands a number on to another function than it was found to",
    "pass numbers that the step does not need to nothing else, or leave them out",
)


@dataclass(frozen=True, slots=True)
class _Link:
    """A call that hands a number on: by a function with this code and object, to another."""

    function: types.FunctionType
    code: types.CodeType
    bound: Any
    call: Handed
    called: types.FunctionType
    called_code: types.CodeType
    its_object: Any

    def stands(self) -> bool:
        """Whether the same function would be called now."""
        found = _function(_found(self.function, self.bound, self.call.to))
        same = found[0] is self.called and found[1] is self.its_object
        return same and self.called.__code__ is self.called_code and self.function.__code__ is self.code


class UnreadArguments:
    """Of a function or method, parameters that its code does not mention, or only hands on to code that does not."""

    def __init__(self, function: types.FunctionType, bound: Any = _NOTHING) -> None:
        self._function, self._bound = function, bound
        self._code = code = function.__code__
        self._uses: dict[int, tuple[types.CodeType, ParameterUses]] = {}  # by id: hashing code takes long
        skipped = int(bound is not _NOTHING)
        count = code.co_argcount + code.co_kwonlyargcount
        uses = self._uses_in(code)
        self.names = uses.unread.intersection(code.co_varnames[skipped:count])
        self._handed = set(uses.handed).intersection(code.co_varnames[skipped:count])
        some = self.names | self._handed
        # One that is passed by its place only leaves its name to `**` arguments.
        self._by_name = some.intersection(code.co_varnames[code.co_posonlyargcount : count])
        positional = code.co_varnames[skipped : code.co_argcount]
        self._places = {place: name for place, name in enumerate(positional) if name in some}
        self._links: dict[str, list[_Link]] = {}
        self._left_out: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._places or self._by_name)

    def left_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with None for numbers and strings that are not read."""
        self._left_out.clear()
        if self._function.__code__ is not self._code:
            return args, kwargs
        places = [
            place
            for place, name in self._places.items()
            if place < len(args) and type(args[place]) in _NUMBERS and self._is_unread(name)
        ]
        if places:
            given = list(args)
            for place in places:
                given[place] = None
            args = tuple(given)
        if kwargs and not self._by_name.isdisjoint(kwargs):
            kwargs = {
                name: None if name in self._by_name and type(value) in _NUMBERS and self._is_unread(name) else value
                for name, value in kwargs.items()
            }
        return args, kwargs

    def followed(self) -> list[CallSite]:
        """The calls that numbers which were left out last are handed on by; empty where none is."""
        links = (link for name in self._left_out for link in self._links[name])
        return [CallSite(link.code, link.call.at, link.called_code) for link in links]

    def follow_no_more(self) -> None:
        """To be told that a call reached another function: from now on what is handed on counts as read."""
        self._handed.clear()
        self._links.clear()
        self._left_out.clear()

    def _is_unread(self, name: str) -> bool:
        if name in self.names:
            return True
        if name not in self._handed:
            return False
        try:
            links = self._links.get(name)
            if links is None or not all(link.stands() for link in links):
                links = []
                if not self._follow(self._function, self._bound, name, links, set(), 0):
                    self._handed.discard(name)
                    return False
                self._links[name] = links
        except Exception:  # an object of a kind that was not thought of
            self._handed.discard(name)
            return False
        self._left_out.add(name)
        return True

    def _follow(
        self, function: types.FunctionType, bound: Any, name: str, links: list[_Link], seen: set[Any], deep: int
    ) -> bool:
        """Whether a function neither reads a parameter nor hands it on to one that does. `links`: calls that were
        found; `seen`: functions and parameters that were looked at; `deep`: how many calls led here."""
        uses = self._uses_in(function.__code__)
        if name in uses.unread or (key := (id(function), id(bound), name)) in seen:
            return True
        seen.add(key)
        calls = uses.handed.get(name)
        if not calls or deep == _DEEPEST or len(seen) > _MOST_FOLLOWED:
            return False
        for call in calls:
            called, its_object = _function(_found(function, bound, call.to))
            if called is None:
                return False
            code = called.__code__
            if call.place is not None:
                there = parameter_at(code, call.place + (its_object is not _NOTHING))
            else:
                there = parameter_named(code, call.keyword or "")
            if there is None or not self._follow(called, its_object, there, links, seen, deep + 1):
                return False
            links.append(_Link(function, function.__code__, bound, call, called, code, its_object))
        return True

    def _uses_in(self, code: types.CodeType) -> ParameterUses:
        known = self._uses.get(id(code))
        if known is None:
            known = self._uses[id(code)] = code, parameter_uses(code)
        return known[1]


def unread_arguments(step: Any) -> UnreadArguments | None:
    """Those of a function or method of Python; None if there are none, or it is something else."""
    function, bound = _function(step)
    if function is None:
        return None
    found = UnreadArguments(function, bound)
    return found if found else None


def put_back(new: Any, given: Any) -> Any:
    """Arguments, positional or named, with the numbers that were left out of those that were given."""
    if isinstance(new, dict):
        return {name: _one_put_back(value, given.get(name)) for name, value in new.items()}
    return tuple(map(_one_put_back, new, given)) if len(new) == len(given) else new


def _one_put_back(new: Any, given: Any) -> Any:
    return given if new is None and type(given) in _NUMBERS else new


def _function(called: Any) -> tuple[types.FunctionType | None, Any]:
    """The function of Python that is called, and the object that it is a method of. Proxies of such are neither."""
    if type(called) is types.MethodType:
        function, bound = called.__func__, called.__self__
    else:
        function, bound = called, _NOTHING
    return (function, bound) if type(function) is types.FunctionType else (None, _NOTHING)


def _found(function: types.FunctionType, bound: Any, owner: Owner) -> Any:
    """What stands there, found without running any code of the program; `_NOTHING` where that is not possible."""
    kind, name, *attributes = owner
    found = bound if kind == FIRST else _NOTHING
    if kind == GLOBAL and type(function.__globals__) is dict:
        found = function.__globals__.get(name, _NOTHING)
    elif kind == FREE:
        try:
            found = (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents
        except (ValueError, IndexError):  # an empty cell
            return _NOTHING
    for attribute in attributes:
        if found is _NOTHING:
            break
        found = _attribute(found, attribute)
    return found


def _attribute(of: Any, name: str) -> Any:
    """As `getattr` for functions, methods, and what stands in an object or among a module's modules."""
    kind = type(of)
    if kind is types.ModuleType:
        return object.__getattribute__(of, "__dict__").get(name, _NOTHING)
    if type(kind) is not type and type(kind) is not abc.ABCMeta:
        return _NOTHING
    found: dict[str, Any] = {}
    for base in _CLASSES_OF(kind):
        members = _MEMBERS_OF(base)
        for asked in (name, "__getattribute__", "__getattr__", "__dict__"):
            if asked not in found and asked in members:
                found[asked] = members[asked]
    of_dict = found.get("__dict__")
    if found["__getattribute__"] is not _GETATTRIBUTE or issubclass(kind, type):
        return _NOTHING
    held = of_dict.__get__(of) if type(of_dict) is types.GetSetDescriptorType else {}
    if type(held) is not dict:
        return _NOTHING
    member = found.get(name, _NOTHING)
    is_function = type(member) in (types.FunctionType, staticmethod)
    if member is not _NOTHING and not is_function and _describes(type(member)):
        return _NOTHING
    if name in held:
        return held[name]
    if is_function:
        return types.MethodType(member, of) if type(member) is types.FunctionType else member.__func__
    if member is not _NOTHING:
        return member
    if found.get("__getattr__") is _GETATTR_OF_MODULES:
        modules = held.get("_modules")
        return modules.get(name, _NOTHING) if type(modules) is dict else _NOTHING
    return _NOTHING


# What no metaclass of the program's own answers.
_CLASSES_OF: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_MEMBERS_OF: Callable[[type], Any] = type.__dict__["__dict__"].__get__
_GETATTRIBUTE = object.__dict__["__getattribute__"]
_GETATTR_OF_MODULES = torch.nn.Module.__dict__["__getattr__"]


def _describes(kind: type) -> bool:
    """Whether what is found under an attribute's name is asked for the attribute."""
    return any(name in _MEMBERS_OF(base) for base in _CLASSES_OF(kind) for name in ("__get__", "__set__", "__delete__"))
