"""Calling CUDA through `cuda.bindings`: every return code becomes an exception that names the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CudaCallFailed(RuntimeError):
    """A call failed. `call` is its name, `code` the number it returned, `result` the library's name for that.

    `code` is None where the installed library does not have the function.
    """

    def __init__(self, call: str, code: int | None, result: str) -> None:
        super().__init__(f"{call} failed: {result}" + ("" if code is None else f" ({code})"))
        self.call = call
        self.code = code
        self.result = result


def check(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call a function of `cuda.bindings.driver` (or `nvrtc`) and return what it returns in addition to its return code.

    Returns:
        None, the one value, or a tuple of values, as the function has 0, 1 or more of them.

    Raises:
        CudaCallFailed: the return code is not 0, which is success, or the installed library is too old for the call.
    """
    try:
        result = function(*arguments)
    except RuntimeError as error:  # how the bindings say that a library or a function of it is missing
        raise CudaCallFailed(function.__name__, None, str(error)) from error
    code = result[0]
    if int(code):
        raise CudaCallFailed(function.__name__, int(code), getattr(code, "name", str(code)))
    if len(result) == 1:  # the most frequent case comes first: replay sets nodes
        return None
    return result[1] if len(result) == 2 else tuple(result[1:])
