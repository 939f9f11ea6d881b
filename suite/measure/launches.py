"""How long the CUDA graphs of an iteration take by themselves, each launched where the program launches it.

Launching recorded graphs once more, without the program around them, would be simpler and wrong: what a graph reads may
lie where a later kernel of it writes, so a second launch reads what the first one wrote. Where that should be indices
of tokens, for example, they are out of range, and an assertion on the GPU fails.
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
    subtracted, because who launches one after another waits once. Empty if a `run` launches none; it is run as often
    nevertheless, for another process may wait for each.

    Args:
        run: an iteration of the program.
        wait: until the device is done.
        iterations: how many are taken.
    """
    found: list[tuple[float, int]] = []
    for _ in range(iterations):
        with timed_launches(torch.cuda.CUDAGraph, wait) as launches:
            run()
        found.append((sum(launches), len(launches)))
    if not all(count for _, count in found):
        return []
    least = least_graph_us(wait) if any(count > 1 for _, count in found) else 0.0
    return [max(total - (count - 1) * least, least) for total, count in found]


@contextmanager
def timed_launches(kind: Any, wait: Callable[[], None]) -> Iterator[list[float]]:
    """Microseconds of each replay of a graph of this class inside the block, in order, as `waited_us` takes them."""
    found: list[float] = []
    replay = kind.replay

    def timed(graph: Any) -> None:
        found.append(waited_us(lambda: replay(graph), wait))

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
    return median(waited_us(graph.replay, wait) for _ in range(SAMPLES_OF_LEAST))


def waited_us(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """Microseconds from the beginning of `run` until the device is done, which has nothing to do before."""
    wait()
    begin_ns = time.perf_counter_ns()
    run()
    wait()
    return (time.perf_counter_ns() - begin_ns) / 1e3
