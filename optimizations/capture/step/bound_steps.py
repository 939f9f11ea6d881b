"""Keep what a decorated method is for each object: a step of its own.

Note [Kept under another name]. Python asks the class before it makes a method of an object, so that a derived class may
override the method and call it by `super()`, the class may get another one later, and a copy of the object
(`copy.copy`) has methods of its own. A step that stood in the object under the method's name would be taken instead.
So an object's steps stand under a name that no program uses, with a weak reference to the object that they are of. Each
call of a method asks for its step so, which takes half a microsecond.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

NAME = "_steps_of_graph_step"
"""Under which they stand in an object's `__dict__`."""


class BoundSteps:
    """Hold the steps of one object, by what decorates the methods that they are made of. A copy has none."""

    __slots__ = ("owner", "steps")

    def __init__(self, owner: Any = None) -> None:
        self.owner = _reference_to(owner)
        self.steps: dict[Any, Any] = {}

    def __copy__(self) -> BoundSteps:
        return BoundSteps()

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundSteps:
        return BoundSteps()

    def __reduce__(self) -> Any:
        return BoundSteps, ()


def steps_of(owner: Any, held: dict[str, Any]) -> dict[Any, Any]:
    """Return the steps of `owner` in its `__dict__`, `held`, where there may be those of the object it is a copy of."""
    found = held.get(NAME)
    if type(found) is not BoundSteps or found.owner() is not owner:
        found = held[NAME] = BoundSteps(owner)
    return found.steps


def _reference_to(owner: Any) -> Callable[[], Any]:
    """Return a weak reference, where its class allows that: the steps lead to the object anyway, and stand in it."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def step_of(method: Any, owner: Any) -> Any:
    """Return the step that a decorated method is for an object: what a saved one is when it is loaded."""
    return method.__get__(owner, type(owner))


def is_no_method(function: Any) -> bool:
    """Return whether Python would make no method of it for an object whose class has it, but call it as it is."""
    return isinstance(function, (types.MethodType, staticmethod)) or not hasattr(type(function), "__get__")
