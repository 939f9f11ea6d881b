"""How numbers are printed: the unit is read off the column's name, as everywhere in Encore (`host_us`, `copied_bytes`).

Byte units are binary (1 KB = 1024 B), as in the papers.
"""

from __future__ import annotations

import math
import re

NOTHING = "\N{EN DASH}"
"""Printed where nothing was measured."""

_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB")
_RATIO_NAMES = ("speedup", "low", "high", "ratio")
_UNITS = {"us": "µs", "s": "s", "percent": "%", "mhz": "MHz", "w": "W", "c": "°C"}
_PROPER_NAMES = {"grace": "GraCE", "pygraph": "PyGraph", "fx": "FX", "cpu": "CPU", "cuda": "CUDA", "sm": "SM"}
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")


def format_bytes(count: float) -> str:
    """Bytes with a binary unit and one decimal, as the papers print them: 8192 -> "8.0 KB"; below 1 KB "16 B"."""
    scaled = float(count)
    for unit in _BYTE_UNITS:
        if abs(scaled) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.1f} {unit}"


def parse_bytes(text: str) -> int:
    """The inverse of `format_bytes`, as exact as the printed digits: "8.0 KB" -> 8192.

    Raises:
        ValueError: the text is no number followed by one of B, KB, MB, GB, TB.
    """
    number, _, unit = text.partition(" ")
    if unit not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is no byte count; expected a number and one of {', '.join(_BYTE_UNITS)}")
    return round(float(number) * 1024 ** _BYTE_UNITS.index(unit))


def is_missing(value: object) -> bool:
    """Whether a table cell holds nothing: None, or the NaN or NA that pandas puts in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or str(value) == "<NA>"


def format_value(column: str, value: object) -> str:
    """The text of one table cell, by the unit in the column's name."""
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


def sort_key(value: object) -> float | None:
    """The number a cell is sorted by: itself, or the one its text begins with; None where it is plain text."""
    if is_missing(value):
        return None
    if isinstance(value, int | float):
        return float(value)
    leading = _NUMBER.match(str(value))
    return float(leading.group().replace(",", "")) if leading else None


def format_heading(column: str) -> str:
    """A column's name as a heading, the unit in brackets: "host_us" -> "host (µs)", "cuda_graphs" -> "CUDA graphs"."""
    *words, last = column.split("_")
    unit = _UNITS.get(last) if words else None
    shown = [_PROPER_NAMES.get(word, word) for word in (words if unit else [*words, last])]
    return f"{' '.join(shown)} ({unit})" if unit else " ".join(shown)
