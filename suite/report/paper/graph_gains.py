"""GraCE Fig. 4, PyGraph Fig. 2: how often CUDA graphs help, and how often they hurt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from models.registry import TP_MARK
from suite.modes import DEFAULT_MODE, GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.line_chart import Line, LineChart
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Results, chart_or_none
from suite.report.selected import judged_groups
from suite.report.table import make_table

_CLASSES = ("faster", "within 2 %", "slower")
_EDGE = 1.02
"""PyGraph's classes: faster or slower by more than 2 %."""
_COMMON = {
    "workloads": "Counted are the workloads that all modes have.",
    "graphs": "Counted are groups of graphs that were judged together, by the medians of their own calls.",
}
_UNIT = (
    f"Where mode {DEFAULT_MODE} was run, graphs are counted: each group that it judged together, timed on its own "
    f"calls ({GRAPH_MODE}: replayed as stock does, its inputs copied). Otherwise each workload of the run counts once. "
    "A workload measured under --tp too (@tp1: the same program on one GPU) counts once: without that, or on the "
    "fewest GPUs on which anything was timed. Names of graphs are those of workloads, with the number of the group."
)
_SPLIT = re.compile(rf"{TP_MARK}(\d+)")
_DIFFERS_CDF = (
    "The paper counts CUDA graphs (116 of 63 TorchBench applications, 29 of them slower than without). "
    f"{_UNIT} Its second part, applications with both kinds of graphs, is in the table of graphs served and not."
)
_DIFFERS_CLASSES = (
    f"The paper counts CUDA graphs. {_UNIT} Faster and slower mean by more than 2 %, by the estimate, whatever its "
    "interval."
)


@dataclass(frozen=True, slots=True)
class _Gains:
    """How many times faster than without CUDA graphs, and of what, by mode, slowest first.

    `unit` is what is counted, `papers` the mode that stands for the paper's CUDA graphs. `undecided` are groups of
    graphs that were timed, and how they are to be served is not decided: they are in no mode.
    """

    unit: str
    papers: str
    by_mode: dict[str, list[tuple[float, str]]]
    undecided: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """A sentence on those, "" where there are none."""
        names = ", ".join(self.undecided)
        return f" Not counted, for they were timed and have no verdict: {names}." if names else ""


def _gains(results: Results) -> _Gains:
    of_graphs = _of_graphs(results)
    if any(of_graphs.by_mode.values()):
        return of_graphs
    return _Gains("workloads", UNPARTITIONED_MODE, _of_workloads(results))


def _of_graphs(results: Results) -> _Gains:
    """Of groups of graphs that were timed without a graph, replayed as stock does, and as they are served now.

    A workload that was timed stands for itself, decided or not: what is decided of it where it is split may be another
    part of it, of two graphs among hundreds.
    """
    timed: dict[str, list[tuple[float, float | None, str]]] = {}
    for label in results.run.labels if results.run is not None else ():
        cell = results.passed(label, DEFAULT_MODE)
        for number, group in enumerate(judged_groups(cell) if cell is not None else ()):
            stock, own = group.gain("copy"), group.gain(group.kept) if group.kept else None
            if stock is not None:
                timed.setdefault(label, []).append((stock, own, f"{label} {number}"))
    whole = [each for label in _once(timed) for each in timed[label]]
    counted = [(stock, own, group) for stock, own, group in whole if own is not None]
    return _Gains(
        "graphs",
        GRAPH_MODE,
        {
            GRAPH_MODE: sorted((stock, group) for stock, _, group in counted),
            DEFAULT_MODE: sorted((own, group) for _, own, group in counted),
        },
        tuple(sorted(group for _, own, group in whole if own is None)),
    )


def _once(labels: Iterable[str]) -> set[str]:
    """Of the rows of each workload the one that is not split, else that of the fewest GPUs: it is one program, measured
    again on one GPU for ratios of several."""
    fewest: dict[str, tuple[int, str]] = {}
    for label in labels:
        split = _SPLIT.search(label)
        row = (int(split[1]) if split else 0, label)
        whole = _SPLIT.sub("", label)
        fewest[whole] = min(row, fewest.get(whole, row))
    return {label for _, label in fewest.values()}


def _modes(results: Results) -> tuple[str, ...]:
    return (UNPARTITIONED_MODE, GRAPH_MODE, results.whole_mode)


def _of_workloads(results: Results) -> dict[str, list[tuple[float, str]]]:
    """Of the workloads that all measured modes have, over compile."""
    labels = results.run.labels if results.run is not None else ()
    found = {
        mode: {label: gain.value for label in labels if (gain := results.gain(label, mode)) is not None}
        for mode in _modes(results)
    }
    measured = [set(own) for own in found.values() if own]
    common = _once(set.intersection(*measured)) if measured else set()
    return {mode: sorted((own[label], label) for label in own.keys() & common) for mode, own in found.items()}


def make_distribution(exhibit: Exhibit, results: Results) -> Made:
    """Share of workloads up to a ratio over compile, for stock's graphs and for Encore."""
    gains = _gains(results)
    lines, rows = [], []
    for mode, found in gains.by_mode.items():
        rows += [
            {"mode": mode, "workload": label, "speedup": value, "up_to_percent": 100 * (place + 1) / len(found)}
            for place, (value, label) in enumerate(found)
        ]
        slower = sum(1 for value, _ in found if value < 1)
        rows.append(
            {
                "mode": mode,
                "workload": f"slower: {slower} of {len(found)}" if found else NOT_MEASURED,
                "up_to_percent": 100 * slower / len(found) if found else None,
                "published": "29 of 116 CUDA graphs (25 %)" if mode == gains.papers else None,
            }
        )
        if found:
            points = [(found[0][0], 0.0)] + [(value, 100 * (n + 1) / len(found)) for n, (value, _) in enumerate(found)]
            lines.append(Line(mode, tuple(points), steps=True))
    title = exhibit.title(results.published)
    columns = ["mode", "workload", "speedup", "up_to_percent", "published"]
    table = make_table(exhibit.stem, title, exhibit.note(results) + gains.left_out, columns, rows)
    chart = LineChart(
        exhibit.stem,
        title,
        f"times faster than {REFERENCE_MODE}" if gains.unit == "workloads" else "times faster than without a graph",
        f"% of {gains.unit} up to that",
        tuple(lines),
        x_log=True,
        marks=((1.0, "no change"),),
        percent=True,
        published=((1.0, 25.0, "published: 25 % of CUDA graphs are slower"),),
        note=f"Left of the dotted line CUDA graphs cost more than they save. {_COMMON[gains.unit]}{gains.left_out}",
    )
    return Made(table, chart if lines else None, results.provenance())


def make_classes(exhibit: Exhibit, results: Results) -> Made:
    """Shares of workloads that stock's graphs, and Encore, make faster, leave as they are, or make slower."""
    headline = results.published.headline[exhibit.source]
    whole = float(headline["graphs"])
    published = [100 * float(headline[name]) / whole for name in ("graphs_faster_2pct", "graphs_same", "graphs_slower")]
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    gains = _gains(results)
    for mode, found in gains.by_mode.items():
        values = [value for value, _ in found]
        counts = [
            sum(1 for value in values if value > _EDGE),
            sum(1 for value in values if 1 / _EDGE <= value <= _EDGE),
            sum(1 for value in values if value < 1 / _EDGE),
        ]
        for name, count, paper in zip(_CLASSES, counts, published, strict=True):
            mark = paper if mode == gains.papers else None
            share = 100 * count / len(values) if values else None
            bar = Bar(failure=NOT_MEASURED, published=mark)
            if share is not None:
                bar = Bar(share, published=mark, label=f"{count} of {len(values)}")
            bars[name, mode] = bar
            rows.append(
                {
                    "class": name,
                    "mode": mode,
                    "count": count if values else None,
                    "of": len(values) or None,
                    "percent": share,
                    "published_percent": mark,
                    "missing": None if values else NOT_MEASURED,
                }
            )
    title = exhibit.title(results.published)
    columns = ["class", "mode", "count", "of", "percent", "published_percent", "missing"]
    chart = Chart(
        exhibit.stem,
        title,
        f"% of {gains.unit}",
        Scale.PERCENT,
        _CLASSES,
        tuple(gains.by_mode),
        bars,
        note=_COMMON[gains.unit] + gains.left_out,
        published=f"share of {headline['graphs']} CUDA graphs, {results.published.sources[exhibit.source].setting}",
    )
    table = make_table(exhibit.stem, title, exhibit.note(results) + gains.left_out, columns, rows)
    return Made(table, chart_or_none(chart), results.provenance())


EXHIBITS = (
    Exhibit("fig4", "grace", "Fig. 4", "how often CUDA graphs help and hurt", _DIFFERS_CDF, make_distribution),
    Exhibit("pygraph-fig2", "pygraph", "Fig. 2", "how often CUDA graphs help", _DIFFERS_CLASSES, make_classes),
)
