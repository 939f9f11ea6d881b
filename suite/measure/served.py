"""Return how functions are served: what a reader of a later process must know of Encore's report."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from suite.results.schema import ServedFunction

CANDIDATE_OF = {"no graph": "none", "copies": "copy", "in place": "indirection"}
"""The names that rows have for the decisions of `optimizations.selection`."""


def served_functions(report: Sequence[JsonValue] | None) -> list[ServedFunction]:
    """Return a record of each function of each graph in `encore_report()`; none where nothing is selected."""
    found = []
    for graph in report or ():
        functions = graph.get("selection") if isinstance(graph, dict) else None
        for each in functions if isinstance(functions, list) else ():
            if isinstance(each, dict):
                found.append(_served(each))
    return found


def _served(record: dict[str, JsonValue]) -> ServedFunction:
    decision = record["decision"]
    return ServedFunction(
        direction=str(record["direction"]),
        state="waiting" if decision is None else "decided",
        reason=str(record["why"]),
        kept=None if decision is None else CANDIDATE_OF[str(decision)],
        source=None if decision is None else "measured" if record["median_us"] else "rule",
        voided=[],
        calls=0,
    )
