"""Show the gain of independent kernels that run at the same time, by workload: of whole calls, and of the graphs alone.

No paper has this figure. It stands with GraCE's, whose workloads it is of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from suite.measure.modes import LANES_MODE, LEAN_MODE
from suite.report.chart import Scale
from suite.report.paper.exhibit import (
    NOT_MEASURED,
    Exhibit,
    Grid,
    Made,
    Point,
    Proved,
    Results,
    Series,
    Value,
    count_note,
    make_grid,
    plain_mean,
    ratio_series,
)
from suite.report.runs import row_label
from suite.results.errors import WrongUse
from suite.results.store import describe, read_unpacked

GRAPHS = "graphs alone"
"""The series of device times: all graphs as chains over all of them with branches."""


def read_proof(path: Path) -> dict[str, Proved]:
    """Read rows that `tests/gpu/concurrency_proof.py` wrote, by workload as reports call it.

    Raises:
        WrongUse: the file cannot be read or has other lines.
    """
    chains: dict[str, int] = {}
    measured: dict[str, dict[str, Any]] = {}
    try:
        for line in read_unpacked(path).splitlines():
            row = json.loads(line)
            label = row_label(*row["workload"].split("/"))
            if row["status"] != "ok":
                continue
            if row["phase"] == "prepare":
                chains[label] = row["reserved_bytes"]
            else:
                measured[label] = row
        return {label: _proved(row, chains.get(label)) for label, row in measured.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongUse(f"{describe(path)} holds no rows of tests/gpu/concurrency_proof.py: {error}") from error


def _proved(row: dict[str, Any], chain_bytes: int | None) -> Proved:
    decisions = row.get("decisions", [])
    return Proved(
        gain=row["times"]["gain"] if "times" in row else None,
        graphs=len(row["recordings"]),
        branched=sum(one["winner"] == "branches" for one in decisions),
        same_bits=row["bits"]["equal"] if "bits" in row else None,
        memory_ratio=row["reserved_bytes"] / chain_bytes if chain_bytes else None,
        device=row.get("run", {}).get("device", "an unknown GPU"),
    )


def make(exhibit: Exhibit, results: Results) -> Made:
    """Show two bars for each workload."""
    published, proved = exhibit.labels(results), results.proved
    further = [one for one in results.labels if one not in published and results.cell(one, LANES_MODE) is not None]
    labels = (*published, *dict.fromkeys([*further, *(one for one in proved if one not in published)]))

    def of_graphs(label: str) -> Value:
        if (found := proved.get(label)) is None:
            return Value(missing=NOT_MEASURED)
        return Value(found.gain) if found.gain is not None else Value(missing="each kernel needs the one before it")

    means = results.means(labels, [LANES_MODE], LEAN_MODE)
    grid = Grid(
        "speedup",
        f"times faster than {LEAN_MODE}, or than chains",
        Scale.RATIO,
        labels,
        (
            ratio_series(results, exhibit.source, LANES_MODE, LEAN_MODE, published=None),
            Series(GRAPHS, of_graphs, column="graphs_alone"),
        ),
        more=lambda label: {name: getattr(proved.get(label), name, None) for name in _MORE},
        note=count_note(means),
        shown=(1 / 2, 2),
    )
    of_chains = {name: mean for name, mean in grid.plain_means().items() if name == GRAPHS}
    gains = [max(1.0, one.gain) for one in proved.values() if one.gain is not None]
    judged = [one.same_bits for one in proved.values() if one.same_bits is not None]
    devices = ", ".join(sorted({one.device for one in proved.values()}))
    points = [
        Point(f"{LANES_MODE} over {LEAN_MODE}", None, results.mean_text(labels, LANES_MODE, LEAN_MODE)),
        Point("these by verdict", None, results.verdicts_text(labels, LANES_MODE, LEAN_MODE)),
        Point(
            "device time of graphs, the chain where it is faster",
            None,
            f"{plain_mean(gains).value:.2f} of {len(gains)}, {devices}" if gains else NOT_MEASURED,
        ),
        Point(
            "workloads with the bits of the chain", None, f"{sum(judged)} of {len(judged)}" if judged else NOT_MEASURED
        ),
    ]
    return make_grid(exhibit, results, grid, points, means | of_chains)


_MORE = ("graphs", "branched", "same_bits", "memory_ratio")
_DIFFERS = (
    f"No paper has this figure. {LANES_MODE}: whole iterations of this mode over {LEAN_MODE}, which has chains. "
    f"{GRAPHS.capitalize()}: device time of all graphs as chains over all of them with branches, in one process, "
    "without an interval (tests/gpu/concurrency_proof.py). Encore keeps the chain where branches are not 3 % faster. "
    "Bits that vary in the chain itself count as its own within the chain's spread."
)

EXHIBITS = (Exhibit("concurrency", "grace", "workloads", "independent kernels at the same time", _DIFFERS, make),)
