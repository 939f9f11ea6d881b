"""Measure how long compiling takes: the first call, all of warm-up, and Dynamo's own timers.

What a process does once, whatever it compiles, is done beforehand by `start_toolchain`: importing Inductor, starting
its compile workers, building Triton's driver; and for C++, where a graph has work for the CPU, finding out what the CPU
can do and compiling a header. Otherwise it would be in the numbers of some cells and not of others: XLNET-I took 62 s
to compile in modes with a kernel on the CPU, and 24 s in the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.atomic_file import write_atomically

FOUND_OUT = "toolchain.json"
"""File in the folder of headers: what the process that examines the compilers has found, while others are at work."""

MOST_WAIT_S = 90.0
"""Seconds after which a process that needs that, and does not get it, finds it out by itself."""

_POLL_S = 0.02

_waits: list[float] = []


def start_toolchain(
    device: torch.device, vec_isa_ok: bool | None = None, headers: str | None = None, *, being_asked: bool = False
) -> bool | None:
    """Compile and run a trivial function for the device and for the CPU, and forget it.

    Inductor finds out what vector instructions C++ can use by a process for each kind that imports torch, one after
    another and in every process again: 45 s for five of them on a machine with an H200. Here they are at work together.
    And it compiles the headers of C++ kernels into the folder for temporary files, which each process has its own of:
    another 10 s.

    Args:
        device: the cell's.
        vec_isa_ok: what this returned in an earlier process on this machine. True: it is not found out again.
        headers: folder of compiled headers that other processes use too; None: this process compiles its own.
        being_asked: another process is finding out now what C++ can use, and will tell it (`tell_toolchain`). A cell
            on a GPU does not wait for that here. If its program needs C++ before it is known, it waits there, and
            `waited_s` has for how long.

    Returns:
        Whether C++ can use all vector instructions that the CPU has; None where only some, or where it is not known.
    """
    share_toolchain(vec_isa_ok, headers, being_asked=being_asked)
    known = headers is not None and Path(headers, FOUND_OUT).exists()
    is_open = being_asked and device.type != "cpu" and not known
    all_instructions = False if is_open else _all_vector_instructions()
    for each in dict.fromkeys((device, torch.device("cpu"))):
        if is_open and each.type == "cpu":
            continue
        torch.compile(_trivial, backend="inductor")(torch.zeros(64, device=each))
    torch.compiler.reset()
    return all_instructions or None


def share_toolchain(vec_isa_ok: bool | None, headers: str | None, *, being_asked: bool = False) -> None:
    """Use what other processes found out for `start_toolchain`; the arguments are the same."""
    kind = torch_internals.cpu_vec_isa.VecISA
    if vec_isa_ok:
        kind.check_build = lambda isa, code: True
    elif being_asked and headers is not None and not hasattr(kind.check_build, "__wrapped__"):
        kind.check_build = _as_found_out(kind.check_build, Path(headers, FOUND_OUT))
    if headers is not None:
        torch_internals.codecache._HEADER_DIR = headers
        torch_internals.codecache._HEADER_LOCK_DIR = str(Path(headers, "locks"))


def tell_toolchain(vec_isa_ok: bool | None, headers: str) -> None:
    """Tell what `start_toolchain` returned, None where it failed, to processes that were started while this one found
    it out."""
    write_atomically(Path(headers, FOUND_OUT), json.dumps(vec_isa_ok).encode())


def _as_found_out(check: Callable[[Any, str], bool], file: Path) -> Callable[[Any, str], bool]:
    """Return `VecISA.check_build(self, code)` that does not check where another process has found all to work."""

    @cache
    def all_work() -> bool:
        begin = time.monotonic()
        with untimed():
            while not file.exists() and time.monotonic() < begin + MOST_WAIT_S:
                time.sleep(_POLL_S)
        _waits.append(time.monotonic() - begin)
        if not file.exists():
            print(f"no other process said within {MOST_WAIT_S:.0f} s what C++ can use; finding it out here")
            return False
        return bool(json.loads(file.read_bytes()))

    @wraps(check)
    def check_build(isa: Any, code: str) -> bool:
        return all_work() or check(isa, code)

    return check_build


def _all_vector_instructions() -> bool:
    """Return whether all vector instructions work. Each kind keeps what it found for this process's compilations."""
    isa = torch_internals.cpu_vec_isa
    flags = isa.x86_isa_checker()
    had = [one for one in isa.supported_vec_isa_list if all(flag in flags for flag in str(one).split())]
    with ThreadPoolExecutor(max(1, len(had))) as threads:
        return bool(had) and all(list(threads.map(bool, had)))


def _trivial(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def waited_s() -> float:
    """Return the seconds since `restart_timers` in which compilations waited for what another process was finding out.
    They are in none of Dynamo's timers."""
    return sum(_waits)


def restart_timers() -> None:
    """Set Dynamo's timers and counters to zero."""
    _waits.clear()
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
