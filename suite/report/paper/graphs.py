"""Show how often CUDA graphs help and hurt, and how many serve calls: GraCE Fig. 4, PyGraph Fig. 2 and Table 4."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from models.registry import TP_MARK
from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Line, LineChart, Scale
from suite.report.paper.exhibit import NOT_HELD, NOT_MEASURED, Exhibit, Made, Point, Results
from suite.report.selected import judged_groups, selected_functions
from suite.report.table import Row

_CLASSES = ("faster", "within 2 %", "slower")
_EDGE = 1.02
"""PyGraph's classes: faster or slower by more than 2 %."""
_SPLIT = re.compile(rf"{TP_MARK}(\d+)")


@dataclass(frozen=True, slots=True)
class _Gains:
    """Hold how many times faster than without CUDA graphs, and of what, by mode, slowest first.

    `unit` is what is counted, `papers` the mode that stands for the paper's CUDA graphs, `note` what is counted and
    what is not.
    """

    unit: str
    papers: str
    by_mode: dict[str, list[tuple[float, str]]]
    note: str


def _gains(results: Results) -> _Gains:
    """Return the gains of groups of graphs where selection timed them, else of workloads over compile."""
    of_graphs = _of_graphs(results)
    if any(of_graphs.by_mode.values()):
        return of_graphs
    found = {mode: results.gains(results.labels, mode) for mode in (UNPARTITIONED_MODE, GRAPH_MODE, results.whole_mode)}
    measured = [set(own) for own in found.values() if own]
    common = _once(set.intersection(*measured)) if measured else set()
    by_mode = {mode: sorted((own[label], label) for label in own.keys() & common) for mode, own in found.items()}
    return _Gains("workloads", UNPARTITIONED_MODE, by_mode, "Counted are the workloads that all modes have.")


def _of_graphs(results: Results) -> _Gains:
    """Collect groups of graphs that were timed without a graph, replayed as stock does, and as they are served now.

    A workload that was timed stands for itself, decided or not: what is decided of it where it is split may be another
    part of it, of two graphs among hundreds.
    """
    timed: dict[str, list[tuple[float, float | None, str]]] = {}
    for label in results.labels:
        for number, group in enumerate(judged_groups(results.passed(label, DEFAULT_MODE))):
            if (stock := group.gain("copy")) is not None:
                timed.setdefault(label, []).append((stock, group.gain(group.kept), f"{label} {number}"))
    whole = [each for label in _once(timed) for each in timed[label]]
    counted = [(stock, own, group) for stock, own, group in whole if own is not None]
    note = "Counted are groups of graphs that were judged together, by the medians of their own calls."
    if undecided := sorted(group for _, own, group in whole if own is None):
        note += f" Not counted, for they were timed and have no verdict: {', '.join(undecided)}."
    by_mode = {
        GRAPH_MODE: sorted((stock, group) for stock, _, group in counted),
        DEFAULT_MODE: sorted((own, group) for _, own, group in counted),
    }
    return _Gains("graphs", GRAPH_MODE, by_mode, note)


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


def make_distribution(exhibit: Exhibit, results: Results) -> Made:
    """Show share of workloads up to a ratio over compile, for stock's graphs and for Encore."""
    gains = _gains(results)
    published = str(results.published.headline[exhibit.source]["graphs_slower_share"])
    lines, points = [], []
    rows: list[Row] = []
    for mode, found in gains.by_mode.items():
        shares = [100 * (place + 1) / len(found) for place in range(len(found))]
        rows += [
            {"mode": mode, "workload": label, "speedup": value, "up_to_percent": share}
            for (value, label), share in zip(found, shares, strict=True)
        ]
        slower = sum(value < 1 for value, _ in found)
        measured = f"{slower} of {len(found)}" if found else NOT_MEASURED
        paper = published if mode == gains.papers else None
        rows.append(
            {
                "mode": mode,
                "workload": f"slower: {measured}" if found else NOT_MEASURED,
                "speedup": None,
                "up_to_percent": 100 * slower / len(found) if found else None,
                "published": f"{paper} CUDA graphs" if paper else None,
            }
        )
        points.append(Point(f"slower in {mode}", paper, measured))
        if found:
            steps = zip((value for value, _ in found), shares, strict=True)
            lines.append(Line(mode, ((found[0][0], 0.0), *steps), steps=True))
    slower_papers, _, whole = published.partition(" of ")
    share = 100 * float(slower_papers) / float(whole.split()[0])
    chart = LineChart(
        exhibit.stem,
        exhibit.title(results.published),
        f"times faster than {REFERENCE_MODE}" if gains.unit == "workloads" else "times faster than without a graph",
        f"% of {gains.unit} up to that",
        tuple(lines),
        x_log=True,
        marks=((1.0, "no change"),),
        percent=True,
        published=((1.0, share, f"published: {share:.0f} % of CUDA graphs are slower"),),
        note=f"Left of the dotted line CUDA graphs cost more than they save. {gains.note}",
    )
    table = exhibit.table(results, rows, more=gains.note)
    return Made(table, chart if lines else None, results.provenance(), tuple(points))


def make_mixed(exhibit: Exhibit, results: Results) -> Made:
    """Count the applications with several graphs where some are faster than without and others slower."""
    rows: list[Row] = []
    mixed = 0
    for label in sorted(_once(results.labels)):
        groups = judged_groups(results.passed(label, DEFAULT_MODE))
        gains = [gain for group in groups if (gain := group.gain("copy")) is not None]
        if len(gains) > 1:
            faster = sum(gain > 1 for gain in gains)
            mixed += 0 < faster < len(gains)
            rows.append({"workload": label, "graphs": len(gains), "faster": faster, "slower": len(gains) - faster})
    measured = f"{mixed} of {len(rows)}" if rows else NOT_MEASURED
    published = results.published.headline[exhibit.source]["mixed_applications"]
    ends = [{"workload": f"with both kinds: {measured}", "published": published}]
    table = exhibit.table(results, rows or [{"missing": NOT_MEASURED}], ends, ["workload"])
    point = Point("applications with faster and slower graphs", published, measured)
    return Made(table, None, results.provenance(), (point,))


def make_classes(exhibit: Exhibit, results: Results) -> Made:
    """Show shares of workloads that stock's graphs, and Encore, make faster, leave as they are, or make slower."""
    headline = results.published.headline[exhibit.source]
    printed = [float(headline[name]) for name in ("graphs_faster_2pct", "graphs_same", "graphs_slower")]
    whole = float(headline["graphs"])
    bars: dict[tuple[str, str], Bar] = {}
    rows: list[Row] = []
    points = []
    gains = _gains(results)
    for mode, found in gains.by_mode.items():
        classes = [_CLASSES[0 if value > _EDGE else 2 if value < 1 / _EDGE else 1] for value, _ in found]
        for name, paper in zip(_CLASSES, printed, strict=True):
            mark = 100 * paper / whole if mode == gains.papers else None
            count, of = classes.count(name), len(found)
            share, measured = (100 * count / of, f"{count} of {of}") if of else (None, NOT_MEASURED)
            failure = None if of else NOT_MEASURED
            bars[name, mode] = Bar(share, published=mark, label=measured if of else None, failure=failure)
            row: Row = {"class": name, "mode": mode, "count": count if of else None, "of": of or None}
            rows.append({**row, "percent": share, "published_percent": mark, "missing": failure})
            papers = f"{paper:.0f} of {whole:.0f}" if mark is not None else None
            points.append(Point(f"{name} in {mode}", papers, measured))
    chart = Chart(
        exhibit.stem,
        exhibit.title(results.published),
        f"% of {gains.unit}",
        Scale.PERCENT,
        _CLASSES,
        tuple(gains.by_mode),
        bars,
        note=gains.note,
        published=f"share of {whole:.0f} CUDA graphs, {exhibit.setting(results.published)}",
    )
    table = exhibit.table(results, rows, more=gains.note)
    return Made(table, chart if chart.has_values else None, results.provenance(), tuple(points))


_COUNTS = ("total", "enabled", "indirected", "disabled", "undecided")


def make_served(exhibit: Exhibit, results: Results) -> Made:
    """Show a row per published workload, and the sums."""
    rows: list[Row] = []
    sums = dict.fromkeys(_COUNTS, 0)
    labels = exhibit.labels(results)
    for label in labels:
        kept = [one.kept for one in selected_functions(results.passed(label, DEFAULT_MODE))]
        if not kept:
            rows.append({"workload": label, "missing": results.state(label, DEFAULT_MODE) or "no graph was recorded"})
            continue
        served = kept.count("copy") + kept.count("indirection")
        counts = (len(kept), served, kept.count("indirection"), kept.count("none"), kept.count(None))
        rows.append({"workload": label, **dict(zip(_COUNTS, counts, strict=True))})
        sums = {name: sums[name] + count for name, count in zip(_COUNTS, counts, strict=True)}
    headline = results.published.headline[exhibit.source]
    total, enabled = headline.get("graphs_total"), headline.get("graphs_enabled")
    summary: list[Row] = [{"workload": "all", **sums}] if sums["total"] else []
    summary += [{"workload": "published", "total": total, "enabled": enabled}] if total is not None else []
    table = exhibit.table(results, rows, summary, ["workload", *_COUNTS])
    printed = f"{enabled} of {total}" if total is not None else NOT_HELD
    measured = f"{sums['enabled']} of {sums['total']}" if sums["total"] else NOT_MEASURED
    point = Point("CUDA graphs that serve calls", printed, measured)
    return Made(table, None, results.provenance(labels), (point,))


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

_COUNTED = f"The paper counts CUDA graphs. {_UNIT}"
_MIXED = f"Counted are workloads of which several groups of graphs were timed, by the estimates of their calls. {_UNIT}"
_CLASSED = f"{_COUNTED} Faster and slower mean by more than 2 %, by the estimate, whatever its interval."
_UNKNOWN = f"{_SERVED} The table's own counts are not known here."
_SHOWS_TABLE4 = "graphs that serve calls, and those that do not"
EXHIBITS = (
    Exhibit("fig4", "grace", "Fig. 4a", "how often CUDA graphs help and hurt", _COUNTED, make_distribution),
    Exhibit("fig4b", "grace", "Fig. 4b", "applications whose graphs help and hurt", _MIXED, make_mixed),
    Exhibit("graphs-enabled", "grace", "evaluation", "CUDA graphs that serve calls", _SERVED, make_served),
    Exhibit("pygraph-fig2", "pygraph", "Fig. 2", "how often CUDA graphs help", _CLASSED, make_classes),
    Exhibit("pygraph-table4", "pygraph", "Table 4", _SHOWS_TABLE4, _UNKNOWN, make_served),
)
