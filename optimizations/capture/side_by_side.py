"""Run independent kernels of a captured step or callable concurrently: see `optimizations.concurrency`.

A step or callable runs any kind of code, also in autograd's threads. So operators are logged by a dispatch mode that is
active in all threads (in a step, the observer), and Inductor's kernels by all modules that it generated. Other code
that adds nodes is a barrier.

Both launch a `RacedGraph`. The race times the graph alone, without the copies of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from optimizations.capture.device import Device
from optimizations.concurrency.branches import Branches
from optimizations.concurrency.launch_log import HAS_COLLECTIVES, SWITCHED_OFF, LaunchLog
from optimizations.in_place.generated import COLLECTIVE_OPERATORS
from optimizations.options import Concurrency
from optimizations.report.concurrency import ConcurrencyReport
from optimizations.stack_trace import one_line
from optimizations.torch_internals.generated_modules import loaded_modules


class NotLaunched(RuntimeError):
    """Report that a graph cannot be launched, because its edges are not known."""


def side_by_side(device: Device, graph: Any, pool: Any, log: LaunchLog | None) -> Branches | str:
    """Start the race of a captured graph if branches may be faster; else return why there is none.

    After any failure the chain stays.
    """
    if log is None:
        return SWITCHED_OFF
    if log.failure is not None:
        return log.failure
    if any(one.launch.name.partition(".")[0] in COLLECTIVE_OPERATORS for one in log.logged):
        return HAS_COLLECTIVES
    branches = device.branches(graph, log)
    try:
        memory, used = device.memory(pool)
        log.never_freed = [one.span for one in used]
        branches.prepare(device.read(graph), [one.span for one in memory])
    except Exception as error:
        branches.stop(one_line(error))
    return branches


def report_of(race: Branches | str) -> ConcurrencyReport:
    """Return the report of a recording with this race, or with this reason for none."""
    return race.report() if isinstance(race, Branches) else ConcurrencyReport("chain", race)


class RacedGraph:
    """Launch a captured graph of a step or callable, and race its chain against branches in the first launches.

    Attributes:
        captured: the graph; `pool` is its memory.
        race: the race, or why there is none.
        mutated: tensors whose versions each launch increments for autograd; `written`: storages that it writes.
        replays: how often it was launched.
    """

    def __init__(self, device: Device, pool: Any, concurrency: Concurrency) -> None:
        self.captured, self.pool = device.new_graph(), pool
        self.race: Branches | str = SWITCHED_OFF
        self.mutated: Sequence[torch.Tensor] = ()
        self.written: set[int] = set()
        self.replays = 0
        self.device, self._concurrency = device, concurrency

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the block like `Device.capturing`, and prepare the race."""
        log = self.device.launch_log(notes_memory=True) if self._concurrency == "auto" else None
        noting = contextlib.nullcontext() if log is None else log.noting(*loaded_modules())
        with self.device.capturing(self.captured, self.pool), noting:
            yield
        self.race = side_by_side(self.device, self.captured, self.pool, log)

    def replay(self) -> None:
        """Launch the graph.

        Raises:
            NotLaunched: its edges were changed and could not be restored.
        """
        race = self.race
        if isinstance(race, Branches) and race.is_racing:
            race.run(lambda: race.launch(self._launch))
        else:
            self._launch()
        self.replays += 1
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)

    def _launch(self) -> None:
        if isinstance(self.race, Branches) and self.race.unusable is not None:
            raise NotLaunched(self.race.unusable)
        self.captured.replay()
