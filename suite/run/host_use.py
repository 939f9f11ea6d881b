"""Record what other programs do on the host during a measurement: they take time from it, or share its caches.

The runner looks right before the blocks of a process and right after them, while nothing is timed. Programs are told
apart by the processes that this one has started. A container may hide other programs' processes, but the kernel's own
counts of a host's processor time are of the whole host in most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from suite.results.schema import HostUse


@dataclass(frozen=True, slots=True)
class Look:
    """Hold one look at the host: seconds of a clock, and of processor time that all programs and this run used."""

    at_s: float
    host_cpu_s: float
    own_cpu_s: float


def look() -> Look:
    """Return the state of the host now."""
    return Look(time.monotonic(), _host_cpu_s(), own_cpu_s())


def between(before: Look, after: Look) -> HostUse:
    """Return what others did between two looks."""
    elapsed_s, host_s = after.at_s - before.at_s, after.host_cpu_s - before.host_cpu_s
    others_s = max(0.0, host_s - (after.own_cpu_s - before.own_cpu_s))
    # A kernel that counts nothing says nothing.
    return HostUse(cpu_cores=round(others_s / elapsed_s, 2) if elapsed_s > 0 and host_s > 0 else None)


def most(found: Sequence[HostUse]) -> HostUse | None:
    """Return the one with the most cores; None where there is no look."""
    return max(found, key=lambda one: one.cpu_cores or 0.0, default=None)


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
