"""How long compiling takes: the first call, all of warm-up, and Dynamo's own timers.

What a process does once, whatever it compiles, is done beforehand by `start_toolchain`: importing Inductor, starting
its compile workers, building Triton's driver; and for C++, where a graph has work for the CPU, finding out what the CPU
can do and compiling a header. Otherwise it would be in the numbers of some cells and not of others: XLNET-I took 62 s
to compile in modes with a kernel on the CPU, and 24 s in the others.
"""

from __future__ import annotations

import torch

from optimizations import torch_internals


def start_toolchain(device: torch.device) -> None:
    """Compile and run a trivial function for the device and for the CPU, and forget it."""
    for each in dict.fromkeys((device, torch.device("cpu"))):
        torch.compile(_trivial, backend="inductor")(torch.zeros(64, device=each))
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
