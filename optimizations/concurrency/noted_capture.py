"""Record the launches of a function while CUDAGraph Trees capture it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.branches import Noted
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


class NotedCapture:
    """Record the launches of one capture.

    Args:
        generated: the function as Inductor generated it.
        inputs: the recording's inputs; `moving` are the positions of those that are not at fixed addresses.
        pool: the handle of the memory pool of the capture.
        device: the index of the CUDA device.
        driver: the module `cuda.bindings.driver`.

    Attributes:
        noted: the notes of the capture; None if there are none.
        failure: why there are none.
    """

    def __init__(
        self,
        generated: Callable[..., Any],
        inputs: Sequence[Any],
        moving: Iterable[int],
        pool: Any,
        device: int,
        driver: Any,
    ) -> None:
        self.noted: Noted | None = None
        self.failure: str | None = None
        self._pool = pool
        function = getattr(generated, "__func__", generated)
        self._kernels: dict[str, Any] = getattr(function, "__globals__", {})
        given = [one for one in inputs if _is_on(one, device)]
        self._log = LaunchLog(
            lambda: captured_nodes(driver, driver.CUstream(torch_internals.current_raw_stream(device))),
            given,
            [inputs[index] for index in moving if _is_on(inputs[index], device)],
            int(min(KEPT_SHARE * torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0] / 8)),
            SmallSegments(pool, LARGEST_SEGMENT_BYTES).hold,
            lambda: int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["allocated"]),
        )

    def around(self, model: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a function that runs `model` and notes its launches."""

        def noted(inputs: list[Any]) -> Any:
            log = self._log
            with log.noting(self._kernels):
                outputs = model(inputs)
            try:
                self.noted = self._notes() if log.failure is None else None
                self.failure = log.failure
            except Exception as error:
                self.failure = one_line(error)
            return outputs

        return noted

    def _notes(self) -> Noted:
        log = self._log
        in_use = used_blocks(self._pool) if log.logged else ()
        never_freed = [one.span for one in in_use]
        return Noted(log.logged, log.inputs, never_freed, log.kept_bytes)


def _is_on(value: Any, device: int) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and value.device.index == device
