"""Rows of the script: one per program and mode, as JSON lines; and what they say together."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

BASE, PLAIN, STOCK = "eager", "compile", "stock"
OTHERS = (BASE, PLAIN, STOCK)
"""Modes that are not ours to judge."""

PHASES = {"recording": "while recording", "learning": "while learning", "steady": "in steady state"}
"""Phases of a process: calls that are compared; calls until nothing is pending; calls that are timed. Rows that were
recorded before there was a second phase count it as part of the first."""

DRIFT = 2.0
"""A mode may be this many times as far from eager as stock is, where that is more than the program's tolerance."""


def judged(row: dict[str, Any], tolerance: float, stock: Row | None) -> dict[str, Any]:
    """`row` with its `verdict`: "right" within `tolerance` of eager; "as stock" where it has stock's bits, or is at
    most `DRIFT` times as far from eager as stock; else "wrong". None where there is nothing to judge."""
    error, limit = row.get("error_over_eager"), None
    if row["status"] == "ok" and error is not None:
        limit = stock.get("error_over_eager") if stock and stock["status"] == "ok" else None
        if error <= tolerance:
            row["verdict"] = "right"
        elif row.get("bits_of_stock") or (limit is not None and math.isfinite(limit) and error <= DRIFT * limit):
            row["verdict"] = "as stock"
        else:
            row["verdict"] = "wrong"
    return row


def is_row(row: Row) -> bool:
    return {"program", "mode", "status"} <= row.keys()


def findings(rows: Iterable[Row]) -> list[str]:
    """List failures: results that differ from eager's, missing results, and programs that did not run at all."""
    found = []
    by_key = {(row["program"], row["mode"]): row for row in rows}
    for (program, mode), row in by_key.items():
        base = by_key.get((program, BASE))
        if mode in (PLAIN, STOCK):
            continue
        if mode != BASE and base is not None and base["status"] not in ("ok", "not_run"):
            continue  # the finding is eager's
        if row.get("verdict") == "wrong":
            found.append(
                f"{program}, {mode}: results {float(row['error_over_eager']):.1e} off eager's ({row['worst']})"
            )
        elif row["status"] not in ("ok", "skipped"):
            found.append(f"{program}, {mode}: {row['status']}: {row.get('reason')}")
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a line per program with times, verdict and memory over stock's; what holds for all; reasons."""
    by_program: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_program.setdefault(row["program"], {})[row["mode"]] = row
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    ours = [mode for mode in modes if mode not in OTHERS]
    lines = [["program", *(f"{mode} us" for mode in modes), *(word for _ in ours for word in ("verdict", "memory"))]]
    for program, of in by_program.items():
        lines.append([program, *(_time(of.get(mode)) for mode in modes)])
        for mode in ours:
            memory = (_memory_ratio(of.get(mode), of.get(STOCK), phase) for phase in PHASES)
            lines[-1] += [
                of.get(mode, {}).get("verdict") or "-",
                "/".join(f"{one:.2f}" if one else "-" for one in memory),
            ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    remarks = [
        f"{row['program']}, {row['mode']}: {row['status']}: {row['reason']}" for row in rows if row.get("reason")
    ]
    return "\n".join([*aligned, "", *(line for mode in ours for line in _summary(by_program, mode)), *remarks])


def _summary(by_program: Mapping[str, Mapping[str, Row]], mode: str) -> list[str]:
    """Return lines that say of a mode what memory it takes, and how right it is."""
    lines = []
    for phase, words in PHASES.items():
        ratios = {name: _memory_ratio(of.get(mode), of.get(STOCK), phase) for name, of in by_program.items()}
        if memory := {name: one for name, one in ratios.items() if one}:
            high = max(memory, key=memory.__getitem__)
            lines.append(
                f"{mode}: peak memory reserved {words} {statistics.geometric_mean(memory.values()):.2f} times "
                f"stock's in the geometric mean; highest {memory[high]:.2f} ({high})"
            )
    verdicts = Counter(rows.get(mode, {}).get("verdict") for rows in by_program.values())
    counts = [f"{verdicts[verdict]} {verdict}" for verdict in ("right", "as stock", "wrong") if verdicts[verdict]]
    return [*lines, f"{mode}: {', '.join(counts) or 'nothing to judge'}"]


def _memory_ratio(row: Row | None, stock: Row | None, phase: str) -> float | None:
    if row is None or stock is None or not {phase} <= row.keys() & stock.keys():
        return None
    here, there = (each[phase]["reserved_bytes"] for each in (row, stock))
    return here / there if here and there else None


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['whole_us']:,.0f}" if row["status"] == "ok" else row["status"]
