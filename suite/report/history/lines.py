"""Arrange the history as a line for each workload: its speed-up at one commit after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from suite.report.history.rows import BASELINES, HistoryRow
from suite.results.errors import WrongUse
from suite.results.stats import MARGIN

if TYPE_CHECKING:
    from rich.table import Table

Speedup = tuple[float, float, float]
"""A speed-up, with the ends of its 95 % interval."""
_MARKS = {-1: "-", 0: " ", 1: "+"}


@dataclass(frozen=True, slots=True)
class HistoryLines:
    """Hold the speed-up of `mode` over `over` on one device: `workloads[name][i]` at `commits[i]`, or None.

    `commits` have the short "commit" and the "date" of its first run, oldest first. Runs of one commit share a column;
    of a workload that several of them have, the newest counts.
    """

    device: str
    mode: str
    over: str
    commits: tuple[dict[str, str], ...]
    workloads: dict[str, tuple[Speedup | None, ...]]


def lines_of(rows: Sequence[HistoryRow], mode: str, over: str, device: str | None, last: int) -> HistoryLines:
    """Arrange rows as lines, over the last so many commits that have any speed-up.

    Raises:
        WrongUse: no row has such a speed-up; the message says which devices and modes there are.
    """
    if over not in BASELINES:
        raise WrongUse(f"--over {over!r} is not a baseline of the history; it has {' and '.join(BASELINES)}")
    known = [row for row in sorted(rows, key=lambda row: row.created_at) if row.ratio(over) is not None]
    modes = list(dict.fromkeys(row.mode for row in known))
    of_mode = [row for row in known if row.mode == mode]
    if not of_mode:
        raise WrongUse(f"--mode {mode!r} has no speed-up over {over} in any run; known: {', '.join(modes) or 'none'}")
    devices = list(dict.fromkeys(row.device for row in of_mode))
    chosen = devices_named(devices, device) if device is not None else [of_mode[-1].device]
    shown = [row for row in of_mode if row.device in chosen]
    dates: dict[str, str] = {}
    for row in shown:
        dates.setdefault(row.commit[:7], row.created_at[:10])
    names = list(dates)[-last:]
    speedups: dict[str, list[Speedup | None]] = {}
    for row in shown:
        if row.commit[:7] in names:
            speedups.setdefault(row.workload, [None] * len(names))[names.index(row.commit[:7])] = row.ratio(over)
    lines = {workload: tuple(speedups[workload]) for workload in sorted(speedups)}
    commits = tuple({"commit": commit, "date": dates[commit]} for commit in names)
    return HistoryLines(", ".join(chosen), mode, over, commits, lines)


def devices_named(devices: Sequence[str], part: str) -> list[str]:
    """Return the one device whose name has this part.

    Raises:
        WrongUse: none has, or several.
    """
    found = [name for name in devices if part.lower() in name.lower()]
    if len(found) != 1:
        raise WrongUse(f"--device {part!r} names {len(found) or 'no'} devices; known: {', '.join(devices)}")
    return found


def direction(before: Speedup | None, now: Speedup | None) -> int:
    """Return 1 if a speed-up rose, -1 if it fell, by intervals that do not meet and more than 3 %; otherwise 0."""
    if before is None or now is None or abs(now[0] / before[0] - 1) <= MARGIN:
        return 0
    return 1 if now[1] > before[2] else -1 if now[2] < before[1] else 0


def directions(line: Sequence[Speedup | None]) -> tuple[int, ...]:
    """Return the `direction` of each speed-up of a line from the last one before it."""
    found, before = [], None
    for now in line:
        found.append(direction(before, now))
        before = now or before
    return tuple(found)


def to_table(history: HistoryLines) -> Table:
    """Make a table for a terminal, one line for each workload."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = (
        f"{history.mode} over {history.over}, times faster, on {history.device}. + and - mark a change beyond 3 % and "
        "beyond both intervals."
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", no_wrap=True)
    for one in history.commits:
        table.add_column(f"{one['commit']}\n{one['date'][5:]}", justify="right", no_wrap=True)
    for workload, line in history.workloads.items():
        marks = (_MARKS[way] for way in directions(line))
        table.add_row(
            workload,
            *(f"{one[0]:.2f}{mark}" if one else "" for one, mark in zip(line, marks, strict=True)),
        )
    return table
