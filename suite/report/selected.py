"""Read the chosen variant of each function from `Metrics.encore_report` in rows of a run.

Rows of Encore 0.1 have different fields: there selection timed each candidate, for groups of functions that run
together. With `selection="measure"` newer rows have times as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from suite.results.schema import Cell, Status

CANDIDATE_OF = {"no graph": "none", "copies": "copy", "in place": "indirection"}
"""The names that rows of Encore 0.1 have for the decisions of `optimizations.selection`."""


@dataclass(frozen=True, slots=True)
class SelectedFunction:
    """Describe a function of which graphs are recorded.

    Attributes:
        group: the group of functions that were timed together.
        kept: "none" (no graph), "copy" or "indirection"; None if undecided.
        median_us: time of an iteration by candidate, of those that were timed.
    """

    group: int
    kept: str | None
    median_us: Mapping[str, float]

    def gain(self, candidate: str | None) -> float | None:
        """Return the speed-up of the candidate over no graph; None if either was not timed."""
        without, own = self.median_us.get("none"), self.median_us.get(candidate or "")
        return without / own if without and own else None


def selected_functions(cell: Cell | None) -> Iterator[SelectedFunction]:
    """Yield the functions of a cell that passed, in the order of its report; none where nothing was selected."""
    if cell is None or cell.status is not Status.PASS or cell.metrics is None:
        return
    reports: list[Any] = cell.metrics.encore_report or []
    records = [record for graph in reports for record in graph.get("selection") or ()]
    for number, record in enumerate(records):
        if "decision" in record:
            found = {CANDIDATE_OF[name]: time for name, time in record["median_us"]}
            yield SelectedFunction(number, CANDIDATE_OF.get(record["decision"]), found)
        elif "candidates" in record and isinstance(record.get("group"), int):
            found = {one["candidate"]: one["median_us"] for one in record["candidates"] if one["median_us"]}
            yield SelectedFunction(record["group"], record["kept"], found)


def judged_groups(cell: Cell | None) -> list[SelectedFunction]:
    """Return the first function of each group of a cell: all functions of a group have its times."""
    groups: dict[int, SelectedFunction] = {}
    for function in selected_functions(cell):
        groups.setdefault(function.group, function)
    return list(groups.values())
