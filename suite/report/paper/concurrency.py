"""Show the gain of independent kernels that run at the same time, by workload: mode `lanes` over mode `lean`.

No paper has this figure. It stands with GraCE's, whose workloads it is of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from suite.measure.modes import LANES_MODE, LEAN_MODE
from suite.report.chart import Scale
from suite.report.paper.exhibit import (
    NOT_MEASURED,
    Exhibit,
    Grid,
    Made,
    Point,
    Results,
    Series,
    Value,
    labels_of,
    make_grid,
    plain_means,
    ratio_means,
    ratio_series,
)
from suite.results.schema import Cell

GRAPHS = "graphs alone"
"""The series of device times, which Encore takes when it decides between a chain and branches."""


class RacedGraph(BaseModel):
    """Hold what a row's report says of one CUDA graph; fields of other versions are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    decision: Literal["chain", "branches", "waiting", "measuring"]
    chain_us: float | None = None
    branches_us: float | None = None
    kept_bytes: int = 0

    @property
    def times_us(self) -> tuple[float, float] | None:
        """Return its time as a chain, and as it serves calls; None where it was not timed."""
        if self.chain_us is None or self.branches_us is None:
            return None
        return self.chain_us, self.branches_us if self.decision == "branches" else self.chain_us


def raced_graphs(cell: Cell | None) -> list[RacedGraph]:
    """Return the graphs of a row, in the order of its report; none where it has none, or was not measured."""
    reports = cell.metrics.encore_report if cell is not None and cell.metrics is not None else None
    return list(_raced(reports or []))


def _raced(reports: list[JsonValue]) -> Iterator[RacedGraph]:
    for report in reports:
        recordings = report.get("recordings") if isinstance(report, dict) else None
        for one in recordings if isinstance(recordings, list) else []:
            try:
                yield RacedGraph.model_validate(one.get("concurrency") if isinstance(one, dict) else None)
            except ValidationError:  # of a version without it
                continue


def device_gain(graphs: list[RacedGraph]) -> float | None:
    """Return how many times faster the timed graphs are than as chains; None where none was timed.

    Each counts once, whatever it is called for in an iteration.
    """
    times = [one.times_us for one in graphs if one.times_us is not None]
    return sum(chain for chain, _ in times) / sum(chosen for _, chosen in times) if times else None


def make(exhibit: Exhibit, results: Results) -> Made:
    """Show two bars for each workload: of whole iterations, and of the graphs alone."""
    published = labels_of(results, exhibit.source)
    measured = results.run.labels if results.run is not None else ()
    further = [one for one in measured if one not in published and results.cell(one, LANES_MODE) is not None]
    labels = (*published, *further)

    def of_graphs(label: str) -> Value:
        gain = device_gain(raced_graphs(results.passed(label, LANES_MODE)))
        if gain is not None:
            return Value(gain)
        return Value(missing=results.state(label, LANES_MODE) or "each kernel needs the one before it")

    def more(label: str) -> dict[str, object]:
        graphs = raced_graphs(results.passed(label, LANES_MODE))
        if not graphs:
            return {}
        branched = sum(one.decision == "branches" for one in graphs)
        return {"graphs": len(graphs), "branched": branched, "kept_bytes": sum(one.kept_bytes for one in graphs)}

    whole = ratio_series(results, exhibit.source, LANES_MODE, LEAN_MODE, published=None)
    alone = Series(GRAPHS, of_graphs, column="graphs_alone")
    means, count = ratio_means(results, labels, [(LANES_MODE, LANES_MODE, LEAN_MODE)])
    note = f"Whiskers: 95 % intervals. Geomean: the {count} workloads that both modes have." if count else ""
    grid = Grid(
        "speedup",
        f"times faster than {LEAN_MODE}",
        Scale.RATIO,
        labels,
        (whole, alone),
        more_columns=("graphs", "branched", "kept_bytes"),
        more=more,
        note=note,
        shown=(1 / 2, 2),
    )
    all_means = means | {name: mean for name, mean in plain_means(grid).items() if name == GRAPHS}
    served = [one for label in labels for one in raced_graphs(results.passed(label, LANES_MODE))]
    branched = sum(one.decision == "branches" for one in served)
    points = [
        Point(f"{LANES_MODE} over {LEAN_MODE}", None, results.mean_text(labels, LANES_MODE, LEAN_MODE)),
        Point("largest of these", None, results.extreme_text(labels, LANES_MODE, LEAN_MODE)),
        Point("these by verdict", None, results.verdicts_text(labels, LANES_MODE, LEAN_MODE)),
        Point(
            f"device time of {GRAPHS}",
            None,
            f"{all_means[GRAPHS].value:.2f} of {all_means[GRAPHS].count}" if GRAPHS in all_means else NOT_MEASURED,
        ),
        Point("graphs with branches", None, f"{branched} of {len(served)}" if served else NOT_MEASURED),
    ]
    return make_grid(exhibit, results, grid, all_means, points)


_DIFFERS = (
    f"No paper has this figure. {LANES_MODE}: whole iterations of this mode over {LEAN_MODE}, which has chains. "
    f"{GRAPHS.capitalize()}: the sum of a row's graphs as chains over the sum as they serve calls, as Encore timed "
    "them before it decided; of one process, without an interval. Workloads without such a graph have no bar of these."
)

EXHIBITS = (Exhibit("concurrency", "grace", "workloads", "independent kernels at the same time", _DIFFERS, make),)
