"""Replace a module's forward, or a function, while its graphs are in use.

A copy of a module was not captured, so it has the original forward. So has a module that was saved and loaded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class Installed:
    """Call `replay`, or `before` during compilation or tracing: a trace would contain the addresses of results.

    Args:
        number: the number of the callable, from 1.
        function: the module or function that the graphs replace.
        replay: runs a call: it takes this object, the positional arguments, and the keyword arguments.

    Attributes:
        before: the original forward or function.
        graphed: what the program calls: the module, or this object in place of a function.
        variants: the graphs, by signature of the arguments.
        without_graph: how many calls ran eagerly, by reason; `is_warned_of`: whether there was a warning.
    """

    def __init__(self, number: int, function: Callable[..., Any], replay: Callable[..., Any]) -> None:
        self.number, self.function, self.before, self._replay = number, function, as_it_is(function), replay
        self.variants: list[Any] = []
        self.without_graph: Counter[str] = Counter()
        self.is_warned_of = False
        functools.update_wrapper(self, self.before, updated=())
        if hasattr(self.before, "__code__"):
            self.__code__ = self.before.__code__  # `torch.export` reads it from a module's forward
        self.graphed: Any = self
        self._own: Any = self.before
        if isinstance(function, torch.nn.Module):
            self.graphed, self._own, function.forward = function, vars(function).get("forward"), self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.before(*args, **kwargs)
        return self._replay(self, args, kwargs)

    def __reduce__(self) -> Any:
        return (getattr, (self.function, "forward")) if self._own is None else (_itself, (self._own,))

    def leave(self) -> None:
        """Restore the module's forward, unless the program replaced it."""
        if is_graphed(self.function) and self.function.__dict__["forward"] is self:
            del self.function.__dict__["forward"]
            if self._own is not None:
                self.function.__dict__["forward"] = self._own


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original forward or function, without graphs."""
    forward = function.forward if isinstance(function, torch.nn.Module) else function
    return forward.before if isinstance(forward, Installed) else forward


def is_graphed(function: Callable[..., Any]) -> bool:
    """Return whether a module has graphs that were not closed."""
    return isinstance(function, torch.nn.Module) and isinstance(vars(function).get("forward"), Installed)


def _itself(value: Any) -> Any:
    return value
