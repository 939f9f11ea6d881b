"""Replace a module's forward, or a function, while its graphs are in use.

A copy of a module was not captured, so it has the original forward. So has a module that was saved and loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Installed:
    """Call `replay`, or `before` during compilation or tracing: a trace would contain the addresses of results.

    Args:
        replay: runs the graphs.
        function: the module or function that the graphs replace.

    Attributes:
        before: the original forward or function.
    """

    def __init__(self, replay: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._replay, self._function, self.before = replay, function, as_it_is(function)
        self._own = vars(function).get("forward") if isinstance(function, torch.nn.Module) else self.before
        functools.update_wrapper(self, self.before, updated=())
        if hasattr(self.before, "__code__"):
            self.__code__ = self.before.__code__  # `torch.export` reads it from a module's forward

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.before(*args, **kwargs)
        return self._replay(*args, **kwargs)

    def __reduce__(self) -> Any:
        return (getattr, (self._function, "forward")) if self._own is None else (_itself, (self._own,))

    def take_place(self) -> Callable[..., Any]:
        """Return the module after replacing its forward, or this object for a function."""
        if isinstance(self._function, torch.nn.Module):
            self._function.forward = self
            return self._function
        return self

    def leave(self) -> None:
        """Restore the module's forward, unless the program replaced it."""
        if is_graphed(self._function) and self._function.__dict__["forward"] is self:
            del self._function.__dict__["forward"]
            if self._own is not None:
                self._function.__dict__["forward"] = self._own


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original forward or function, without graphs."""
    forward = function.forward if isinstance(function, torch.nn.Module) else function
    return forward.before if isinstance(forward, Installed) else forward


def is_graphed(function: Callable[..., Any]) -> bool:
    """Return whether a module has graphs that were not closed."""
    return isinstance(function, torch.nn.Module) and isinstance(vars(function).get("forward"), Installed)


def _itself(value: Any) -> Any:
    return value
