"""Calling CUDA through `cuda.bindings`: every return code becomes an exception that names the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CudaCallFailed(RuntimeError):
    """A call failed. `call` is its name, `code` the number it returned, `result` the library's name for that."""

    def __init__(self, call: str, code: int, result: str) -> None:
        super().__init__(f"{call} failed: {result} ({code})")
        self.call = call
        self.code = code
        self.result = result


def check(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call a function of `cuda.bindings.driver` (or `nvrtc`) and return what it returns beside its return code.

    Returns:
        None, the one value, or a tuple of values, as the function has 0, 1 or more of them.

    Raises:
        CudaCallFailed: the return code is not 0, which is success.
    """
    code, *values = function(*arguments)
    if int(code) != 0:
        raise CudaCallFailed(function.__name__, int(code), getattr(code, "name", str(code)))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
