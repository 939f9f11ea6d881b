"""A comparison as Markdown, as JSON, and for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import JsonValue

from suite.compare.pairs import Comparison, Pair, PairKind
from suite.report.units import NOTHING, format_value

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = ("workload", "mode", "BASE (µs)", "NEW (µs)", "times faster", "verdict", "floor", "remarks")
_SHOWN_DIFFERENCES = 20
_Table = tuple[str, Sequence[Sequence[str]], Sequence[str]]


def headline(comparison: Comparison) -> str:
    """One sentence: how many cells were compared, and how many are worse."""
    compared = sum(1 for pair in comparison.pairs if pair.ratio is not None)
    left = sum(1 for pair in comparison.pairs if pair.outcome is PairKind.NOT_COMPARABLE)
    found = len(comparison.regressions)
    other = sum(1 for pair in comparison.pairs if pair.outcome is PairKind.OTHER_KERNELS)
    words = f"{found} regression{'s' * (found != 1)} beyond {comparison.threshold:.0%}"
    return f"{compared} cells measured in both, {other} of them with other kernels, {left} not comparable, {words}"


def to_json(comparison: Comparison) -> dict[str, JsonValue]:
    """Everything, with raw numbers. An open end of an interval is null."""
    return {
        "base": comparison.base,
        "new": comparison.new,
        "metric": comparison.metric.value,
        "threshold": comparison.threshold,
        "differences": [{"what": each.what, "base": each.base, "new": each.new} for each in comparison.differences],
        "remarks": list(comparison.remarks),
        "cells": [_pair_json(pair) for pair in comparison.pairs],
        "geomeans": [
            {"mode": modes, "ratio": mean.value, "low": mean.low, "high": mean.high, "count": mean.count}
            for modes, mean in comparison.geomeans.items()
        ],
        "regressions": [f"{pair.label} {pair.modes}" for pair in comparison.regressions],
    }


def _pair_json(pair: Pair) -> dict[str, JsonValue]:
    ratio = pair.ratio
    return {
        "workload": pair.label,
        "base_mode": pair.base_mode,
        "new_mode": pair.new_mode,
        "outcome": pair.outcome.value,
        "ratio": ratio.value if ratio else None,
        "low": ratio.low if ratio else None,
        "high": ratio.high if ratio and math.isfinite(ratio.high) else None,
        "floor": pair.floor,
        "verdict": pair.verdict.value if pair.verdict else None,
        "base_us": pair.base_us,
        "new_us": pair.new_us,
        "reason": pair.reason,
        "kernels": pair.kernels.value if pair.kernels else None,
        "remarks": list(pair.remarks),
    }


def to_markdown(comparison: Comparison) -> str:
    """A page of it: what differs around the runs first, then remarks, cells, means, and what cannot be compared."""
    lines = [f"# {comparison.base} and {comparison.new}", "", f"{headline(comparison)}.", ""]
    lines += [f"By {comparison.metric.value}; ratios above 1 mean that NEW is faster.", ""]
    lines += ["## What differs around them", ""]
    if comparison.differences:
        lines += _table(("", "BASE", "NEW"), [(each.what, each.base, each.new) for each in comparison.differences])
    else:
        lines += ["Nothing that was recorded."]
    lines += ["", *(f"- {remark}" for remark in comparison.remarks)]
    for title, rows, columns in _tables(comparison):
        lines += ["", f"## {title}", "", *_table(columns, rows)]
    return "\n".join(lines) + "\n"


def print_terminal(comparison: Comparison, console: Console) -> None:
    """The same for a terminal, the longest list of differences cut."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = [Text(f"BASE {comparison.base}, NEW {comparison.new}, by {comparison.metric.value}")]
    for each in comparison.differences[:_SHOWN_DIFFERENCES]:
        parts.append(Text(f"differs: {each.what}: {each.base} in BASE, {each.new} in NEW"))
    if (more := len(comparison.differences) - _SHOWN_DIFFERENCES) > 0:
        parts.append(Text(f"differs: {more} more; --json has all"))
    parts += [Text(remark) for remark in comparison.remarks]
    for title, rows, columns in _tables(comparison):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for place, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=place in (0, 4, 5))
        for row in rows:
            table.add_row(*(Text(text) for text in row))
        parts.append(table)
    for part in (*parts, Text(headline(comparison))):
        console.print(part, soft_wrap=isinstance(part, Text))


def _tables(comparison: Comparison) -> list[_Table]:
    """(title, rows, columns) of the tables that have rows."""
    compared = [_row(pair) for pair in comparison.pairs if pair.ratio is not None]
    means = [
        (modes, f"{mean.value:.3f} [{mean.low:.3f}, {_end(mean.high)}]", str(mean.count))
        for modes, mean in comparison.geomeans.items()
    ]
    failed = [(pair.label, pair.modes, pair.reason or "") for pair in comparison.regressions if pair.ratio is None]
    reasons: dict[tuple[str, str], list[str]] = {}
    for pair in comparison.pairs:
        if pair.outcome is PairKind.NOT_COMPARABLE:
            reasons.setdefault((pair.label, pair.reason or ""), []).append(pair.modes)
    left = [(label, ", ".join(modes), reason) for (label, reason), modes in reasons.items()]
    found: list[_Table] = [
        ("Cells", compared, _COLUMNS),
        ("Geometric means", means, ("mode", "times faster", "workloads")),
        ("Passed in BASE, fail in NEW", failed, ("workload", "mode", "what")),
        ("Not comparable", left, ("workload", "mode", "why")),
    ]
    return [each for each in found if each[1]]


def _row(pair: Pair) -> tuple[str, ...]:
    ratio = pair.ratio
    verdict = pair.verdict.value if pair.verdict else pair.outcome.value
    return (
        pair.label,
        pair.modes,
        format_value("base_us", pair.base_us),
        format_value("new_us", pair.new_us),
        f"{ratio.value:.3f} [{ratio.low:.3f}, {_end(ratio.high)}]" if ratio else NOTHING,
        f"{verdict}, regression" if pair.outcome is PairKind.REGRESSION else verdict,
        NOTHING if pair.floor is None else f"{pair.floor:.1%}",
        "; ".join(pair.remarks),
    )


def _end(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "∞"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows)]


def _line(texts: Sequence[str]) -> str:
    shown = (text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|") for text in texts)
    return f"| {' | '.join(' '.join(text.split()) for text in shown)} |"
