"""Measure how long the CUDA graphs of an iteration take by themselves, each launched where the program launches it.

Launching recorded graphs once more, without the program around them, would be simpler and wrong: what a graph reads may
lie where a later kernel of it writes, so a second launch reads what the first one wrote. Where that should be indices
of tokens, for example, they are out of range, and an assertion on the GPU fails.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from optimizations.torch_internals import replaced_attribute
from suite.results.schema import Record


@dataclass(frozen=True, slots=True)
class Graphs:
    """Hold the CUDA graphs of an iteration: how many it launches, and microseconds of all of them, launched one after
    another and awaited at the end."""

    count: int
    us: float


def graphs_of(run: Callable[[], object], wait: Callable[[], None], iterations: int) -> list[Graphs]:
    """Return the graphs of each of some iterations. Empty if one launches none; as many are run nevertheless, for
    another process may wait for each.

    Each graph is awaited, so that only its own time is taken. Who launches one after another waits once: so the time of
    the least graph is subtracted for each but the first, as it was right before that one. Taken once for all, it would
    be wrong by as many times as there are graphs: of Mask R-CNN's 327, no time at all was left.

    Args:
        run: an iteration of the program.
        wait: until the device is done.
        iterations: how many are taken.
    """
    launch = least_graph()  # bound before launches are timed, so that it is none of them
    found: list[Graphs] = []
    for _ in range(iterations):
        with timed_launches(torch.cuda.CUDAGraph, wait, lambda: waited_us(launch, wait)) as launches:
            run()
        waits = sum(wait_us for _, wait_us in launches[1:])
        found.append(Graphs(len(launches), sum(own for own, _ in launches) - waits))
    return found if all(one.count for one in found) else []


class HostParts(Record):
    """Hold microseconds of the host in a call that launches graphs: before the first launch, in all launches, and from
    the last one to the end of the call, when the device is at work. What lies between several launches is
    `between_us`."""

    before_us: float
    launch_us: float
    between_us: float
    behind_us: float


def host_parts(
    run: Callable[[int], object], wait: Callable[[], None], calls: int, *, at_work: bool = False
) -> HostParts | None:
    """Return medians over so many calls. None where one launches no graph.

    Each begins when the device has nothing to do. Or, `at_work`, when the one before has returned, and the device is
    still at work: as in a loop that reads no result. Who waits has done something else meanwhile, and finds what a call
    needs no longer in the processor's caches.
    """
    kind: Any = torch.cuda.CUDAGraph
    replay = kind.replay
    marks: list[int] = []

    def noted(graph: Any) -> None:
        marks.append(time.perf_counter_ns())
        replay(graph)
        marks.append(time.perf_counter_ns())

    found: list[tuple[int, ...]] = []
    try:
        with replaced_attribute(kind, "replay", noted):
            wait()
            for index in range(calls):
                if index and not at_work:
                    wait()
                marks.clear()
                begin_ns = time.perf_counter_ns()
                run(index)
                end_ns = time.perf_counter_ns()
                if not marks:
                    return None
                launch_ns = sum(marks[1::2]) - sum(marks[::2])
                found.append((marks[0] - begin_ns, launch_ns, marks[-1] - marks[0] - launch_ns, end_ns - marks[-1]))
    finally:
        wait()
    before_us, launch_us, between_us, behind_us = (median(part) / 1e3 for part in zip(*found, strict=True))
    return HostParts(before_us=before_us, launch_us=launch_us, between_us=between_us, behind_us=behind_us)


@contextmanager
def timed_launches(
    kind: Any, wait: Callable[[], None], before: Callable[[], float]
) -> Iterator[list[tuple[float, float]]]:
    """Yield microseconds of each replay of a graph of this class inside the block, in order, as `waited_us` takes them,
    and what `before` returned right before it (it is not called before the first)."""
    found: list[tuple[float, float]] = []
    replay = kind.replay

    def timed(graph: Any) -> None:
        own = before() if found else 0.0
        found.append((waited_us(lambda: replay(graph), wait), own))

    with replaced_attribute(kind, "replay", timed):
        yield found


def least_graph() -> Callable[[], object]:
    """Return the launch of a graph of one small kernel.

    What the kernel writes is allocated in the capture, so it lies in the graph's own pool for as long as the graph is
    there. A tensor from outside would be freed on return, and each launch would write into memory that the program has.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
    return graph.replay


def moving(iterate: Callable[[int], object]) -> Callable[[], object]:
    """Return the iteration with the next inputs in each call, so that inputs move as in the timed blocks."""
    numbers = itertools.count()
    return lambda: iterate(next(numbers))


def waited_us(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return microseconds from the beginning of `run` until the device is done, which has nothing to do before."""
    wait()
    begin_ns = time.perf_counter_ns()
    run()
    wait()
    return (time.perf_counter_ns() - begin_ns) / 1e3
