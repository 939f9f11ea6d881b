"""Read from `Metrics.encore_report` how calls of each function are served, as rows of a run have it.

Records are read by their fields alone, so that rows of other versions of Encore are read as far as they go: until
0.2.0 selection timed each way to serve calls, and rows have its times.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from suite.measure.served import CANDIDATE_OF
from suite.results.schema import Cell, Status

CANDIDATES = ("none", "copy", "indirection")
"""Ways to serve a call, simplest first: without a graph, by one whose inputs are copied, by one that reads them in
place."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CandidateTime(_Stored):
    """Hold a way to serve calls, with the median time of an iteration if it was timed."""

    candidate: str
    median_us: float | None = None


class SelectedFunction(_Stored):
    """Hold a function that graphs are recorded of. `kept` is None where the way is not decided; functions of one
    `group` were judged together, and `excess_s` is what timing them took beyond the fastest way."""

    graph: int = 0
    group: int = 0
    direction: str | None = None
    kernels: int | None = None
    copied_bytes: int | None = None
    kept: str | None = None
    candidates: tuple[CandidateTime, ...] = ()
    excess_s: float = 0.0
    reason: str | None = None

    @property
    def median_us(self) -> dict[str, float]:
        """Return the median time of an iteration by way, of those that were timed."""
        return {one.candidate: one.median_us for one in self.candidates if one.median_us is not None}

    def gain(self, candidate: str) -> float | None:
        """Return how many times faster the way is than no graph; None where either was not timed."""
        without, own = self.median_us.get("none"), self.median_us.get(candidate)
        return without / own if without and own else None


def selected_functions(cell: Cell | None) -> Iterator[SelectedFunction]:
    """Yield the functions of a cell that passed, in the order of its report; none where nothing was selected."""
    if cell is None or cell.status is not Status.PASS or cell.metrics is None:
        return
    number = 0
    for graph in cell.metrics.encore_report or ():
        records = graph.get("selection") if isinstance(graph, dict) else None
        for record in records if isinstance(records, list) else ():
            number += 1
            if isinstance(graph, dict) and (found := _read(record, graph.get("index"), number)) is not None:
                yield found


def judged_groups(cell: Cell | None) -> list[SelectedFunction]:
    """Return the first function of each group of a cell: all functions of a group have its times."""
    groups: dict[int, SelectedFunction] = {}
    for function in selected_functions(cell):
        groups.setdefault(function.group, function)
    return list(groups.values())


def _read(record: JsonValue, graph: JsonValue, number: int) -> SelectedFunction | None:
    """Return a record, of a function with this number; None where it does not say how calls are served."""
    if isinstance(record, dict) and "decision" in record:
        record = {**record, **_as_before(record), "group": number}
    if not isinstance(record, dict) or "kept" not in record or "candidates" not in record:
        return None
    try:
        return SelectedFunction.model_validate({**record, "graph": graph if isinstance(graph, int) else 0})
    except ValidationError:
        return None


def _as_before(record: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return fields of a `SelectionReport` as rows from before 0.2.0 have them."""
    times = record.get("median_us")
    return {
        "kept": CANDIDATE_OF.get(str(record["decision"])),
        "candidates": [
            {"candidate": CANDIDATE_OF.get(str(one[0]), ""), "median_us": one[1]}
            for one in (times if isinstance(times, list) else ())
            if isinstance(one, list) and len(one) == 2
        ],
        "reason": record.get("why"),
    }
