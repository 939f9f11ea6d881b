"""Show how often CUDA graphs help and hurt, and how many serve calls: GraCE Fig. 4, PyGraph Fig. 2 and Table 4."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from models.registry import TP_MARK
from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Line, LineChart, Scale
from suite.report.paper.exhibit import NOT_HELD, NOT_MEASURED, Exhibit, Made, Point, Results, labels_of
from suite.report.selected import judged_groups, selected_functions
from suite.report.table import make_table

_CLASSES = ("faster", "within 2 %", "slower")
_EDGE = 1.02
"""PyGraph's classes: faster or slower by more than 2 %."""
_SPLIT = re.compile(rf"{TP_MARK}(\d+)")


@dataclass(frozen=True, slots=True)
class _Gains:
    """Hold how many times faster than without CUDA graphs, and of what, by mode, slowest first.

    `unit` is what is counted, `papers` the mode that stands for the paper's CUDA graphs. `undecided` are groups of
    graphs that were timed, and how they are to be served is not decided: they are in no mode.
    """

    unit: str
    papers: str
    by_mode: dict[str, list[tuple[float, str]]]
    undecided: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Return what is counted, and what is not."""
        if self.unit == "workloads":
            return "Counted are the workloads that all modes have."
        text = "Counted are groups of graphs that were judged together, by the medians of their own calls."
        if self.undecided:
            text += f" Not counted, for they were timed and have no verdict: {', '.join(self.undecided)}."
        return text


def _gains(results: Results) -> _Gains:
    of_graphs = _of_graphs(results)
    if any(of_graphs.by_mode.values()):
        return of_graphs
    return _Gains("workloads", UNPARTITIONED_MODE, _of_workloads(results))


def _of_graphs(results: Results) -> _Gains:
    """Collect groups of graphs that were timed without a graph, replayed as stock does, and as they are served now.

    A workload that was timed stands for itself, decided or not: what is decided of it where it is split may be another
    part of it, of two graphs among hundreds.
    """
    timed: dict[str, list[tuple[float, float | None, str]]] = {}
    for label in results.run.labels if results.run is not None else ():
        for number, group in enumerate(judged_groups(results.passed(label, DEFAULT_MODE))):
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
    """Return the rows that count once for each workload: the one that is not split, else that of the fewest GPUs: it is
    one program, measured again on one GPU for ratios of several."""
    fewest: dict[str, tuple[int, str]] = {}
    for label in labels:
        split = _SPLIT.search(label)
        row = (int(split[1]) if split else 0, label)
        whole = _SPLIT.sub("", label)
        fewest[whole] = min(row, fewest.get(whole, row))
    return {label for _, label in fewest.values()}


def _of_workloads(results: Results) -> dict[str, list[tuple[float, str]]]:
    """Collect the workloads that all measured modes have, over compile."""
    labels = results.run.labels if results.run is not None else ()
    found = {
        mode: {label: gain.value for label in labels if (gain := results.gain(label, mode)) is not None}
        for mode in (UNPARTITIONED_MODE, GRAPH_MODE, results.whole_mode)
    }
    measured = [set(own) for own in found.values() if own]
    common = _once(set.intersection(*measured)) if measured else set()
    return {mode: sorted((own[label], label) for label in own.keys() & common) for mode, own in found.items()}


def make_distribution(exhibit: Exhibit, results: Results) -> Made:
    """Show share of workloads up to a ratio over compile, for stock's graphs and for Encore."""
    gains = _gains(results)
    published = results.published.headline[exhibit.source]["graphs_slower_share"]
    lines, rows, points = [], [], []
    for mode, found in gains.by_mode.items():
        rows += [
            {"mode": mode, "workload": label, "speedup": value, "up_to_percent": 100 * (place + 1) / len(found)}
            for place, (value, label) in enumerate(found)
        ]
        slower = sum(1 for value, _ in found if value < 1)
        paper = published if mode == gains.papers else None
        rows.append(
            {
                "mode": mode,
                "workload": f"slower: {slower} of {len(found)}" if found else NOT_MEASURED,
                "up_to_percent": 100 * slower / len(found) if found else None,
                "published": f"{paper} CUDA graphs" if paper else None,
            }
        )
        points.append(Point(f"slower in {mode}", paper, f"{slower} of {len(found)}" if found else NOT_MEASURED))
        if found:
            steps = [(found[0][0], 0.0)] + [(value, 100 * (n + 1) / len(found)) for n, (value, _) in enumerate(found)]
            lines.append(Line(mode, tuple(steps), steps=True))
    title = exhibit.title(results.published)
    columns = ["mode", "workload", "speedup", "up_to_percent", "published"]
    table = make_table(exhibit.stem, title, f"{exhibit.note(results)} {gains.note}", columns, rows)
    share = 100 * _first_number(published) / _first_number(str(published).rpartition("of ")[2])
    chart = LineChart(
        exhibit.stem,
        title,
        f"times faster than {REFERENCE_MODE}" if gains.unit == "workloads" else "times faster than without a graph",
        f"% of {gains.unit} up to that",
        tuple(lines),
        x_log=True,
        marks=((1.0, "no change"),),
        percent=True,
        published=((1.0, share, f"published: {share:.0f} % of CUDA graphs are slower"),),
        note=f"Left of the dotted line CUDA graphs cost more than they save. {gains.note}",
    )
    return Made(table, chart if lines else None, results.provenance(), tuple(points))


def _first_number(text: str | float) -> float:
    return float(str(text).split()[0])


def make_mixed(exhibit: Exhibit, results: Results) -> Made:
    """Count the applications with several graphs where some are faster than without and others slower."""
    rows: list[dict[str, object]] = []
    labels = results.run.labels if results.run is not None else ()
    for label in sorted(_once(labels)):
        groups = judged_groups(results.passed(label, DEFAULT_MODE))
        gains = [gain for group in groups if (gain := group.gain("copy")) is not None]
        if len(gains) > 1:
            faster = sum(gain > 1 for gain in gains)
            rows.append({"workload": label, "graphs": len(gains), "faster": faster, "slower": len(gains) - faster})
    mixed = sum(bool(row["faster"] and row["slower"]) for row in rows)
    measured = f"{mixed} of {len(rows)}" if rows else NOT_MEASURED
    published = results.published.headline[exhibit.source]["mixed_applications"]
    ends = [{"workload": f"with both kinds: {measured}", "published": published}]
    title = exhibit.title(results.published)
    columns = ["workload", "graphs", "faster", "slower", "published", "missing"]
    body = rows or [{"missing": NOT_MEASURED}]
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, body, ends)
    point = Point("applications with faster and slower graphs", published, measured)
    return Made(table, None, results.provenance(), (point,))


def make_classes(exhibit: Exhibit, results: Results) -> Made:
    """Show shares of workloads that stock's graphs, and Encore, make faster, leave as they are, or make slower."""
    headline = results.published.headline[exhibit.source]
    printed = [float(headline[name]) for name in ("graphs_faster_2pct", "graphs_same", "graphs_slower")]
    whole = float(headline["graphs"])
    bars: dict[tuple[str, str], Bar] = {}
    rows, points = [], []
    gains = _gains(results)
    for mode, found in gains.by_mode.items():
        values = [value for value, _ in found]
        classes = [
            _CLASSES[0] if value > _EDGE else _CLASSES[2] if value < 1 / _EDGE else _CLASSES[1] for value in values
        ]
        for name, paper in zip(_CLASSES, printed, strict=True):
            mark = 100 * paper / whole if mode == gains.papers else None
            count, share = classes.count(name), 100 * classes.count(name) / len(values) if values else None
            bars[name, mode] = (
                Bar(failure=NOT_MEASURED, published=mark)
                if share is None
                else Bar(share, published=mark, label=f"{count} of {len(values)}")
            )
            row = {"class": name, "mode": mode, "count": count, "of": len(values), "percent": share}
            missing = {"class": name, "mode": mode, "missing": NOT_MEASURED}
            rows.append((row if values else missing) | {"published_percent": mark})
            points.append(
                Point(
                    f"{name} in {mode}",
                    f"{paper:.0f} of {whole:.0f}" if mark is not None else None,
                    f"{count} of {len(values)}" if values else NOT_MEASURED,
                )
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
        note=gains.note,
        published=f"share of {whole:.0f} CUDA graphs, {results.published.sources[exhibit.source].setting}",
    )
    table = make_table(exhibit.stem, title, f"{exhibit.note(results)} {gains.note}", columns, rows)
    return Made(table, chart if chart.has_values else None, results.provenance(), tuple(points))


_COUNTS = ("total", "enabled", "indirected", "disabled", "undecided")


def make_served(exhibit: Exhibit, results: Results) -> Made:
    """Show a row per published workload, and the sums."""
    rows: list[dict[str, object]] = []
    sums = dict.fromkeys(_COUNTS, 0)
    for label in labels_of(results, exhibit.source):
        found = list(selected_functions(results.passed(label, DEFAULT_MODE)))
        if not found:
            rows.append({"workload": label, "missing": results.state(label, DEFAULT_MODE) or "no graph was recorded"})
            continue
        kept = [one.kept for one in found]
        counts = {
            "total": len(found),
            "enabled": sum(one in ("copy", "indirection") for one in kept),
            "indirected": kept.count("indirection"),
            "disabled": kept.count("none"),
            "undecided": kept.count(None),
        }
        excess_s = sum({one.group: one.excess_s for one in found}.values())
        rows.append({"workload": label, **counts, "excess_s": excess_s})
        sums = {name: sums[name] + counts[name] for name in _COUNTS}
    headline = results.published.headline[exhibit.source]
    paper = {"total": headline.get("graphs_total"), "enabled": headline.get("graphs_enabled")}
    summary: list[dict[str, object]] = [{"workload": "all", **sums}] if sums["total"] else []
    summary += [{"workload": "published", **paper}] if paper["total"] is not None else []
    columns = ["workload", *_COUNTS, "excess_s", "missing"]
    title, note = exhibit.title(results.published), exhibit.note(results)
    table = make_table(exhibit.stem, title, note, columns, rows, summary)
    printed = f"{paper['enabled']} of {paper['total']}" if paper["total"] is not None else NOT_HELD
    measured = f"{sums['enabled']} of {sums['total']}" if sums["total"] else NOT_MEASURED
    point = Point("CUDA graphs that serve calls", printed, measured)
    return Made(table, None, results.provenance(labels_of(results, exhibit.source)), (point,))


_UNIT = (
    f"Where mode {DEFAULT_MODE} timed its graphs, they are counted: each group that it judged together, timed on its "
    f"own calls ({GRAPH_MODE}: replayed as stock does, its inputs copied). Otherwise each workload of the run counts "
    "once. A workload measured under --tp too (@tp1: the same program on one GPU) counts once. Names of graphs are "
    "those of workloads, with the number of the group."
)
_SERVED = (
    f"Counted are functions that graphs can be recorded of, in mode {DEFAULT_MODE}: enabled are those whose calls a "
    "graph serves, indirected those of them that read inputs in place, disabled those that are faster without, "
    "undecided those that are served as without selection."
)

EXHIBITS = (
    Exhibit(
        "fig4",
        "grace",
        "Fig. 4a",
        "how often CUDA graphs help and hurt",
        f"The paper counts CUDA graphs. {_UNIT}",
        make_distribution,
    ),
    Exhibit(
        "fig4b",
        "grace",
        "Fig. 4b",
        "applications whose graphs help and hurt",
        f"Counted are workloads of which several groups of graphs were timed, by the estimates of their calls. {_UNIT}",
        make_mixed,
    ),
    Exhibit("graphs-enabled", "grace", "evaluation", "CUDA graphs that serve calls", _SERVED, make_served),
    Exhibit(
        "pygraph-fig2",
        "pygraph",
        "Fig. 2",
        "how often CUDA graphs help",
        f"The paper counts CUDA graphs. {_UNIT} Faster and slower mean by more than 2 %, by the estimate, whatever its "
        "interval.",
        make_classes,
    ),
    Exhibit(
        "pygraph-table4",
        "pygraph",
        "Table 4",
        "graphs that serve calls, and those that do not",
        f"{_SERVED} The table's own counts are not known here.",
        make_served,
    ),
)
