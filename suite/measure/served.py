"""How selection serves functions, in short: of Encore's report what a reader of a later process must know."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from suite.schema import ServedFunction


def served_functions(report: Sequence[JsonValue] | None) -> list[ServedFunction]:
    """Of each function of each graph in `encore_report()`; none where there is no report, or nothing is selected."""
    found = []
    for graph in report or ():
        functions = graph.get("selection") if isinstance(graph, dict) else None
        for each in functions if isinstance(functions, list) else ():
            if isinstance(each, dict):
                found.append(ServedFunction.model_validate({name: each[name] for name in ServedFunction.model_fields}))
    return found
