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
from typing import Any

import torch

from optimizations.torch_internals import replaced_attribute


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
