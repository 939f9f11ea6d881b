"""Record the load of other programs on the host during a measurement: they use its cores and caches.

The runner samples processor time right before and after the blocks of a process, while nothing is timed. The load of
other programs is the host's processor time less that of this program and its children. A container may hide other
processes, but in most the kernel's counters of processor time are of the whole host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil

from suite.results.schema import HostUse
from suite.run.supervise import tree_cpu_s


def watch_others() -> Callable[[], HostUse]:
    """Return a function that returns the load of other programs from now until its call."""
    begun_s, host_s, own_s = time.monotonic(), _host_cpu_s(), tree_cpu_s(psutil.Process())

    def others() -> HostUse:
        elapsed_s, host_used_s = time.monotonic() - begun_s, _host_cpu_s() - host_s
        others_s = max(0.0, host_used_s - (tree_cpu_s(psutil.Process()) - own_s))
        # Without the kernel's counters the load is unknown.
        return HostUse(cpu_cores=round(others_s / elapsed_s, 2) if elapsed_s > 0 and host_used_s > 0 else None)

    return others


def most(found: Sequence[HostUse]) -> HostUse | None:
    """Return the use with the most cores; None if there is none."""
    return max(found, key=lambda one: one.cpu_cores or 0.0, default=None)


def _host_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))
