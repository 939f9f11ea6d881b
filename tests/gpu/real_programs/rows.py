"""Rows of the script: one per program and mode, as JSON lines; and what they say together."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def ratio(row: Row | None, reference: Row | None) -> float | None:
    """Return how many times faster `row` is than `reference` per call: the median over rounds they both had."""
    if row is None or reference is None or row["status"] != "ok" or reference["status"] != "ok":
        return None
    turns = list(zip(reference["turns_us"], row["turns_us"], strict=False))
    return statistics.median(there / here for there, here in turns) if turns else None


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a line per program, and below it what holds for all of them."""
    by_program: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_program.setdefault(row["program"], {})[row["mode"]] = row
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    ours = [mode for mode in modes if mode not in OTHERS]
    lines = [["program", *(f"{mode} us" for mode in modes)]]
    for mode in ours:
        lines[0] += [f"{mode}/stock", f"{mode}/eager", "verdict", "stock's bits", "captures (timed)", "kept", "memory"]
    for program, of in by_program.items():
        lines.append([program, *(_time(of.get(mode)) for mode in modes)])
        for mode in ours:
            lines[-1] += _cells(of.get(mode, {"status": "-"}), of.get(STOCK), of.get(BASE))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    remarks = [
        f"{row['program']}, {row['mode']}: {row['status']}: {row['reason']}" for row in rows if row.get("reason")
    ]
    return "\n".join([*text, "", *(line for mode in ours for line in _summary(by_program, mode)), *remarks])


def _cells(row: Row, stock: Row | None, base: Row | None) -> list[str]:
    """Return what a program's line says of one of our modes."""
    captures = f"{row['captures']} ({row['captures_while_timed']})" if row["status"] == "ok" else "-"
    return [
        _number(ratio(row, stock)),
        _number(ratio(row, base)),
        row.get("verdict") or "-",
        {True: "yes", False: "no"}.get(row.get("bits_of_stock"), "-"),
        captures,
        str((row.get("encore") or {}).get("kept_results", "-")),
        "/".join(_number(_memory_ratio(row, stock, phase)) for phase in PHASES),
    ]


def _summary(by_program: Mapping[str, Mapping[str, Row]], mode: str) -> list[str]:
    """Return lines that say of a mode how fast it is, what memory it takes, and how right it is."""

    def known(of: Callable[[Row, Row], float | None]) -> dict[str, float]:
        pairs = {name: (rows.get(mode), rows.get(STOCK)) for name, rows in by_program.items()}
        return {name: value for name, (row, stock) in pairs.items() if row and stock and (value := of(row, stock))}

    lines = []
    if speeds := known(ratio):
        low = min(speeds, key=speeds.__getitem__)
        lines.append(
            f"{mode}: {statistics.geometric_mean(speeds.values()):.2f} times as fast as stock in the geometric mean "
            f"of {len(speeds)} programs; lowest {speeds[low]:.2f} ({low}); "
            f"below 0.95: {sum(value < 0.95 for value in speeds.values())}"
        )
    for phase, words in PHASES.items():
        if memory := known(lambda row, stock: _memory_ratio(row, stock, phase)):  # noqa: B023, called at once
            high = max(memory, key=memory.__getitem__)
            lines.append(
                f"{mode}: peak memory reserved {words} {statistics.geometric_mean(memory.values()):.2f} times "
                f"stock's in the geometric mean; highest {memory[high]:.2f} ({high})"
            )
    alone = [
        name
        for name, rows in by_program.items()
        if rows.get(mode, {}).get("status") == "ok"
        and rows.get(STOCK, {"status": "ok"})["status"] not in ("ok", "not_run")
    ]
    if alone:
        lines.append(f"{mode} runs what stock does not: {', '.join(alone)}")
    verdicts = Counter(rows.get(mode, {}).get("verdict") for rows in by_program.values())
    counts = [f"{verdicts[verdict]} {verdict}" for verdict in ("right", "as stock", "wrong") if verdicts[verdict]]
    return [*lines, f"{mode}: {', '.join(counts) or 'nothing to judge'}"]


def _memory_ratio(row: Row, stock: Row | None, phase: str) -> float | None:
    if stock is None or row["status"] != "ok" or stock["status"] != "ok" or not {phase} <= row.keys() & stock.keys():
        return None
    here, there = (each[phase]["reserved_bytes"] for each in (row, stock))
    return here / there if here and there else None


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['whole_us']:,.0f}" if row["status"] == "ok" else row["status"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
