"""Measure the distance to the floor: the time of an iteration, compared with that of its CUDA graphs alone.

No host program with these graphs can be faster than launching them one after another with one synchronization.
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
    """Return the number of iterations: as many as fit into `LONGEST_S`, from `FEWEST` to `MOST`."""
    return min(MOST, max(FEWEST, int(LONGEST_S * 1e6 / max(iteration_us, 1.0))))


def floor_us(cell: PreparedCell) -> Mapping[str, float | None]:
    """Return medians of iterations (`samples_of`), and of equally many of their graphs, each with synchronization.

    All run on one core (`PreparedCell.core`), the same for every mode. The inputs move from iteration to iteration as
    in the timed blocks. All ranks of a cell run equally many, because iterations contain collectives.
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
    floor = median(us for _, us in graphs)
    found = {"core": cell.core, "graphs": median(count for count, _ in graphs), "whole_us": whole}
    if floor <= 0:  # the host needed more time for empty graphs than for the program's
        return found
    return {**found, "floor_us": floor, "over_floor_ratio": whole / floor}


def standing(row: Cell) -> Mapping[str, float | None]:
    """Return the valid values of a row.

    Older rows without a count of graphs have no floor if an iteration launches many: one measured synchronization was
    used for all graphs, and its error counts once for each. Older rows of several ranks without a recorded core have
    no values: all ranks were on one core, and waited for each other.
    """
    metrics = row.metrics
    values = metrics.more.get(METRIC.name, {}) if metrics else {}
    if "core" not in values and (row.tp or 1) > 1:
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
