"""Record the load of other programs on the host during a measurement: they use its cores and caches.

The runner samples processor time right before and after the blocks of a process, while nothing is timed. The load of
other programs is the host's processor time less that of this program and its children. A container may hide other
processes, but in most the kernel's counters of processor time are of the whole host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from suite.results.schema import HostUse


@dataclass(frozen=True, slots=True)
class HostSample:
    """Hold one sample of the host: the time of a clock, and processor time of all programs and of this run."""

    at_s: float
    host_cpu_s: float
    own_cpu_s: float


def sample_host() -> HostSample:
    """Return a sample of the host's processor time now."""
    return HostSample(time.monotonic(), _host_cpu_s(), own_cpu_s())


def between(before: HostSample, after: HostSample) -> HostUse:
    """Return the load of other programs between two samples."""
    elapsed_s, host_s = after.at_s - before.at_s, after.host_cpu_s - before.host_cpu_s
    others_s = max(0.0, host_s - (after.own_cpu_s - before.own_cpu_s))
    # Without the kernel's counters the load is unknown.
    return HostUse(cpu_cores=round(others_s / elapsed_s, 2) if elapsed_s > 0 and host_s > 0 else None)


def most(found: Sequence[HostUse]) -> HostUse | None:
    """Return the use with the most cores; None if there is none."""
    return max(found, key=lambda one: one.cpu_cores or 0.0, default=None)


def own_cpu_s() -> float:
    """Return processor time of this process and its children, including children that have ended."""
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
