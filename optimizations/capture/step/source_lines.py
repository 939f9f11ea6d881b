"""The line of the user's program that runs now."""

from __future__ import annotations

import sys
import types
from pathlib import Path

_ENCORE = str(Path(__file__).resolve().parents[2])
_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/", "/contextlib.py", "/functools.py")


def current_line() -> str | None:
    """ "path:number in function" of the innermost frame that is neither Encore's nor a library's, if there is one.

    Where another library than PyTorch stands between, its innermost frame is named too.
    """
    frame: types.FrameType | None = sys._getframe(1)
    through = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_users(path):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}{through}"
        if not through and "-packages/" in path and "/torch/" not in path and not path.startswith(_ENCORE):
            through = f", through {path.split('-packages/')[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


_ADVICE = {
    "/torch/amp/grad_scaler.py": "make the optimizer with fused=True, which skips steps on the GPU; read the scale "
    "behind the step",
    "/torch/optim/swa_utils.py": "call update_parameters behind the step, or write the average in place with "
    "torch._foreach_lerp_",
    "/torch/nn/utils/clip_grad.py": "leave error_if_nonfinite off and look at the returned norm behind the step",
    "/torch/nn/modules/batchnorm.py": "give the batch normalisation a number as momentum",
    "/torch/optim/lr_scheduler.py": "call the scheduler behind the step",
    "/torch/optim/": "make the optimizer with capturable=True or fused=True, and its learning rate a number or a "
    "tensor on the GPU",
}


def advice_by_caller() -> str | None:
    """What to change, where it is a known part of PyTorch that does what cannot be captured."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        for part, advice in _ADVICE.items():
            if part in frame.f_code.co_filename:
                return advice
        frame = frame.f_back
    return None


def line_of(error: BaseException) -> str | None:
    """The same for where an exception was raised."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def _is_users(path: str) -> bool:
    return not path.startswith((_ENCORE, "<")) and not any(part in path for part in _LIBRARIES)
