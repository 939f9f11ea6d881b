"""Write a graph's branches as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from suite.draw.timeline import DrawnGraph, Timeline
from suite.measure.source_line import short_line

COLUMNS = 96
"""Width of the time line."""
MOST_BRANCHES = 24
"""Most branches of the time line; the rest are counted."""
PATH_ROWS = 30
"""Rows of the longest path, those that take longest."""
_NAME_COLUMNS = 44


def render(graph: DrawnGraph, line: Timeline) -> str:
    """Return the whole text of a graph, without a line end."""
    return "\n".join(map(printable, [graph.title, *(f"  {one}" for one in summary(graph, line)), *_body(graph, line)]))


def printable(text: str) -> str:
    """Leave out what a terminal would obey, and what XML does not allow."""
    return "".join(one if one.isprintable() else " " for one in text)


def summary(graph: DrawnGraph, line: Timeline) -> list[str]:
    """Return sentences on a graph."""
    found = graph.concurrency
    if not found.order:
        return [f"Nothing to draw: {found.reason}."]
    share = line.end / line.total if line.total else 1.0
    lines = [
        f"{found.decision.capitalize()}: {found.reason}.",
        f"{len(found.order)} launches; branches: {line.branches}, crossings: {len(line.crossings)}, launches on the "
        f"longest path: {len(line.longest_path)}.",
        f"The longest path takes {line.end:,.6g} of {line.total:,.6g} {line.unit} ({share:.0%}), if the GPU has room "
        "for all.",
    ]
    barriers = Counter(one.barrier for one in found.order if one.barrier is not None)
    lines += [f"Barriers, {count}: {reason}." for reason, count in barriers.most_common()]
    return lines


def source(graph: DrawnGraph, index: int) -> str:
    """Return the program's line of a launch without what differs between machines."""
    written = graph.concurrency.order[index].source_line
    return "" if written is None else short_line(written)


def _body(graph: DrawnGraph, line: Timeline) -> Iterator[str]:
    if not graph.concurrency.order:
        return
    yield ""
    marks = "#: longest path, =: other launches, !: barriers"
    yield f"Branches over time ({marks}); {COLUMNS} columns are {line.end:,.6g} {line.unit}"
    rows = _rows(graph, line)
    for number, row in enumerate(rows[:MOST_BRANCHES], start=1):
        yield f"{number:4} |{row}|"
    if len(rows) > MOST_BRANCHES:
        yield f"     and {len(rows) - MOST_BRANCHES} more branches"
    yield from longest_path(graph, line)


def longest_path(graph: DrawnGraph, line: Timeline) -> list[str]:
    """Return a table of the launches on the longest path: name, time and line of the program."""
    rows = ["", f"Longest path{'':{_NAME_COLUMNS - 8}}{line.unit:>10}  line"]
    times = {index: line.ends[index] - line.starts[index] for index in line.longest_path}
    shown = sorted(times, key=lambda index: -times[index])[:PATH_ROWS]
    for index in sorted(shown):
        name = graph.concurrency.order[index].name
        name = name if len(name) <= _NAME_COLUMNS else f"{name[: _NAME_COLUMNS - 3]}..."
        rows.append(f"{index:5} {name:{_NAME_COLUMNS}} {times[index]:>10,.5g}  {source(graph, index)}".rstrip())
    if len(times) > len(shown):
        rows.append(f"      and {len(times) - len(shown)} shorter ones")
    return rows


def _rows(graph: DrawnGraph, line: Timeline) -> list[str]:
    """Return a row of characters for each branch. In a column that several launches share, the strongest shows."""
    rows = [[" "] * COLUMNS for _ in range(line.branches)]
    on_path = set(line.longest_path)
    scale = COLUMNS / line.end if line.end else 0.0
    for index, branch in enumerate(line.branch_of):
        barrier = graph.concurrency.order[index].barrier is not None
        mark = "!" if barrier else "#" if index in on_path else "="
        first = min(COLUMNS - 1, int(line.starts[index] * scale))
        last = max(first + 1, min(COLUMNS, round(line.ends[index] * scale)))
        for column in range(first, last):
            rows[branch][column] = max(rows[branch][column], mark, key=" =#!".index)
    return ["".join(row) for row in rows]
