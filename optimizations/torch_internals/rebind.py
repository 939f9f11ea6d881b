"""Bind some globals of a stock function to other objects: the same code, nothing copied or patched.

`CUDAGraphTreeManager.record_function` names the class of the node it makes as a global of its module, and other methods
name what they use in the same way. A subclass that wants another class there would have to copy the method, or to
replace the global for everybody. Instead it takes the method's code with its own globals.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from optimizations.torch_internals import UnsupportedTorch


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return `function` with `names` in place of its module's globals of these names.

    The other globals are those of the module as they are now.

    Raises:
        UnsupportedTorch: the function reads no such global, so this PyTorch is not the one this was written for.
    """
    if not isinstance(function, FunctionType):
        raise UnsupportedTorch(f"{function!r} is not a plain Python function, so its globals cannot be bound again")
    unread = sorted(set(names) - set(function.__code__.co_names))
    if unread:
        raise UnsupportedTorch(
            f"{function.__module__}.{function.__qualname__} does not read {', '.join(unread)}: "
            "this PyTorch is not one whose internals Encore knows"
        )
    bound = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    bound.__qualname__ = function.__qualname__
    bound.__doc__ = function.__doc__
    return bound
