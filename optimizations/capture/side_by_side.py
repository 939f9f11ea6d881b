"""Run independent kernels of a captured step or callable concurrently: see `optimizations.concurrency`.

A step or callable runs any kind of code, also in autograd's threads. So operators are logged by a dispatch mode that is
active in all threads (in a step, the observer), and Inductor's kernels by all modules that it generated. Other code
that adds nodes is a barrier.

A step races its whole launch, with its copies. Callables launch a `RacedGraph`, which races the graph alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class SideBySide:
    """Hold the race of one recording.

    Attributes:
        branches: the race; None if there is none, with the reason in `chain`.
    """

    branches: Branches | None = None
    chain: str = SWITCHED_OFF

    def report(self) -> ConcurrencyReport:
        """Return the report of the recording."""
        return self.branches.report() if self.branches is not None else ConcurrencyReport("chain", self.chain)


def side_by_side(device: Device, graph: Any, pool: Any, log: LaunchLog | None) -> SideBySide:
    """Start the race of a captured graph if branches may be faster. After any failure the chain stays."""
    if log is None:
        return SideBySide()
    if log.failure is not None:
        return SideBySide(chain=log.failure)
    if any(one.launch.name.partition(".")[0] in COLLECTIVE_OPERATORS for one in log.logged):
        return SideBySide(chain=HAS_COLLECTIVES)
    branches = None
    try:
        memory, used = device.memory(pool)
        log.never_freed = [one.span for one in used]
        branches = device.branches(graph, log)
        branches.prepare(device.read(graph), [one.span for one in memory])
    except Exception as error:
        if branches is None:
            return SideBySide(chain=one_line(error))
        branches.stop(one_line(error))
    return SideBySide(branches)


class RacedGraph:
    """Launch a captured graph of a callable, and race its chain against branches in the first launches.

    Attributes:
        captured: the graph; `pool` is its memory.
        mutated: tensors whose versions each launch increments for autograd.
        replays: how often it was launched.
    """

    def __init__(self, device: Device, pool: Any, concurrency: Concurrency) -> None:
        self.captured, self.pool, self.side_by_side = device.new_graph(), pool, SideBySide()
        self.mutated: Sequence[torch.Tensor] = ()
        self.replays = 0
        self.device, self._concurrency = device, concurrency

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the block like `Device.capturing`, and prepare the race."""
        log = self.device.launch_log(notes_memory=True) if self._concurrency == "auto" else None
        noting = contextlib.nullcontext() if log is None else log.noting(*loaded_modules())
        with self.device.capturing(self.captured, self.pool), noting:
            yield
        self.side_by_side = side_by_side(self.device, self.captured, self.pool, log)

    def replay(self) -> None:
        """Launch the graph.

        Raises:
            NotLaunched: its edges were changed and could not be restored.
        """
        branches = self.side_by_side.branches
        if branches is not None and branches.is_racing:
            branches.run(lambda: branches.launch(self._launch))
        else:
            self._launch()
        self.replays += 1
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)

    def _launch(self) -> None:
        branches = self.side_by_side.branches
        if branches is not None and branches.unusable is not None:
            raise NotLaunched(branches.unusable)
        self.captured.replay()
