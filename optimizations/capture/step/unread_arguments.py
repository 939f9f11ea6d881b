"""Arguments that a step's code never reads: a number there may differ from call to call.

Training loops pass the number of a batch to every step, and most steps have no use for it. Many hand it on, to the
`training_step` of a model that has none either.
"""

from __future__ import annotations

import types
from typing import Any

from optimizations.capture.step.name_uses import FIRST, FREE, GLOBAL, Owner
from optimizations.capture.step.parameter_uses import Handed, parameter_at, parameter_named, parameter_uses

_NUMBERS = (bool, int, float, str)
_NOTHING = object()
_DEEPEST = 6
"""Calls from one function to the next that an argument is followed through."""


class UnreadArguments:
    """Of a function or method, parameters that its code does not mention, or only hands on to code that does not.

    What an argument is handed on to is looked up in each call: it may be exchanged.
    """

    def __init__(self, function: types.FunctionType, bound: Any = _NOTHING) -> None:
        self._function, self._bound = function, bound
        self._code = code = function.__code__
        skipped = int(bound is not _NOTHING)
        count = code.co_argcount + code.co_kwonlyargcount
        uses = parameter_uses(code)
        self.names = uses.unread.intersection(code.co_varnames[skipped:count])
        self._handed = frozenset(uses.handed).intersection(code.co_varnames[skipped:count])
        positional = code.co_varnames[skipped : code.co_argcount]
        # One that is passed by its place only leaves its name to `**` arguments.
        self._by_name = (self.names | self._handed).intersection(code.co_varnames[code.co_posonlyargcount : count])
        self._places = {place: name for place, name in enumerate(positional) if name in self.names | self._handed}

    def __bool__(self) -> bool:
        return bool(self.names or self._handed)

    def left_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with None for numbers and strings that are not read."""
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

    def _is_unread(self, name: str) -> bool:
        return name in self.names or is_unread(self._function, self._bound, name)


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


def is_unread(function: types.FunctionType, bound: Any, name: str, deep: int = 0) -> bool:
    """Whether a function neither reads a parameter nor hands it on to one that does.

    Args:
        bound: the object that it is a method of, `_NOTHING` where it is of none.
        deep: how many calls led here.
    """
    uses = parameter_uses(function.__code__)
    if name in uses.unread:
        return True
    calls = uses.handed.get(name)
    if not calls or deep == _DEEPEST:
        return False
    return all(_is_unread_there(function, bound, call, deep) for call in calls)


def _is_unread_there(function: types.FunctionType, bound: Any, call: Handed, deep: int) -> bool:
    called, its_object = _function(_found(function, bound, call.to))
    if called is None:
        return False
    if call.place is not None:
        name = parameter_at(called.__code__, call.place + (its_object is not _NOTHING))
    else:
        name = parameter_named(called.__code__, call.keyword or "")
    return name is not None and is_unread(called, its_object, name, deep + 1)


def _function(called: Any) -> tuple[types.FunctionType | None, Any]:
    """The function of Python that is called, and the object that it is a method of."""
    if isinstance(called, types.MethodType):
        function, bound = called.__func__, called.__self__
    else:
        function, bound = called, _NOTHING
    return (function, bound) if type(function) is types.FunctionType else (None, _NOTHING)


def _found(function: types.FunctionType, bound: Any, owner: Owner) -> Any:
    """What stands there, found without running any code of the program; `_NOTHING` where that is not possible."""
    kind, name, *attributes = owner
    found = bound if kind == FIRST else _NOTHING
    if kind == GLOBAL:
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
    if isinstance(of, types.ModuleType):
        return vars(of).get(name, _NOTHING)
    kind = type(of)
    if isinstance(of, type) or kind.__getattribute__ is not object.__getattribute__:
        return _NOTHING
    held = getattr(of, "__dict__", {})
    for base in kind.__mro__:
        if name not in vars(base):
            continue
        member = vars(base)[name]
        if hasattr(type(member), "__set__"):  # a property, or a slot
            return _NOTHING
        if name in held:
            break
        if isinstance(member, staticmethod):
            return member.__func__
        if isinstance(member, types.FunctionType):
            return types.MethodType(member, of)
        return _NOTHING if hasattr(type(member), "__get__") else member
    if name in held:
        return held[name]
    modules = held.get("_modules")
    return modules.get(name, _NOTHING) if isinstance(modules, dict) else _NOTHING
