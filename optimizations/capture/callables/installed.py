"""Stand in the place of a module's forward, or of a function, while its graphs serve.

A copy of a module is not the module that was captured: its forward is the one from before. So is that of a module that
was saved and loaded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch


class Installed:
    """Call `serve`, or `before` where code around it is compiled or traced.

    Args:
        serve: runs the graphs.
        function: the module or function they are of.
    """

    def __init__(self, serve: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._function = function
        self._serve = serve
        self._own = vars(function).get("forward") if isinstance(function, torch.nn.Module) else None
        self._given = as_it_is(function)
        functools.update_wrapper(self, self._given, updated=())

    @property
    def before(self) -> Callable[..., Any]:
        """Return what runs without graphs: of a module without a forward of its own, what its class has for one now."""
        if not isinstance(self._function, torch.nn.Module):
            return self._given
        if self._own is not None:
            return cast("Callable[..., Any]", self._own)
        forward: Any = inspect.getattr_static(type(self._function), "forward")
        bind = getattr(type(forward), "__get__", None)
        found: Callable[..., Any] = forward if bind is None else bind(forward, self._function, type(self._function))
        return found

    @property
    def __code__(self) -> Any:
        """Return the code for `torch.export`, which asks a module's forward for it."""
        return self.before.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._given(*args, **kwargs)  # Dynamo follows it
        if torch.jit.is_tracing():  # a trace would hold where results of the graphs lie
            return self.before(*args, **kwargs)
        return self._serve(*args, **kwargs)

    def __reduce__(self) -> Any:
        if not isinstance(self._function, torch.nn.Module):
            return _itself, (self._function,)
        return (getattr, (self._function, "forward")) if self._own is None else (_itself, (self._own,))

    def take_place(self) -> Callable[..., Any]:
        """Return a module with this for its forward; this for a function."""
        if isinstance(self._function, torch.nn.Module):
            self._function.forward = self
            return self._function
        return self

    def leave(self) -> None:
        """Give the module its forward back, unless it has got another one."""
        held = vars(self._function) if isinstance(self._function, torch.nn.Module) else {}
        if held.get("forward") is not self:
            return
        if self._own is None:
            del held["forward"]
        else:
            held["forward"] = self._own


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a module or function does without graphs of its own."""
    forward = function.forward if isinstance(function, torch.nn.Module) else function
    return forward.before if isinstance(forward, Installed) else forward


def is_graphed(function: Callable[..., Any]) -> bool:
    """Return whether a module has graphs that were not closed."""
    return isinstance(function, torch.nn.Module) and isinstance(vars(function).get("forward"), Installed)


def _itself(value: Any) -> Any:
    return value
