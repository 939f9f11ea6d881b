"""Record what other programs do on the host during a measurement: they take time from it, or share its caches.

Looked at right before the blocks of a process and right after them, by the runner, while nothing is timed. Programs
are told apart by the processes that this one has started. A container may hide other programs' processes, but the
kernel's own counts of a host's processor time are of the whole host in most.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil
import pynvml

from suite.measure.gpu import NoGpu, OtherGpu, other_gpus
from suite.results.schema import HostUse

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Look:
    """Hold one look at the host: seconds of a clock, and of processor time that all programs and this run used so far.

    `gpus` are those that the run does not use; None where they are not known.
    """

    at_s: float
    host_cpu_s: float
    own_cpu_s: float
    gpus: Sequence[OtherGpu] | None


def look(own_gpus: int) -> Look:
    """Return the state of the host now. `own_gpus`: how many GPUs the run uses, the first it may; 0 on the CPU."""
    return Look(time.monotonic(), _host_cpu_s(), own_cpu_s(), _gpus(own_gpus))


def between(before: Look, after: Look) -> HostUse:
    """Return what others did between two looks and, on GPUs, at the two."""
    elapsed_s, host_s = after.at_s - before.at_s, after.host_cpu_s - before.host_cpu_s
    others_s = max(0.0, host_s - (after.own_cpu_s - before.own_cpu_s))
    known = [one.gpus for one in (before, after) if one.gpus is not None]
    return HostUse(
        # A kernel that counts nothing says nothing.
        cpu_cores=round(others_s / elapsed_s, 2) if elapsed_s > 0 and host_s > 0 else None,
        gpus_at_work=_most(sum(1 for gpu in gpus if gpu.busy_percent) for gpus in known),
        gpu_processes=_most(sum(gpu.processes or 0 for gpu in gpus) for gpus in known),
    )


def most(found: Sequence[HostUse]) -> HostUse | None:
    """Return the most of each quantity; None where there is no look."""
    if not found:
        return None
    return HostUse(
        cpu_cores=_most(one.cpu_cores for one in found),
        gpus_at_work=_most(one.gpus_at_work for one in found),
        gpu_processes=_most(one.gpu_processes for one in found),
    )


def own_cpu_s() -> float:
    """Return processor time of this process and all that it has started, those that have ended too."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _host_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _gpus(own: int) -> Sequence[OtherGpu] | None:
    if not own:
        return None
    try:
        return other_gpus(own)
    except (NoGpu, pynvml.NVMLError):
        return None


def _most(numbers: Iterable[Number | None]) -> Number | None:
    return max((one for one in numbers if one is not None), default=None)
