"""Stand in the place of a module's forward, or of a function, while its graphs serve.

A copy of a module is not the module that was captured: its forward is the one from before. So is that of a module that
was saved and loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch


class Installed:
    """Call `serve`, or `before` where code around it is compiled or traced: a trace would hold where results lie.

    Args:
        serve: runs the graphs.
        function: the module or function they are of.

    Attributes:
        before: what runs without graphs.
    """

    def __init__(self, serve: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._serve, self._function, self.before = serve, function, as_it_is(function)
        self._own = vars(function).get("forward") if isinstance(function, torch.nn.Module) else self.before
        functools.update_wrapper(self, self.before, updated=())

    @property
    def __code__(self) -> Any:
        """Return the code for `torch.export`, which asks a module's forward for it."""
        return cast("Any", self.before).__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.before(*args, **kwargs)
        return self._serve(*args, **kwargs)

    def __reduce__(self) -> Any:
        return (getattr, (self._function, "forward")) if self._own is None else (_itself, (self._own,))

    def take_place(self) -> Callable[..., Any]:
        """Return a module with this for its forward; this for a function."""
        if isinstance(self._function, torch.nn.Module):
            self._function.forward = self
            return self._function
        return self

    def leave(self) -> None:
        """Give the module its forward back, unless it has got another one."""
        if is_graphed(self._function) and self._function.__dict__["forward"] is self:
            del self._function.__dict__["forward"]
            if self._own is not None:
                self._function.__dict__["forward"] = self._own


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a module or function does without graphs of its own."""
    forward = function.forward if isinstance(function, torch.nn.Module) else function
    return forward.before if isinstance(forward, Installed) else forward


def is_graphed(function: Callable[..., Any]) -> bool:
    """Return whether a module has graphs that were not closed."""
    return isinstance(function, torch.nn.Module) and isinstance(vars(function).get("forward"), Installed)


def _itself(value: Any) -> Any:
    return value
