"""Show the history as a line for each workload, its speed-up at one commit after another: as a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib
import pandas as pd
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from suite.report.chart import INK, STYLE, WIDTH
from suite.report.compare import STOCK_MODES
from suite.results.errors import WrongUse
from suite.results.stats import MARGIN

if TYPE_CHECKING:
    from rich.table import Table

Speedup = tuple[float, float, float]
"""A speed-up, with the ends of its 95 % interval."""
_MARKS = {-1: "-", 0: " ", 1: "+"}
_STRONGEST = (math.log(1.25), math.log(4))
"""Log speed-up with the strongest colour; larger ones have the same colour."""
_DARK = 0.5
"""Fraction of it above which a field is so dark that its number is white."""


@dataclass(frozen=True, slots=True)
class HistoryLines:
    """Hold the speed-up of `mode` over `over` on one device: `workloads[name][i]` at `commits[i]`, or None.

    `commits` have the short "commit" and the "date" of its first run, oldest first. Runs of one commit share a column;
    if several have a workload, the newest counts.
    """

    device: str
    mode: str
    over: str
    commits: tuple[dict[str, str], ...]
    workloads: dict[str, tuple[Speedup | None, ...]]


def lines_of(rows: pd.DataFrame, mode: str, over: str, device: str | None, last: int) -> HistoryLines:
    """Arrange rows as lines, over the last so many commits that have any speed-up.

    Raises:
        WrongUse: no row has such a speed-up; the message names the devices and modes in the history.
    """
    if over not in STOCK_MODES:
        raise WrongUse(f"--over {over!r} is not a baseline of the history; it has {' and '.join(STOCK_MODES)}")
    numbers = [f"over_{over}{end}" for end in ("", "_low", "_high")]
    known = rows.dropna(subset=numbers).sort_values("created_at", kind="stable")
    known["commit"] = known["commit"].str[:7]
    shown = known[known["mode"] == mode]
    if not len(shown):
        modes = ", ".join(known["mode"].unique()) or "none"
        raise WrongUse(f"--mode {mode!r} has no speed-up over {over} in any run; known: {modes}")
    devices = list(shown["device"].unique())
    chosen = devices_named(devices, device) if device is not None else shown["device"].iloc[-1]
    shown = shown[shown["device"] == chosen]
    dates = shown.groupby("commit", sort=False)["created_at"].first().str[:10].tail(last)
    found = {(row.workload, row.commit): tuple(map(float, row[numbers])) for _, row in shown.iterrows()}
    names = sorted({workload for workload, commit in found if commit in dates})
    lines = {name: tuple(found.get((name, commit)) for commit in dates.index) for name in names}
    commits = tuple({"commit": str(commit), "date": date} for commit, date in dates.items())
    return HistoryLines(chosen, mode, over, commits, lines)  # type: ignore[arg-type]


def devices_named(devices: Sequence[str], part: str) -> str:
    """Return the one device whose name has this part.

    Raises:
        WrongUse: none has, or several.
    """
    found = [name for name in devices if part.lower() in name.lower()]
    if len(found) != 1:
        raise WrongUse(f"--device {part!r} names {len(found) or 'no'} devices; known: {', '.join(devices)}")
    return found[0]


def directions(line: Sequence[Speedup | None]) -> tuple[int, ...]:
    """Return for each speed-up of a line 1 if it is higher than the previous one, -1 if it is lower, otherwise 0.

    A change counts if the intervals do not overlap and it is more than 3 %.
    """
    found, before = [], None
    for now in line:
        differs = now is not None and before is not None and abs(now[0] / before[0] - 1) > MARGIN
        found.append(int(now[1] > before[2]) - int(now[2] < before[1]) if differs and now and before else 0)
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


def draw_history(history: HistoryLines) -> Figure:
    """Draw a field for each workload and commit; it is empty where nothing was measured."""
    names, commits = list(history.workloads), history.commits
    logs = [[math.nan if one is None else math.log(one[0]) for one in line] for line in history.workloads.values()]
    most = min(max(_STRONGEST[0], *(abs(log) for line in logs for log in line if log == log)), _STRONGEST[1])
    with matplotlib.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(max(WIDTH, 2.2 + 0.72 * len(commits)), 1.8 + 0.24 * len(names)), layout="constrained")
        axis = figure.subplots()
        colours = matplotlib.colormaps["PuOr"]
        axis.imshow(logs, aspect="auto", cmap=colours, norm=TwoSlopeNorm(0, -most, most), interpolation="nearest")
        for row, line in enumerate(history.workloads.values()):
            for column, (one, way) in enumerate(zip(line, directions(line), strict=True)):
                if one is not None:
                    colour = "white" if abs(math.log(one[0])) > _DARK * most else INK
                    text = f"{one[0]:.2f}{_MARKS[way].strip()}"
                    axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        axis.set_yticks(range(len(names)), names)
        axis.set_xticks(range(len(commits)), [f"{one['commit']}\n{one['date'][5:]}" for one in commits])
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        axis.set_title(f"{history.mode} over {history.over}, times faster, by commit\n{history.device}", loc="left")
        axis.set_xlabel(
            f"purple: faster than {history.over}, orange: slower, white: not measured\n"
            f"+ and -: differs from the value before by more than 3 % and beyond both intervals",
            loc="left",
        )
    return figure
