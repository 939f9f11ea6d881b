"""Measure compile times: the first call, all of warm-up, and Dynamo's timers.

`start_toolchain` does in advance all work that a process does once: importing Inductor, starting its compile workers,
building Triton's driver; and for C++, used by graphs with CPU kernels, testing vector instructions and compiling a
header. Otherwise only some cells would include it: XLNET-I took 62 s to compile in modes with a kernel on the CPU, and
24 s in the others.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from optimizations import torch_internals


def start_toolchain(device: torch.device, vec_isa_ok: bool | None = None, headers: str | None = None) -> bool | None:
    """Compile and run a trivial function for the device and for the CPU, and drop it.

    Inductor tests each kind of vector instructions in a process that imports torch, one after another and again in
    every process: 45 s for five kinds on a machine with an H200. Here the tests run concurrently. It also compiles the
    headers of C++ kernels into the folder for temporary files, which differs between processes: another 10 s.

    Args:
        device: the cell's.
        vec_isa_ok: result of this function in an earlier process on this machine. True: the tests are not repeated.
        headers: folder of compiled headers that processes share; None: this process compiles its own.

    Returns:
        Whether C++ can use all vector instructions of the CPU; None if only some, or if it is unknown.
    """
    share_toolchain(vec_isa_ok, headers)
    all_instructions = _all_vector_instructions()
    for each in dict.fromkeys((device, torch.device("cpu"))):
        torch.compile(_trivial, backend="inductor")(torch.zeros(64, device=each))
    torch.compiler.reset()
    return all_instructions or None


def share_toolchain(vec_isa_ok: bool | None, headers: str | None) -> None:
    """Use results of other processes for `start_toolchain`; the arguments are the same."""
    if vec_isa_ok:
        torch_internals.cpu_vec_isa.VecISA.check_build = lambda isa, code: True
    if headers is not None:
        torch_internals.codecache._HEADER_DIR = headers
        torch_internals.codecache._HEADER_LOCK_DIR = str(Path(headers, "locks"))


def _all_vector_instructions() -> bool:
    """Return whether all vector instructions work; the results are cached for this process's compilations."""
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


def timer_seconds() -> dict[str, float]:
    """Return seconds by the name of Dynamo's timer since `restart_timers`. Timers nest: they add up to no total."""
    spent_ns = torch_internals.dynamo_utils.cumulative_time_spent_ns
    return {name: nanoseconds / 1e9 for name, nanoseconds in sorted(spent_ns.items())}
