"""Measure the time of an iteration's CUDA graphs without the rest, each launched where the program launches it.

Launching recorded graphs again without the rest of the program would be simpler but wrong: a kernel may overwrite the
memory of its graph's inputs, so that a second launch reads results of the first one. If the inputs are indices of
tokens, for example, they are then out of range, and an assertion on the GPU fails.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from optimizations.torch_internals import replaced_attribute


def graphs_of(run: Callable[[], object], wait: Callable[[], None], iterations: int) -> list[tuple[int, float]]:
    """Return the number of launches of graphs in each of several iterations, and their microseconds.

    The time is that of launching them one after another with one synchronization at the end. The result is empty if one
    launches none. All iterations are run in any case, because other ranks may wait for each.

    Each graph is timed with a synchronization. A program that launches them one after another synchronizes once, so the
    time of a minimal graph, measured right before, is subtracted for each graph but the first. With a single
    measurement its error would count once for each graph: for Mask R-CNN's 327 graphs no time was left.

    Args:
        run: an iteration of the program.
        wait: synchronizes with the device.
        iterations: number of iterations.
    """
    launch, replay = least_graph(), torch.cuda.CUDAGraph.replay  # before launches are timed, so that it is none of them
    times_us: list[tuple[float, float]] = []
    found: list[tuple[int, float]] = []

    def timed(graph: Any) -> None:
        least_us = waited_us(launch, wait) if times_us else 0.0
        times_us.append((waited_us(lambda: replay(graph), wait), least_us))

    with replaced_attribute(torch.cuda.CUDAGraph, "replay", timed):
        for _ in range(iterations):
            times_us.clear()
            run()
            found.append((len(times_us), sum(own - least for own, least in times_us)))
    return found if all(count for count, _ in found) else []


def least_graph() -> Callable[[], object]:
    """Return the launch of a graph of one small kernel.

    The kernel's output is allocated during capture, in the graph's pool, and lives as long as the graph. A tensor from
    outside would be freed on return, and each launch would write into memory of the program.
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
    """Return microseconds from the start of `run` until the device, idle before, has finished."""
    wait()
    begin_ns = time.perf_counter_ns()
    run()
    wait()
    return (time.perf_counter_ns() - begin_ns) / 1e3
