"""Synchronize a worker with the other ranks of its cell, where a workload is split over several GPUs.

Ranks agree on every decision that changes the number of calls, because a call contains collectives: a rank with one
more call than the others would wait forever. They exchange data over gloo through host memory, never over the measured
GPUs.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from suite.worker.protocol import CellSpec

START_MARGIN_NS = 300_000
"""Delay of a common start after the ranks agree on it: longer than the message needs to reach all of them."""


class Alone:
    """Implement the interface of `RankGroup` for a cell of one process."""

    count = 1

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank."""
        return flag

    def all(self, value: Any) -> list[Any]:
        """Return each rank's value, by rank."""
        return [value]

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        return max(self.all(value))


class RankGroup(Alone):
    """Connect one of several processes with the others; each has one GPU (or threads of a CPU).

    Attributes:
        count: how many there are.
        mesh: their devices, for NCCL (on CPUs gloo).
    """

    def __init__(self, spec: CellSpec) -> None:
        """Connect to the other ranks.

        Raises:
            RuntimeError: they cannot be reached.
        """
        assert spec.tp is not None and spec.rendezvous is not None
        self.count = spec.tp
        on_gpu = spec.device == "cuda"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{spec.rendezvous}",
            rank=spec.rank,
            world_size=spec.tp,
            device_id=torch.device("cuda:0") if on_gpu else None,
        )
        self.mesh: DeviceMesh = init_device_mesh(spec.device, (spec.tp,))
        self._hosts = torch.distributed.new_group(backend="gloo")

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank. All wait for all."""
        said = torch.tensor([int(flag)])
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return bool(said)

    def all(self, value: Any) -> list[Any]:
        """Return each rank's value, by rank. All wait for all."""
        said: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(said, value, group=self._hosts)
        return said

    def start_together(self) -> None:
        """Return at the same time on all ranks, so that the slowest rank's time is that of the whole program.

        The clock of a host is that of all its processes.
        """
        start = torch.tensor([time.perf_counter_ns() + START_MARGIN_NS])
        torch.distributed.all_reduce(start, torch.distributed.ReduceOp.MAX, group=self._hosts)
        while time.perf_counter_ns() < int(start):
            pass


def join(spec: CellSpec) -> Alone:
    """Return the ranks of a cell: this process alone, or all of them once they have met."""
    return Alone() if spec.tp in (None, 1) else RankGroup(spec)
