"""Print numbers: the unit is read off the column's name, as everywhere in Encore (`host_us`, `copied_bytes`).

Bytes are printed by `optimizations.byte_units`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from optimizations.byte_units import format_bytes

NOTHING = "\N{EN DASH}"
"""Printed where nothing was measured."""

_RATIO_NAMES = ("speedup", "low", "high", "ratio")
_UNITS = {"us": "µs", "ms": "ms", "s": "s", "percent": "%", "mhz": "MHz", "w": "W", "c": "°C"}
_PROPER_NAMES = {"fx": "FX", "cuda": "CUDA"}


def is_missing(value: object) -> bool:
    """Return whether a table cell holds nothing: None, or the NaN or NA that pandas puts in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or str(value) == "<NA>"


def format_value(column: str, value: object) -> str:
    """Return the text of one table cell, by the unit in the column's name."""
    if is_missing(value):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if math.isinf(value):
        return "∞"
    if column.endswith("_bytes"):
        return format_bytes(value)
    if column.endswith("_percent"):
        return f"{value:.2f}"
    if column.split("_")[-1] in _RATIO_NAMES:
        return f"{value:.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_heading(column: str) -> str:
    """Write a column's name as a heading, the unit in brackets: "host_us" -> "host (µs)", "cuda_graphs" -> "CUDA
    graphs"."""
    *words, last = column.split("_")
    unit = _UNITS.get(last) if words else None
    shown = [_PROPER_NAMES.get(word, word) for word in (words if unit else [*words, last])]
    return f"{' '.join(shown)} ({unit})" if unit else " ".join(shown)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with every text shown as it is."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(map(escape, texts))} |" for texts in lines]


def escape(text: str) -> str:
    """Return text that Markdown shows as it is: no cell border, no line break, no HTML."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())
