"""Read the surroundings of a call: settings that affect its operators, modes, and whether a step is running."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from optimizations import torch_internals


class _Inside(threading.local):
    """Record in `step` whether this thread warms up, observes or captures a step. Steps called in it are part of it."""

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
    """Return the active torch function modes, including a default device. Usually there are none."""
    if not (count := _functions()):
        return ()
    held = [torch_internals.get_function_stack_at(index) for index in range(count)]
    # Re-entering a mode may make a new object: some functions of PyTorch do so with a default device.
    return tuple([(type(mode), str(getattr(mode, "device", ""))) for mode in held])


_functions: Callable[[], int] = torch_internals.len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch_internals.len_torch_dispatch_stack
_transforms: Callable[[], object] = torch_internals.functorch_level
_forward_mode: Any = torch_internals.forward_ad
_saved_tensor_hooks: Callable[[bool], object] = torch_internals.top_saved_tensors_hooks


def watched_by_others() -> bool:
    """Return whether modes, transforms or hooks are active, which would not see the operators of a graph.

    Counters and loggers are dispatch modes; `vmap`, `grad` and forward-mode derivatives are transforms. Hooks are those
    of tensors that autograd saves for a backward: a checkpoint repeats its calls and counts these tensors.
    """
    if _dispatch_modes() or _transforms() is not None or _forward_mode._current_level >= 0:
        return True
    return _saved_tensor_hooks(False) is not None


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
    # `torch.get_float32_matmul_precision` raises if it was set by `torch.backends`.
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
"""Settings of operators: modes of autograd and autocast with its default dtypes; precision of products, convolutions
and recurrent networks; cuDNN; attention backends."""


def ambient() -> Hashable:
    """Return the settings on which operators depend."""
    return modes(), *[get() for get in SETTINGS]
