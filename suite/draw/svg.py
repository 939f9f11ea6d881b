"""Write a graph's branches as an SVG: a row for each branch, time from left to right, the longest path outlined.

The file stands alone: no script, no font, no link. Each launch has its name, time and line as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from optimizations.report.concurrency import OrderedLaunch
from suite.draw.text import printable, source, summary
from suite.draw.timeline import DrawnGraph, Timeline

WIDTH = 1600
LEFT, RIGHT = 70, 30
ROW, BAR = 20, 14
LINE = 16
_CHARACTER = 5.6
"""Width of a character of 9 pixels."""

_COLOURS = {"triton": "#56B4E9", "library": "#E69F00", "copy": "#B8B8B8", "barrier": "#D55E00"}
_NAMES = {
    "triton": "generated kernel",
    "library": "operator of PyTorch",
    "copy": "copy or fill",
    "barrier": "barrier: waits for all before, holds back all after",
}
_PATH = "#123450"


def render(graph: DrawnGraph, line: Timeline) -> str:
    """Return the SVG of a graph."""
    notes = summary(graph, line)
    top = 34 + LINE * len(notes) + 46
    bottom = top + ROW * line.branches
    height = bottom + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" fill="#123450">',
        f'<rect width="{WIDTH}" height="{height}" fill="#FFFFFF"/>',
        _text(LEFT, 24, graph.title, 'font-size="17" font-weight="bold"'),
        *(_text(LEFT, 46 + LINE * number, note) for number, note in enumerate(notes)),
    ]
    if graph.concurrency.order:
        parts += _legend(top - 34)
        parts += _axis(line, top, bottom)
        parts += _crossings(line, top)
        parts += (_bar(graph, line, index, top) for index in range(len(graph.concurrency.order)))
    return "\n".join([*parts, "</svg>\n"])


def _x(line: Timeline, time: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (time / line.end if line.end else 0.0)


def _y(branch: int, top: int) -> int:
    return top + ROW * branch + (ROW - BAR) // 2


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(printable(text), quote=False)}</text>'


def _kind(launch: OrderedLaunch) -> str:
    if launch.barrier is not None:
        return "barrier"
    if launch.nodes and all(node in ("memcpy", "memset") for node in launch.nodes):
        return "copy"
    return "triton" if launch.name.startswith("triton_") else "library"


def _legend(y: int) -> Iterator[str]:
    x = float(LEFT)
    for kind, name in _NAMES.items():
        yield f'<rect x="{x:.0f}" y="{y}" width="14" height="10" fill="{_COLOURS[kind]}"/>'
        yield _text(x + 20, y + 10, name)
        x += 50 + 6.8 * len(name)
    yield f'<rect x="{x + 1:.0f}" y="{y}" width="14" height="10" fill="none" stroke="{_PATH}" stroke-width="2"/>'
    yield _text(x + 22, y + 10, "longest path")


def _axis(line: Timeline, top: int, bottom: int) -> Iterator[str]:
    step = _tick(line.end)
    for number in range(int(line.end / step) + 1 if step else 1):
        x = _x(line, number * step)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#E4E4E4"/>'
        yield _text(x, bottom + 14, f"{number * step:,.6g}", 'font-size="10" text-anchor="middle"')
    yield _text(WIDTH - RIGHT, bottom + 28, line.unit, 'font-size="10" text-anchor="end"')
    for branch in range(line.branches):
        yield _text(LEFT - 8, _y(branch, top) + 11, str(branch + 1), 'font-size="10" text-anchor="end"')


def _tick(end: float) -> float:
    """Return a round distance of about ten ticks."""
    if end <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(end / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if end / (power * factor) <= 12)


def _crossings(line: Timeline, top: int) -> Iterator[str]:
    on_path = set(zip(line.longest_path, line.longest_path[1:], strict=False))
    for earlier, later in line.crossings:
        x1, x2 = _x(line, line.ends[earlier]), _x(line, line.starts[later])
        y1, y2 = (_y(line.branch_of[one], top) + BAR / 2 for one in (earlier, later))
        strong = (earlier, later) in on_path
        yield (
            f'<path d="M{x1:.1f} {y1:.1f}C{x1 + 12:.1f} {y1:.1f} {x2 - 12:.1f} {y2:.1f} {x2:.1f} {y2:.1f}" fill="none" '
            f'stroke="{_PATH if strong else "#999999"}" stroke-width="{1.6 if strong else 0.7}"/>'
        )


def _bar(graph: DrawnGraph, line: Timeline, index: int, top: int) -> str:
    launch = graph.concurrency.order[index]
    x, y = _x(line, line.starts[index]), _y(line.branch_of[index], top)
    width = max(0.6, _x(line, line.ends[index]) - x)
    on_path = index in line.longest_path
    stroke = (
        f'stroke="{_PATH}" stroke-width="{min(2.0, max(0.5, width / 4)):.1f}"'
        if on_path
        else 'stroke="#FFFFFF" stroke-width="0.3"'
    )
    labels = [
        f"{index}: {launch.name}",
        f"{line.ends[index] - line.starts[index]:,.5g} {line.unit}",
        *([source(graph, index)] if launch.source_line is not None else []),
        *([f"barrier: {launch.barrier}"] if launch.barrier is not None else []),
        f"waits for {', '.join(map(str, launch.waits_for)) or 'nothing'}",
    ]
    tip = escape("\n".join(map(printable, labels)), quote=False)
    bar = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{_COLOURS[_kind(launch)]}" {stroke}>'
        f"<title>{tip}</title></rect>"
    )
    fitting = int((width - 6) / _CHARACTER)
    if fitting < 4:
        return bar
    name = launch.name if len(launch.name) <= fitting else f"{launch.name[: fitting - 1]}…"
    return bar + _text(x + 3, y + 10.5, name, 'font-size="9" pointer-events="none"')
