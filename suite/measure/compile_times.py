"""Measure how long compiling takes: the first call, all of warm-up, and Dynamo's own timers.

What a process does once, whatever it compiles, is done beforehand by `start_toolchain`: importing Inductor, starting
its compile workers, building Triton's driver; and for C++, where a graph has work for the CPU, finding out what the CPU
can do and compiling a header. Otherwise it would be in the numbers of some cells and not of others: XLNET-I took 62 s
to compile in modes with a kernel on the CPU, and 24 s in the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from optimizations import torch_internals


def start_toolchain(device: torch.device, vec_isa_ok: bool | None = None, headers: str | None = None) -> bool | None:
    """Compile and run a trivial function for the device and for the CPU, and forget it.

    Inductor finds out what vector instructions C++ can use by a process for each kind that imports torch, one after
    another and in every process again: 45 s for five of them on a machine with an H200. Here they are at work together.
    And it compiles the headers of C++ kernels into the folder for temporary files, which each process has its own of:
    another 10 s.

    Args:
        device: the cell's.
        vec_isa_ok: what this returned in an earlier process on this machine. True: it is not found out again.
        headers: folder of compiled headers that other processes use too; None: this process compiles its own.

    Returns:
        Whether C++ can use all vector instructions that the CPU has; None where only some, or where it is not known.
    """
    share_toolchain(vec_isa_ok, headers)
    all_instructions = _all_vector_instructions()
    for each in dict.fromkeys((device, torch.device("cpu"))):
        torch.compile(_trivial, backend="inductor")(torch.zeros(64, device=each))
    torch.compiler.reset()
    return all_instructions or None


def share_toolchain(vec_isa_ok: bool | None, headers: str | None) -> None:
    """Use what other processes found out for `start_toolchain`; the arguments are the same."""
    if vec_isa_ok:
        torch_internals.cpu_vec_isa.VecISA.check_build = lambda isa, code: True
    if headers is not None:
        torch_internals.codecache._HEADER_DIR = headers
        torch_internals.codecache._HEADER_LOCK_DIR = str(Path(headers, "locks"))


def _all_vector_instructions() -> bool:
    """Return whether all vector instructions work. Each kind keeps what it found for this process's compilations."""
    isa = torch_internals.cpu_vec_isa
    flags = isa.x86_isa_checker()
    had = [one for one in isa.supported_vec_isa_list if all(flag in flags for flag in str(one).split())]
    with ThreadPoolExecutor(max(1, len(had))) as threads:
        return bool(had) and all(list(threads.map(bool, had)))


def _trivial(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def restart_timers() -> None:
    """Set Dynamo's timers and counters to zero."""
    utils = torch_internals.dynamo_utils
    utils.counters.clear()
    utils.cumulative_time_spent_ns.clear()
    utils.compilation_time_metrics.clear()


@contextmanager
def untimed() -> Iterator[None]:
    """Leave what happens in the block out of all of Dynamo's timers that are running."""
    utils = torch_internals.dynamo_utils
    begin = time.time_ns()
    try:
        yield
    finally:
        spent = time.time_ns() - begin
        for name in utils.get_chromium_event_logger().get_stack():
            utils.cumulative_time_spent_ns[name] -= spent  # what the timer itself adds at its end has it


def timer_seconds() -> dict[str, float]:
    """Return seconds by the name of Dynamo's timer since `restart_timers`. Timers nest: they add up to no total."""
    spent_ns = torch_internals.dynamo_utils.cumulative_time_spent_ns
    # Some that run are not added up; `untimed` leaves them below zero.
    return {name: nanoseconds / 1e9 for name, nanoseconds in sorted(spent_ns.items()) if nanoseconds >= 0}
