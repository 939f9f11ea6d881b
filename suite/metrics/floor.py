"""Distance to the floor: how long an iteration takes, compared with its CUDA graphs alone.

No host program that launches these graphs can be faster than launching them one after another and waiting.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from statistics import median

from suite.metrics import Metric, PreparedCell

SAMPLES = 100


def floor_us(cell: PreparedCell) -> Mapping[str, float | None]:
    """Medians of `SAMPLES` iterations, and of as many of their graphs, each waited for.

    All are taken on one core, the same for every mode. The inputs move from iteration to iteration as in the timed
    blocks: on inputs that stay, selection would begin to measure once more.
    """
    import torch

    from suite.measure.launches import graphs_us, waited_us
    from suite.measure.timing import bound_to

    if cell.device.type != "cuda" or not cell.mode.uses_cuda_graphs:
        return {}

    numbers = itertools.count()

    def iterate() -> None:
        cell.iterate(next(numbers))

    def wait() -> None:
        torch.cuda.synchronize(cell.device)

    with bound_to(min(os.sched_getaffinity(0))):
        iterate()
        graphs = graphs_us(iterate, wait, SAMPLES)
        if not graphs:
            return {}
        whole = median(waited_us(iterate, wait) for _ in range(SAMPLES))
    floor = median(graphs)
    return {"floor_us": floor, "whole_us": whole, "over_floor_ratio": whole / floor}


METRIC = Metric(
    name="floor",
    title="Distance to the floor",
    note="floor: the CUDA graphs of an iteration alone, launched and waited for; whole: the iteration, waited for. "
    "whole / floor is what the host, copies of inputs and work outside of graphs add; 1 cannot be reached.",
    columns=("whole_us", "floor_us", "over_floor_ratio"),
    measure=floor_us,
)
