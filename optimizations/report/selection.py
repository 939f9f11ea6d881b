"""Define the record of how the calls of one function run. See `report`."""

from __future__ import annotations

from dataclasses import dataclass

from optimizations.report.recordings import Direction
from optimizations.selection import Decision


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """Tell how calls of one function of Inductor's run, and why.

    Attributes:
        decision: "no graph", "copies" (a graph that copies its inputs) or "in place" (one that reads some where they
            are); None where that is not decided yet, or the function cannot be recorded.
        why: the numbers that decided it, or what is being waited for.
        kernels: kernels of its graph, or of the generated code where none was read; None where neither is known.
        copied_bytes: data that each replay copies; None where no graph was recorded.
        nodes: nodes of the graph that get new addresses when all inputs that are read in place have moved.
        median_us: measured time of each alternative, with `selection="measure"`.
    """

    direction: Direction
    decision: Decision | None
    why: str
    kernels: int | None
    copied_bytes: int | None
    nodes: int
    median_us: tuple[tuple[str, float], ...] = ()
