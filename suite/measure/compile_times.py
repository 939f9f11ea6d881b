"""How long compiling takes: the first call, all of warm-up, and Dynamo's own timers.

Caches are cold, the process is not: what it does once, whatever it compiles (importing Inductor, starting its compile
workers, building Triton's driver or a header), is done beforehand by `start_toolchain`. Otherwise it would be in the
numbers of some cells and not of others, for stochastic workloads are compiled once for trial.
"""

from __future__ import annotations

import torch

from optimizations import torch_internals


def start_toolchain(device: torch.device) -> None:
    """Compile and run a trivial function, and forget it; the caches keep what is not the function's own."""
    torch.compile(_trivial, backend="inductor")(torch.zeros(64, device=device))
    torch.compiler.reset()


def _trivial(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def restart_timers() -> None:
    """Set Dynamo's timers and counters to zero."""
    utils = torch_internals.dynamo_utils
    utils.counters.clear()
    utils.cumulative_time_spent_ns.clear()
    utils.compilation_time_metrics.clear()


def timer_seconds() -> dict[str, float]:
    """Seconds by the name of Dynamo's timer since `restart_timers`. Timers nest, so they do not add up to a total."""
    spent_ns = torch_internals.dynamo_utils.cumulative_time_spent_ns
    return {name: nanoseconds / 1e9 for name, nanoseconds in sorted(spent_ns.items())}
