"""What selection found in the cells of a run: the records of `optimizations.report()` as rows hold them, read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import JsonValue, TypeAdapter, ValidationError

from optimizations.report.selection import SelectionReport
from suite.schema import Cell, Status

CANDIDATES = ("none", "copy", "indirection")
"""Ways to serve a call, simplest first."""

_REPORT = TypeAdapter(SelectionReport)


@dataclass(frozen=True, slots=True)
class SelectedFunction:
    """A function that graphs are recorded of: `graph` is the index of its FX graph in the cell."""

    graph: int
    selection: SelectionReport


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """Functions of a cell that were judged together.

    Attributes:
        functions: how many there are.
        kept: how they are served; None where that was not decided.
        median_us: median time of an iteration by candidate.
        excess_s: what measuring took beyond the fastest candidate.
    """

    functions: int
    kept: str | None
    median_us: dict[str, float]
    excess_s: float

    def gain(self, candidate: str) -> float | None:
        """How many times faster the candidate is than no graph; None where either was not measured."""
        without, own = self.median_us.get("none"), self.median_us.get(candidate)
        return without / own if without and own else None


def selected_functions(cell: Cell) -> Iterator[SelectedFunction]:
    """Those of a cell that passed, in the order of its report; none where nothing was selected."""
    if cell.status is not Status.PASS or cell.metrics is None:
        return
    for graph in cell.metrics.encore_report or ():
        records = graph.get("selection") if isinstance(graph, dict) else None
        for record in records if isinstance(records, list) else ():
            found = _read(record)
            if found is not None and isinstance(graph, dict):
                index = graph.get("index")
                yield SelectedFunction(index if isinstance(index, int) else 0, found)


def judged_groups(cell: Cell) -> list[JudgedGroup]:
    """The groups of a cell."""
    groups: dict[int, list[SelectionReport]] = {}
    for function in selected_functions(cell):
        groups.setdefault(function.selection.group, []).append(function.selection)
    return [_judged(members) for members in groups.values()]


def _judged(members: Iterable[SelectionReport]) -> JudgedGroup:
    functions = list(members)
    first = functions[0]
    times = {one.candidate: one.median_us for one in first.candidates if one.median_us is not None}
    return JudgedGroup(len(functions), first.kept, times, first.excess_s)


def _read(record: JsonValue) -> SelectionReport | None:
    """A record; None where another version wrote it."""
    try:
        return _REPORT.validate_python(record)
    except ValidationError:
        return None
