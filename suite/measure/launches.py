"""How long the CUDA graphs of an iteration take by themselves, each launched where the program launches it.

Launching recorded graphs once more, without the program around them, would be simpler and wrong: what a graph reads may
lie where a later kernel of it writes, so a second launch reads what the first has left. A token then is no index any
more, and the GPU ends in an assertion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

SAMPLES_OF_LEAST = 50


def graphs_us(run: Callable[[], object], wait: Callable[[], None], iterations: int) -> list[float]:
    """Microseconds of the CUDA graphs of `run`, launched one after another and awaited at the end, per iteration.

    Each graph is awaited, so that only its own time is taken; of all but one the time of the least graph is
    subtracted, because who launches one after another waits once. Empty if `run` launches none.

    Args:
        run: an iteration of the program.
        wait: until the device is done.
        iterations: how many are taken.
    """
    found: list[tuple[float, int]] = []
    for _ in range(iterations):
        with timed_launches(torch.cuda.CUDAGraph, wait) as launches:
            run()
        if not launches:
            return []
        found.append((sum(launches), len(launches)))
    least = least_graph_us(wait) if any(count > 1 for _, count in found) else 0.0
    return [max(total - (count - 1) * least, least) for total, count in found]


@contextmanager
def timed_launches(kind: Any, wait: Callable[[], None]) -> Iterator[list[float]]:
    """Microseconds of every replay of a graph of this class inside the block, in order.

    From the launch until the device is done; it had nothing to do before.
    """
    found: list[float] = []
    replay = kind.replay

    def timed(graph: Any) -> None:
        wait()
        begin_ns = time.perf_counter_ns()
        replay(graph)
        wait()
        found.append((time.perf_counter_ns() - begin_ns) / 1e3)

    kind.replay = timed
    try:
        yield found
    finally:
        kind.replay = replay


def least_graph_us(wait: Callable[[], None]) -> float:
    """Median microseconds from the launch of a graph of one small kernel until the device is done."""
    value = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
    samples = []
    for _ in range(SAMPLES_OF_LEAST):
        wait()
        begin_ns = time.perf_counter_ns()
        graph.replay()
        wait()
        samples.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return median(samples)
