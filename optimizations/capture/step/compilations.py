"""Notice compilations and tuning while a step runs: work of PyTorch's compiler, which only a first run does.

What a call does while code is compiled, or kernels are timed to choose among them, says nothing about the next call. So
such a call counts as one that was not looked at. In a capture neither may happen at all: constants that the compiler
computes would lie in the graph's memory, and hold what was never computed. There a compilation fails before it begins,
the capture is thrown away, and the call runs, and is compiled, as it is.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.step.observer import SETS_UP, Observer, StepDiffers

_DYNAMO = "torch._dynamo"


@contextlib.contextmanager
def noticed(observer: Observer, *, forbid: bool) -> Iterator[None]:
    """Tell the observer of compilations in the block; with `forbid` they raise instead.

    Raises:
        StepDiffers: code was to be compiled, or kernels to be timed, and that is forbidden.
    """
    if f"{_DYNAMO}.callback" not in sys.modules:
        try:
            yield
        finally:
            observer.set_up = observer.set_up or _DYNAMO in sys.modules
        return
    handler: Any = torch_internals.compilation_callbacks

    def begins(arguments: Any) -> None:
        observer.set_up = observer.compiling = True
        if forbid:
            raise StepDiffers(SETS_UP)

    def ends(arguments: Any) -> None:
        observer.compiling = False

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        with torch.compiler.set_stance("fail_on_recompile") if forbid else contextlib.nullcontext():
            yield
    except Exception as error:
        if forbid and not isinstance(error, StepDiffers) and (observer.set_up or _is_dynamos(error)):
            observer.set_up = True
            raise StepDiffers(SETS_UP) from error
        raise
    finally:
        with contextlib.suppress(ValueError):  # `torch.compiler.reset` forgets all of them
            handler.remove_start_callback(begins)
        with contextlib.suppress(ValueError):
            handler.remove_end_callback(ends)


def _is_dynamos(error: BaseException) -> bool:
    """Return whether Dynamo itself raised this, as it does where it may not compile."""
    trace: types.TracebackType | None = error.__traceback__
    path = ""
    while trace is not None:
        path, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return "/torch/_dynamo/" in path
