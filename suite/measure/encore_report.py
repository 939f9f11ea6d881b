"""What Encore says it did with each graph of a cell, as JSON values for the cell's row."""

from __future__ import annotations

import dataclasses
import json

from pydantic import JsonValue

import optimizations


def encore_report() -> list[JsonValue]:
    """`optimizations.report()`, a dictionary per FX graph."""
    records: list[JsonValue] = json.loads(json.dumps([dataclasses.asdict(graph) for graph in optimizations.report()]))
    return records
