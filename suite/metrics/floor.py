"""Distance to the floor: how long an iteration takes, compared with its CUDA graphs alone.

No host program that launches these graphs can be faster than launching them one after another and waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from suite.metrics import Metric, PreparedCell

SAMPLES = 100


def floor_us(cell: PreparedCell) -> Mapping[str, float | None]:
    """Medians of `SAMPLES` iterations on the same inputs, and of as many replays of their graphs, each waited for."""
    import torch

    if cell.device.type != "cuda" or not cell.mode.uses_cuda_graphs:
        return {}
    wait = _waiting_for(cell.device)
    cell.iterate(0)
    with replayed(torch.cuda.CUDAGraph) as graphs:
        cell.iterate(0)
    if not graphs:
        return {}
    whole = _sampled(lambda: cell.iterate(0), wait)

    def launch() -> None:
        for graph in graphs:
            graph.replay()

    # The graphs read what the last iteration left: its inputs, which the cell keeps.
    floor = _sampled(launch, wait)
    return {"floor_us": floor, "whole_us": whole, "over_floor_ratio": whole / floor}


@contextmanager
def replayed(kind: Any) -> Iterator[list[Any]]:
    """The graphs of this class that are launched inside the block, in order."""
    found: list[Any] = []
    replay = kind.replay

    def noted(graph: Any) -> None:
        found.append(graph)
        replay(graph)

    kind.replay = noted
    try:
        yield found
    finally:
        kind.replay = replay


def _waiting_for(device: Any) -> Callable[[], None]:
    import torch

    return lambda: torch.cuda.synchronize(device)


def _sampled(run: Callable[[], object], wait: Callable[[], None]) -> float:
    samples = []
    for _ in range(SAMPLES):
        wait()
        started = time.perf_counter_ns()
        run()
        wait()
        samples.append((time.perf_counter_ns() - started) / 1e3)
    return median(samples)


METRIC = Metric(
    name="floor",
    title="Distance to the floor",
    note="floor: the CUDA graphs of an iteration alone, launched and waited for; whole: the iteration, waited for. "
    "whole / floor is what the host, copies of inputs and work outside of graphs add; 1 cannot be reached.",
    columns=("whole_us", "floor_us", "over_floor_ratio"),
    measure=floor_us,
)
