"""Show GraCE's and PyGraph's Table 1: the workloads, as published and as this suite has them."""

from __future__ import annotations

from models import registry
from suite.report.paper.exhibit import Exhibit, Made, Point, Results, labels_of
from suite.report.table import make_table

_COLUMNS = (
    "workload", "name", "suite", "task", "batch", "published_name", "published_task", "published_batch", "parameters",
    "differs", "measured",
)  # fmt: skip
_DIFFERS = (
    "Models are built with random weights from the libraries of today, or written for the suite; inputs are drawn from "
    "a seed. Where a library changed a program, the variant published keeps the published one."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Return one row per published workload, with whether the run has it, if there is a run."""
    known = registry.workloads()
    rows = []
    for label in labels_of(results, exhibit.source):
        paper = results.published.workloads[exhibit.source][label]
        row: dict[str, object] = {
            "workload": label,
            "published_name": paper.name,
            "published_task": paper.task,
            "published_batch": paper.batch,
        }
        if label in known:
            here = known[label]
            pairs = (
                ("name", here.name, paper.name),
                ("task", here.task, paper.task),
                ("batch", here.batch, paper.batch),
            )
            row |= {
                "name": here.name,
                "suite": here.suite,
                "task": here.task,
                "batch": here.batch,
                "parameters": here.parameters,
                "differs": ", ".join(name for name, ours, theirs in pairs if ours != theirs) or "nothing listed",
            }
        else:
            row["differs"] = "not in the suite"
        if results.run is not None:
            row["measured"] = label in results.run.labels
        rows.append(row)
    title = exhibit.title(results.published)
    columns = _COLUMNS if results.run is not None else _COLUMNS[:-1]
    table = make_table(exhibit.stem, title, exhibit.differs, columns, rows)
    there = sum(row["differs"] == "nothing listed" for row in rows)
    point = Point(
        "workloads", len(rows), f"{there} in the suite, {sum(bool(row.get('measured')) for row in rows)} measured"
    )
    return Made(table, None, results.provenance(labels_of(results, exhibit.source)), (point,))


EXHIBITS = (
    Exhibit("table1", "grace", "Table 1", "workloads", _DIFFERS, make, needs_runs=False),
    Exhibit("pygraph-table1", "pygraph", "Table 1", "workloads", _DIFFERS, make, needs_runs=False),
)
