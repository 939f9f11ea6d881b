"""Find the line of the user's program that runs now."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch

_ENCORE = str(Path(__file__).resolve().parents[2])
_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/", "/contextlib.py", "/functools.py")


def current_line() -> str | None:
    """Return "path:number in function" of the innermost frame that is neither Encore's nor a library's, or None.

    Where another library than PyTorch stands between, its innermost frame is named too.
    """
    frame: types.FrameType | None = sys._getframe(1)
    through = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_users(path) and not _is_generated(frame):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}{through}"
        if not through and "-packages/" in path and "/torch/" not in path and not path.startswith(_ENCORE):
            through = f", through {path.split('-packages/')[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


ADVICE_ON_CTC = "make graphs of the model alone (graph_callables), and compute this loss behind it"
_ADVICE = {
    "/torch/amp/grad_scaler.py": "make the optimizer with fused=True, which skips steps on the GPU; read the scale "
    "after the step",
    "/torch/optim/swa_utils.py": "call update_parameters after the step",
    "/torch/nn/utils/clip_grad.py": "leave error_if_nonfinite off and look at the returned norm after the step",
    "/torch/nn/modules/batchnorm.py": "give the batch normalisation a number as momentum",
    "/torch/nn/modules/transformer.py:_detect_is_causal_mask:": "say whether the masks are causal, so that the "
    "transformer does not look into them (is_causal=, or src_is_causal= and tgt_is_causal=)",
    "/torch/optim/lr_scheduler.py": "call the scheduler after the step",
    "/torch/nn/functional.py:ctc_loss:": ADVICE_ON_CTC,
    "/torch_geometric/utils/loop.py:": "make the layer with add_self_loops=False and give it a graph that has its "
    "loops, or with cached=True where its graph stays the same",
    "/torch_geometric/utils/_scatter.py:": "say how many rows there are (size= of a pool, dim_size=)",
    "/torch_geometric/utils/num_nodes.py:": "say how many nodes there are (num_nodes=)",
}
"""By a part of "path:function" of PyTorch's code, or of a library's."""
_OPTIMIZERS = "/torch/optim/"
_FOR_GRAPHS = ("capturable", "fused")


def advice_by_caller() -> str | None:
    """Return what to change, where a known part of PyTorch does what cannot be captured."""
    frame: types.FrameType | None = sys._getframe(1)
    in_optimizer = False
    while frame is not None and (not _is_users(frame.f_code.co_filename) or _is_generated(frame)):
        path = frame.f_code.co_filename
        for part, advice in _ADVICE.items():
            if part in f"{path}:{frame.f_code.co_name}:":
                return advice
        in_optimizer = in_optimizer or _OPTIMIZERS in path
        # The functions that compute a step do not know their optimizer, the method that calls them does.
        if in_optimizer and isinstance(optimizer := frame.f_locals.get("self"), torch.optim.Optimizer):
            return _advice_on(optimizer)
        frame = frame.f_back
    return None


def _advice_on(optimizer: torch.optim.Optimizer) -> str:
    """Return advice on an optimizer: not every one takes both options that are made for graphs, and some take none."""
    taken = [f"{name}=True" for name in _FOR_GRAPHS if name in optimizer.defaults]
    if not taken:
        return (
            f"use an optimizer that takes capturable=True or fused=True, such as AdamW: {type(optimizer).__name__} "
            "takes neither"
        )
    return f"make the optimizer with {' or '.join(taken)}, and its learning rate a number or a tensor on the GPU"


_TUNERS = (
    "/torch/_inductor/runtime/",
    "/torch/_inductor/select_algorithm.py",
    "/torch/_inductor/autotune_process.py",
    "/triton/testing.py",
    "/triton/runtime/autotuner.py",
    "/triton/compiler/",
)
"""Where kernels are compiled and timed, once, in the first run that needs them."""


def called_by_the_compiler() -> bool:
    """Return whether PyTorch's or Triton's compiler runs now for itself: not the program, nor code it generated."""
    return called_from(*_TUNERS)


def called_from(*parts: str) -> bool:
    """Return whether a file with one of these in its path stands between here and the program's or generated code."""
    return any(part in frame.f_code.co_filename for frame in _frames_between() for part in parts)


def _frames_between() -> Iterator[types.FrameType]:
    """Yield the frames from here to the program's line, or generated code, without that."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        yield frame
        frame = frame.f_back


def line_of(error: BaseException) -> str | None:
    """Return the same line for where an exception was raised."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename) and not _is_generated(trace.tb_frame):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def _is_generated(frame: types.FrameType) -> bool:
    """Return whether a frame runs code that Inductor wrote: it lies in a cache, which may be anywhere."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch._inductor.")


def _is_users(path: str) -> bool:
    return not path.startswith((_ENCORE, "<")) and not any(part in path for part in _LIBRARIES)
