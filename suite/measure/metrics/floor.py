"""Measure the distance to the floor: how long an iteration takes, compared with its CUDA graphs alone.

No host program that launches these graphs can be faster than launching them one after another and waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from suite.measure.metrics import Metric, PreparedCell
from suite.results.schema import Cell

FEWEST, MOST = 10, 50
LONGEST_S = 0.35

MOST_LAUNCHES_WITH_ONE_WAIT = 32
"""With no more graphs than this, an error of a few microseconds for each changes the sum by little."""


def samples_of(iteration_us: float) -> int:
    """Return how many iterations to take: as many as fit into `LONGEST_S`, from `FEWEST` to `MOST`."""
    return min(MOST, max(FEWEST, int(LONGEST_S * 1e6 / max(iteration_us, 1.0))))


def floor_us(cell: PreparedCell) -> Mapping[str, float | None]:
    """Return medians of some iterations (`samples_of`), and of as many of their graphs, each waited for.

    All are taken on one core (`PreparedCell.core`), the same for every mode. The inputs move from iteration to
    iteration as in the timed blocks. Ranks of one cell take equally many, for an iteration of one waits for the
    others'.
    """
    import torch

    from suite.measure.launches import graphs_of, moving, waited_us
    from suite.measure.timing import bound_to

    if cell.device.type != "cuda" or not cell.mode.needs_gpu:
        return {}

    iterate = moving(cell.iterate)

    def wait() -> None:
        torch.cuda.synchronize(cell.device)

    with bound_to(cell.core):
        if not cell.largest(len(graphs_of(iterate, wait, 1))):
            return {}
        samples = samples_of(cell.largest(waited_us(iterate, wait)))
        graphs = graphs_of(iterate, wait, samples)
        whole = median(waited_us(iterate, wait) for _ in range(samples))
    if not graphs:
        return {}
    floor = median(one.us for one in graphs)
    found = {"core": cell.core, "graphs": median(one.count for one in graphs), "whole_us": whole}
    if floor <= 0:  # the host was slower for graphs that do nothing than for the program's
        return found
    return {**found, "floor_us": floor, "over_floor_ratio": whole / floor}


def standing(row: Cell) -> Mapping[str, float | None]:
    """Return the values in a row. Rows from before the graphs were counted have no floor where an iteration launches
    many: one wait was taken for all of them then, and its error counts as often as there are graphs. Rows of several
    ranks from before the core was noted have nothing: all ranks were on one core then, and waited for each other."""
    metrics = row.metrics
    values = metrics.more.get(METRIC.name, {}) if metrics else {}
    if "core" not in values and len(row.ranks) > 1:
        return {}
    launches = metrics.coverage.graph_launches if metrics and metrics.coverage else 0
    if "graphs" in values or launches <= MOST_LAUNCHES_WITH_ONE_WAIT:
        return values
    return {name: value for name, value in values.items() if name == "whole_us"}


METRIC = Metric(
    name="floor",
    title="Distance to the floor",
    note="floor: the CUDA graphs of an iteration alone, launched and waited for; whole: the iteration, waited for. "
    "whole / floor is what the host, copies of inputs and work outside of graphs add; 1 cannot be reached. graphs: "
    "launched in an iteration; rows without this number have no floor where more than "
    f"{MOST_LAUNCHES_WITH_ONE_WAIT} are. core: the one of the calling thread, of several ranks the first one's. "
    "Rows of several ranks without it are left out, for all ranks shared one core.",
    columns=("core", "graphs", "whole_us", "floor_us", "over_floor_ratio"),
    measure=floor_us,
    standing=standing,
)
