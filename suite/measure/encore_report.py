"""Return Encore's report on each graph of a cell, as JSON values for the cell's row.

Texts contain no path of this machine: source lines and Inductor's messages are written by `suite.measure.source_line`.
"""

from __future__ import annotations

import dataclasses
import json

from pydantic import JsonValue

import optimizations
from suite.measure.environment import without_paths
from suite.measure.source_line import reason_and_line, short_line

_SOURCE_LINE = "source_line"


def encore_report() -> list[JsonValue]:
    """Return `optimizations.report()`, a dictionary per FX graph.

    The order of launches is left out: it is large, and `encore draw graph` gives it.
    """
    records = json.loads(json.dumps([dataclasses.asdict(graph) for graph in optimizations.report()]))
    for recording in (one for record in records for one in record["recordings"] if one["concurrency"] is not None):
        del recording["concurrency"]["order"]
    return [with_short_paths(record) for record in records]


def graphs_wait_for_memory() -> str | None:
    """Return the reason if one of Encore's graphs waits for memory in this process."""
    every = (one for graph in optimizations.report() for one in graph.recordings)
    return next((one.waiting for one in every if one.waits_for_memory), None)


def with_short_paths(value: JsonValue) -> JsonValue:
    """Return the same JSON value without paths of this machine."""
    match value:
        case str():
            return without_paths(_said(value))
        case list():
            return [with_short_paths(one) for one in value]
        case dict():
            return {
                key: short_line(one) if key == _SOURCE_LINE and isinstance(one, str) else with_short_paths(one)
                for key, one in value.items()
            }
        case _:
            return value


def _said(text: str) -> str:
    """Return the first part of a message of Inductor's that ends with a stack trace, and the user's line."""
    reason, line = reason_and_line(text)
    return text if line is None else f"{reason} [{line}]"
