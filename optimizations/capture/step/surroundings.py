"""Return what surrounds a call: settings that its operators depend on, and whether a step runs already."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from optimizations import torch_internals


class _Inside(threading.local):
    """Note in `step` that a step of this thread is warmed up, observed or captured. What it calls is part of it."""

    step = False


inside = _Inside()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    inside.step = True
    try:
        yield
    finally:
        inside.step = False


def modes() -> tuple[Hashable, ...]:
    """Return the modes that functions of PyTorch go through, a default device among them. Usually none."""
    if not (count := _functions()):
        return ()
    held = [torch_internals.get_function_stack_at(index) for index in range(count)]
    # One that is left and entered again is another object: a default device is, around some functions of PyTorch.
    return tuple([(type(mode), str(getattr(mode, "device", ""))) for mode in held])


_functions: Callable[[], int] = torch_internals.len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch_internals.len_torch_dispatch_stack
_transforms: Callable[[], object] = torch_internals.functorch_level
_forward_mode: Any = torch_internals.forward_ad
saved_tensor_hooks: Callable[[bool], object] = torch_internals.top_saved_tensors_hooks
"""Given False: the hooks that see each tensor that autograd saves for a backward, and may exchange it; None if there
are none. They are Python, of which a graph runs none."""


def watched_by_others() -> bool:
    """Return whether others see each operator of a call, or transform what it does: a graph would show them none.

    Counters and loggers see operators; `vmap`, `grad` and derivatives in forward mode transform them.
    """
    return bool(_dispatch_modes() or _transforms() is not None or _forward_mode._current_level >= 0)


def saved_tensors_are_watched() -> bool:
    """Return whether hooks see what is saved for a backward: the program's own, or those of a checkpoint.

    A checkpoint calls what is in it once more and counts what is saved. Hooks that keep tensors on the CPU meanwhile
    only save memory.
    """
    hooks: Any = saved_tensor_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") != torch.autograd.graph.__name__


SETTINGS: tuple[Callable[[], Hashable], ...] = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    functools.partial(torch.is_autocast_enabled, "cuda"),
    functools.partial(torch.is_autocast_enabled, "cpu"),
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch_internals.cublas_allows_fp16_reduction,
    torch_internals.cublas_allows_bf16_reduction,
    torch.is_anomaly_enabled,
    # `torch.get_float32_matmul_precision` raises where it was set by `torch.backends`.
    *(functools.partial(torch_internals.fp32_precision, "cuda", of) for of in ("matmul", "conv", "rnn")),
    torch_internals.cudnn_enabled,
    torch_internals.cudnn_benchmark,
    torch_internals.cudnn_deterministic,
    torch_internals.flash_enabled,
    torch_internals.memory_efficient_enabled,
    torch_internals.math_enabled,
    torch_internals.math_in_half,
    torch_internals.cudnn_attention_enabled,
    torch.is_autocast_cache_enabled,
    *(functools.partial(torch.get_autocast_dtype, of) for of in ("cuda", "cpu")),
)
"""Settings of operators: modes of autograd and autocast, with the dtype that a region in the step has unless it names
one; precision of products, convolutions and recurrent networks; cuDNN; kinds of attention."""


def ambient() -> Hashable:
    """Return settings outside of the step that its operators depend on."""
    return modes(), *[ask() for ask in SETTINGS]
