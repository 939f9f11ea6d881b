"""Show GraCE's and PyGraph's Table 1: the workloads, as published and as this suite has them."""

from __future__ import annotations

from models import registry
from suite.report.paper.exhibit import Exhibit, Made, Point, Results

_DIFFERS = (
    "Models are built with random weights from the libraries of today, or written for the suite; inputs are drawn from "
    "a seed. Where a library changed a program, the variant published keeps the published one."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Return one row per published workload, with whether the run has it, if there is a run."""
    known = registry.workloads()
    rows = []
    for label in exhibit.labels(results):
        paper, here = results.published.workloads[exhibit.source][label], known.get(label)
        differs = [name for name in ("name", "task", "batch") if getattr(here, name, None) != getattr(paper, name)]
        row: dict[str, object] = {"workload": label}
        row |= {name: getattr(here, name, None) for name in ("name", "suite", "task", "batch")}
        row |= {f"published_{name}": getattr(paper, name) for name in ("name", "task", "batch")}
        row["parameters"] = here and here.parameters
        row["differs"] = (", ".join(differs) or "nothing listed") if here else "not in the suite"
        rows.append(row | ({"measured": label in results.labels} if results.run is not None else {}))
    there = sum(row["differs"] == "nothing listed" for row in rows)
    measured = f"{there} in the suite, {sum(bool(row.get('measured')) for row in rows)} measured"
    origin = results.provenance(exhibit.labels(results))
    return Made(exhibit.table(results, rows), None, origin, (Point("workloads", len(rows), measured),))


EXHIBITS = (
    Exhibit("table1", "grace", "Table 1", "workloads", _DIFFERS, make, needs_runs=False),
    Exhibit("pygraph-table1", "pygraph", "Table 1", "workloads", _DIFFERS, make, needs_runs=False),
)
