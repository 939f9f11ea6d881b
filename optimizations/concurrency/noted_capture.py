"""Record the launches of a function while CUDAGraph Trees capture it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.graph.pools import SmallSegments, used_blocks
from optimizations.graph.read import captured_nodes
from optimizations.stack_trace import one_line

KEPT_SHARE = 0.02
"""The share of PyTorch's reserved memory that a recording may keep from reuse, up to an eighth of the free device
memory. Note [Memory that is kept] in `launch_log`."""

LARGEST_SEGMENT_BYTES = 20 << 20
"""Memory is kept in segments of at most this size, which PyTorch's allocator takes for tensors of 1 to 10 MiB."""

SWITCHED_OFF = "the option concurrency is 'off'"
HAS_COLLECTIVES = "the function has collectives, which must run in the same order on all ranks"


def log_of_capture(inputs: Sequence[Any], moving: Iterable[int], pool: Any, device: int, driver: Any) -> LaunchLog:
    """Return a log for one capture.

    Args:
        inputs: the recording's inputs; `moving` are the positions of those that are not at fixed addresses.
        pool: the handle of the memory pool of the capture.
        device: the index of the CUDA device.
        driver: the module `cuda.bindings.driver`.
    """
    return LaunchLog(
        lambda: captured_nodes(driver, driver.CUstream(torch_internals.current_raw_stream(device))),
        [one for one in inputs if _is_on(one, device)],
        [inputs[index] for index in moving if _is_on(inputs[index], device)],
        int(min(KEPT_SHARE * torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0] / 8)),
        SmallSegments(pool, LARGEST_SEGMENT_BYTES).hold,
        lambda: int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["allocated"]),
    )


def noted(log: LaunchLog, model: Callable[[list[Any]], Any], generated: Any, pool: Any) -> Callable[[list[Any]], Any]:
    """Return a function that runs `model` and notes its launches. `generated` is the function that Inductor made."""
    kernels: dict[str, Any] = getattr(getattr(generated, "__func__", generated), "__globals__", {})

    def run(inputs: list[Any]) -> Any:
        with log.noting(kernels):
            outputs = model(inputs)
        try:
            log.never_freed = [one.span for one in used_blocks(pool)] if log.logged else ()
        except Exception as error:
            log.failure = log.failure or one_line(error)
        return outputs

    return run


def _is_on(value: Any, device: int) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and value.device.index == device
