"""Rows of the script: one per program and mode, as JSON lines; and what they say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.row_files import read_rows

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


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Raises ValueError naming the line that is no row."""
    return read_rows(path, lambda row: {"program", "mode", "status"} <= row.keys())


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
    by_key = {(row["program"], row["mode"]): row for row in rows}
    programs = list(dict.fromkeys(row["program"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    ours = [mode for mode in modes if mode not in OTHERS]
    lines = [["program", *(f"{mode} us" for mode in modes)]]
    for mode in ours:
        lines[0] += [f"{mode}/stock", f"{mode}/eager", "verdict", "stock's bits", "captures (timed)", "kept", "memory"]
    for program in programs:
        got = {mode: by_key.get((program, mode)) for mode in modes}
        line = [program, *(_time(got[mode]) for mode in modes)]
        for mode in ours:
            row, stock = got[mode], got.get(STOCK)
            told = (row or {}).get("encore") or {}
            line += [
                _number(ratio(row, stock)),
                _number(ratio(row, got.get(BASE))),
                (row or {}).get("verdict") or "-",
                {True: "yes", False: "no"}.get((row or {}).get("bits_of_stock"), "-"),
                f"{row['captures']} ({row['captures_while_timed']})" if row and row["status"] == "ok" else "-",
                str(told.get("kept_results", "-")),
                "/".join(_number(_memory_ratio(row, stock, phase)) for phase in PHASES),
            ]
        lines.append(line)
    return "\n".join([*_drawn(lines), "", *_summary(by_key, programs, ours), *_remarks(rows)])


def _drawn(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _summary(by_key: Mapping[tuple[str, str], Row], programs: Sequence[str], ours: Sequence[str]) -> list[str]:
    lines = []
    for mode in ours:
        ratios = {program: ratio(by_key.get((program, mode)), by_key.get((program, STOCK))) for program in programs}
        known = {program: value for program, value in ratios.items() if value is not None}
        if known:
            low = min(known, key=lambda program: known[program])
            lines.append(
                f"{mode}: {statistics.geometric_mean(known.values()):.2f} times as fast as stock in the geometric mean "
                f"of {len(known)} programs; lowest {known[low]:.2f} ({low}); "
                f"below 0.95: {sum(value < 0.95 for value in known.values())}"
            )
        for phase, words in PHASES.items():
            memory = {
                program: value
                for program in programs
                if (value := _memory_ratio(by_key.get((program, mode)), by_key.get((program, STOCK)), phase))
            }
            if memory:
                high = max(memory, key=lambda program: memory[program])
                lines.append(
                    f"{mode}: peak memory reserved {words} {statistics.geometric_mean(memory.values()):.2f} times "
                    f"stock's in the geometric mean; highest {memory[high]:.2f} ({high})"
                )
        only = [
            program
            for program in programs
            if (by_key.get((program, mode)) or {"status": ""})["status"] == "ok"
            and (by_key.get((program, STOCK)) or {"status": "ok"})["status"] not in ("ok", "not_run")
        ]
        if only:
            lines.append(f"{mode} runs what stock does not: {', '.join(only)}")
        verdicts = [row.get("verdict") for (_, its), row in by_key.items() if its == mode and row.get("verdict")]
        counts = ", ".join(
            f"{verdicts.count(verdict)} {verdict}" for verdict in ("right", "as stock", "wrong") if verdict in verdicts
        )
        lines.append(f"{mode}: {counts or 'nothing to judge'}")
    return lines


def _remarks(rows: Sequence[Row]) -> list[str]:
    return [f"{row['program']}, {row['mode']}: {row['status']}: {row['reason']}" for row in rows if row.get("reason")]


def _memory_ratio(row: Row | None, stock: Row | None, phase: str) -> float | None:
    if row is None or stock is None or row["status"] != "ok" or stock["status"] != "ok":
        return None
    if phase not in row or phase not in stock:
        return None
    here, there = (each[phase]["reserved_bytes"] for each in (row, stock))
    return here / there if here and there else None


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['whole_us']:,.0f}" if row["status"] == "ok" else row["status"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
