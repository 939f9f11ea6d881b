"""Why something is not in a CUDA graph, counted by reason and line of the user's program."""

from __future__ import annotations

from collections import Counter

from optimizations.report import CompiledGraph, LeftOut
from suite.measure.source_line import short_line
from suite.results.schema import NotCaptured


class Reasons:
    """What was left out of CUDA graphs so far. Paths are written the same way on every machine."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str | None]] = Counter()

    def add(self, left_out: LeftOut) -> None:
        line = None if left_out.source_line is None else short_line(left_out.source_line)
        self._counts[left_out.reason, line] += left_out.count

    def add_graph(self, graph: CompiledGraph) -> None:
        """All that is outside of CUDA graphs in one compiled graph."""
        for left_out in (*graph.not_captured, *graph.left_out):
            self.add(left_out)

    def records(self) -> list[NotCaptured]:
        """In the order in which they were first given."""
        return [
            NotCaptured(reason=reason, source_line=line, count=count) for (reason, line), count in self._counts.items()
        ]
