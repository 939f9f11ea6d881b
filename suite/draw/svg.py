"""Write a graph's branches as an SVG: a row for each branch, time from left to right, the longest path outlined.

The file stands alone: no script, no font, no link. Below the branches it names the longest path by kernel and line.
"""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from optimizations.report.concurrency import OrderedLaunch
from suite.draw.text import longest_path, printable, summary
from suite.draw.timeline import DrawnGraph, Timeline
from suite.report.chart import INK, STYLE, to_svg

WIDTH, ROW, LINE = 16.0, 0.24, 0.17
"""Inches of the figure, of a branch and of a line of text."""
BAR = 0.72
"""Height of a bar as a share of its row."""
_CHARACTERS = 230
"""Characters of the names in bars that fit next to each other."""
_PATH_CHARACTERS = 200
"""Characters of a row of the longest path that fit. A longer one would leave less of the figure to the branches."""

_KINDS = {
    "generated kernel": "#56B4E9",
    "operator of PyTorch": "#E69F00",
    "copy or fill": "#B8B8B8",
    "barrier: waits for all before, holds back all after": "#D55E00",
}


def render(graph: DrawnGraph, line: Timeline) -> str:
    """Return the SVG of a graph."""
    notes, path = [graph.title, *summary(graph, line)], longest_path(graph, line)
    with matplotlib.rc_context(STYLE):
        height = 1.4 + ROW * line.branches + LINE * (len(notes) + len(path))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle("\n".join(map(printable, notes)), x=0.01, ha="left")
        if graph.concurrency.order:
            axis = figure.subplots()
            _draw_crossings(axis, line)
            _draw_bars(axis, graph, line)
            axis.set(xlim=(0, line.end or 1.0), ylim=(line.branches - 0.5, -0.5), ylabel="branch")
            axis.set_yticks(range(line.branches), map(str, range(1, line.branches + 1)))
            space = "\N{NO-BREAK SPACE}"  # SVG joins others
            rows = (_cut(row, _PATH_CHARACTERS).replace("  ", 2 * space) for row in path)
            axis.set_xlabel("\n".join([line.unit, *rows]), loc="left", family="monospace")
            handles = [Patch(color=colour, label=kind) for kind, colour in _KINDS.items()]
            handles.append(Patch(facecolor="none", edgecolor=INK, label="longest path"))
            axis.legend(handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
        return to_svg(figure, "graph")


def _cut(text: str, most: int) -> str:
    """Return the text in at most so many characters."""
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


def _kind(launch: OrderedLaunch) -> str:
    generated, operator, copy, barrier = _KINDS
    if launch.barrier is not None:
        return barrier
    if launch.nodes and all(node in ("memcpy", "memset") for node in launch.nodes):
        return copy
    return generated if launch.name.startswith("triton_") else operator


def _draw_crossings(axis: Axes, line: Timeline) -> None:
    on_path = set(zip(line.longest_path, line.longest_path[1:], strict=False))
    for earlier, later in line.crossings:
        strong = (earlier, later) in on_path
        times, rows = (line.ends[earlier], line.starts[later]), (line.branch_of[earlier], line.branch_of[later])
        axis.plot(times, rows, color=INK if strong else "#999999", linewidth=1.6 if strong else 0.7)


def _draw_bars(axis: Axes, graph: DrawnGraph, line: Timeline) -> None:
    launches, on_path = graph.concurrency.order, set(line.longest_path)
    widths = [end - start for start, end in zip(line.starts, line.ends, strict=True)]
    axis.barh(
        line.branch_of,
        widths,
        BAR,
        line.starts,
        color=[_KINDS[_kind(launch)] for launch in launches],
        edgecolor=[INK if index in on_path else "white" for index in range(len(launches))],
        linewidth=[1.5 if index in on_path else 0.3 for index in range(len(launches))],
        zorder=2,
    )
    for index, launch in enumerate(launches):
        fitting = int(_CHARACTERS * widths[index] / line.end) if line.end else 0
        if fitting >= 4:
            name, place = _cut(launch.name, fitting), (line.starts[index], line.branch_of[index])
            axis.annotate(name, place, xytext=(3, 0), textcoords="offset points", va="center", fontsize=7, zorder=3)
