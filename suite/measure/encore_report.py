"""What Encore says it did with each graph of a cell, as JSON values for the cell's row."""

from __future__ import annotations

import dataclasses
import json
import re

from pydantic import JsonValue

import optimizations
from suite.source_line import short_path

_SOURCE_LINE = "source_line"
_PLACE = re.compile(r"(?P<path>.+?)(?P<rest>:\d+ in .*)", re.DOTALL)


def encore_report() -> list[JsonValue]:
    """`optimizations.report()`, a dictionary per FX graph. Paths in source lines are without what is this machine's."""
    records = json.loads(json.dumps([dataclasses.asdict(graph) for graph in optimizations.report()]))
    return [with_short_paths(record) for record in records]


def with_short_paths(value: JsonValue) -> JsonValue:
    """The same JSON value, the path in each `source_line` as `suite.source_line` writes it."""
    if isinstance(value, list):
        return [with_short_paths(one) for one in value]
    if isinstance(value, dict):
        return {
            key: _short(one) if key == _SOURCE_LINE and isinstance(one, str) else with_short_paths(one)
            for key, one in value.items()
        }
    return value


def _short(line: str) -> str:
    place = _PLACE.fullmatch(line)
    return line if place is None else short_path(place["path"]) + place["rest"]
