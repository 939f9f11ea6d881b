"""Draw the history: workloads by commits, with the speed-up in every field."""

from __future__ import annotations

import math

import matplotlib
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from suite.report.chart import INK, STYLE, WIDTH
from suite.report.history.lines import HistoryLines, directions

_STRONGEST = (math.log(1.25), math.log(4))
"""Log speed-up with the strongest colour; larger ones have the same colour."""
_DARK = 0.5
"""Fraction of it above which a field is so dark that its number is white."""
_MARKS = {-1: "\N{BLACK DOWN-POINTING TRIANGLE}", 0: "", 1: "\N{BLACK UP-POINTING TRIANGLE}"}


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
                    text = f"{one[0]:.2f}{_MARKS[way]}"
                    axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        axis.set_yticks(range(len(names)), names)
        axis.set_xticks(range(len(commits)), [f"{one['commit']}\n{one['date'][5:]}" for one in commits])
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        axis.set_title(f"{history.mode} over {history.over}, times faster, by commit\n{history.device}", loc="left")
        axis.set_xlabel(
            f"purple: faster than {history.over}, orange: slower, white: not measured\n"
            f"{_MARKS[1]} {_MARKS[-1]}: differs from the value before by more than 3 % and beyond both intervals",
            loc="left",
        )
    return figure
