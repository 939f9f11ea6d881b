"""Distance to the floor: how long an iteration takes, compared with its CUDA graphs alone.

No host program that launches these graphs can be faster than launching them one after another and waiting.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from statistics import median

from suite.metrics import Metric, PreparedCell

FEWEST, MOST = 10, 50
LONGEST_S = 0.35


def samples_of(iteration_us: float) -> int:
    """How many iterations are taken: as many as fit into `LONGEST_S`, not fewer than `FEWEST` or more than `MOST`."""
    return min(MOST, max(FEWEST, int(LONGEST_S * 1e6 / max(iteration_us, 1.0))))


def floor_us(cell: PreparedCell) -> Mapping[str, float | None]:
    """Medians of some iterations (`samples_of`), and of as many of their graphs, each waited for.

    All are taken on one core, the same for every mode. The inputs move from iteration to iteration as in the timed
    blocks: on inputs that stay, selection would begin to measure once more. Ranks of one cell take equally many, for
    an iteration of one waits for the others'.
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
        if not cell.largest(len(graphs_us(iterate, wait, 1))):
            return {}
        samples = samples_of(cell.largest(waited_us(iterate, wait)))
        graphs = graphs_us(iterate, wait, samples)
        whole = median(waited_us(iterate, wait) for _ in range(samples))
    if not graphs:
        return {}
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
