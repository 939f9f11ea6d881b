"""GraCE Fig. 4, PyGraph Fig. 2: how often CUDA graphs help, and how often they hurt."""

from __future__ import annotations

from suite.modes import GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.line_chart import Line, LineChart
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Results, chart_or_none
from suite.report.table import make_table

_CLASSES = ("faster", "within 2 %", "slower")
_EDGE = 1.02
"""PyGraph's classes: faster or slower by more than 2 %."""
_COMMON = "Counted are the workloads that all modes have."
_DIFFERS_CDF = (
    "The paper counts CUDA graphs (116 of 63 TorchBench applications, 29 of them slower than without); here each "
    "workload of the run counts once, because rows do not time single graphs. Its second part, applications with both "
    "kinds of graphs, needs such times and is not measured."
)
_DIFFERS_CLASSES = (
    "The paper counts CUDA graphs; here each workload of the run counts once. Faster and slower mean by more than 2 %, "
    "by the estimate, whatever its interval."
)


def _modes(results: Results) -> tuple[str, ...]:
    return (UNPARTITIONED_MODE, GRAPH_MODE, results.whole_mode)


def _ratios(results: Results) -> dict[str, list[tuple[float, str]]]:
    """(ratio over compile, workload) by mode, slowest first, of the workloads that all measured modes have."""
    labels = results.run.labels if results.run is not None else ()
    found = {
        mode: {label: ratio.value for label in labels if (ratio := results.ratio(label, mode)) is not None}
        for mode in _modes(results)
    }
    measured = [set(own) for own in found.values() if own]
    common = set.intersection(*measured) if measured else set()
    return {mode: sorted((own[label], label) for label in own.keys() & common) for mode, own in found.items()}


def make_distribution(exhibit: Exhibit, results: Results) -> Made:
    """Share of workloads up to a ratio over compile, for stock's graphs and for Encore."""
    lines, rows = [], []
    for mode, found in _ratios(results).items():
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
                "published": "29 of 116 CUDA graphs (25 %)" if mode == UNPARTITIONED_MODE else None,
            }
        )
        if found:
            points = [(found[0][0], 0.0)] + [(value, 100 * (n + 1) / len(found)) for n, (value, _) in enumerate(found)]
            lines.append(Line(mode, tuple(points), steps=True))
    title = exhibit.title(results.published)
    columns = ["mode", "workload", "speedup", "up_to_percent", "published"]
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, rows)
    chart = LineChart(
        exhibit.stem,
        title,
        f"times faster than {REFERENCE_MODE}",
        "% of workloads up to that",
        tuple(lines),
        x_log=True,
        marks=((1.0, "no change"),),
        percent=True,
        published=((1.0, 25.0, "published: 25 % of CUDA graphs are slower"),),
        note=f"Left of the dotted line CUDA graphs cost more than they save. {_COMMON}",
    )
    return Made(table, chart if lines else None, results.provenance())


def make_classes(exhibit: Exhibit, results: Results) -> Made:
    """Shares of workloads that stock's graphs, and Encore, make faster, leave as they are, or make slower."""
    headline = results.published.headline[exhibit.source]
    whole = float(headline["graphs"])
    published = [100 * float(headline[name]) / whole for name in ("graphs_faster_2pct", "graphs_same", "graphs_slower")]
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for mode, found in _ratios(results).items():
        values = [value for value, _ in found]
        counts = [
            sum(1 for value in values if value > _EDGE),
            sum(1 for value in values if 1 / _EDGE <= value <= _EDGE),
            sum(1 for value in values if value < 1 / _EDGE),
        ]
        for name, count, paper in zip(_CLASSES, counts, published, strict=True):
            mark = paper if mode == UNPARTITIONED_MODE else None
            share = 100 * count / len(values) if values else None
            bar = Bar(failure=NOT_MEASURED, published=mark)
            if share is not None:
                bar = Bar(share, published=mark, label=f"{count} of {len(values)}")
            bars[name, mode] = bar
            rows.append(
                {
                    "class": name,
                    "mode": mode,
                    "workloads": count if values else None,
                    "of": len(values) or None,
                    "percent": share,
                    "published_percent": mark,
                    "missing": None if values else NOT_MEASURED,
                }
            )
    title = exhibit.title(results.published)
    columns = ["class", "mode", "workloads", "of", "percent", "published_percent", "missing"]
    chart = Chart(
        exhibit.stem,
        title,
        "% of workloads",
        Scale.PERCENT,
        _CLASSES,
        _modes(results),
        bars,
        note=_COMMON,
        published=f"share of {headline['graphs']} CUDA graphs, {results.published.sources[exhibit.source].setting}",
    )
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, rows)
    return Made(table, chart_or_none(chart), results.provenance())


EXHIBITS = (
    Exhibit("fig4", "grace", "Fig. 4", "how often CUDA graphs help and hurt", _DIFFERS_CDF, make_distribution),
    Exhibit("pygraph-fig2", "pygraph", "Fig. 2", "how often CUDA graphs help", _DIFFERS_CLASSES, make_classes),
)
