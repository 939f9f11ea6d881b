"""Detect compilation and tuning while a step runs: work of PyTorch's compiler that only a first run does.

A call in which code is compiled, or kernels are timed, is not representative of the next call. So it does not count as
observed. Neither may happen in a capture: constants that the compiler computes would be in the graph's memory and would
never be computed. A compilation in a capture raises before it begins, the capture is discarded, and the call runs, and
is compiled, eagerly.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.step.observer import SETS_UP, Observer, StepDiffers


@contextlib.contextmanager
def noticed(observer: Observer) -> Iterator[None]:
    """Report compilations in the block to the observer; raise instead in a capture.

    Raises:
        StepDiffers: in a capture, code would be compiled or kernels timed.
    """
    handler: Any = torch_internals.compilation_callbacks

    def begins(arguments: Any) -> None:
        observer.set_up = observer.compiling = True
        if observer.forbids:
            raise StepDiffers(SETS_UP)

    def ends(arguments: Any) -> None:
        observer.compiling = False

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        with torch.compiler.set_stance("fail_on_recompile") if observer.forbids else contextlib.nullcontext():
            yield
    except Exception as error:
        if observer.forbids and not isinstance(error, StepDiffers) and (observer.set_up or _is_dynamos(error)):
            observer.set_up = True
            raise StepDiffers(SETS_UP) from error
        raise
    finally:
        with contextlib.suppress(ValueError):  # `torch.compiler.reset` forgets all of them
            handler.remove_start_callback(begins)
        with contextlib.suppress(ValueError):
            handler.remove_end_callback(ends)


def _is_dynamos(error: BaseException) -> bool:
    """Return whether Dynamo itself raised this, as it does if it must not compile."""
    trace: types.TracebackType | None = error.__traceback__
    path = ""
    while trace is not None:
        path, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return "/torch/_dynamo/" in path
