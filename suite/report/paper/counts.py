"""Show the papers' counts: workloads, coverage and copies (GraCE's and PyGraph's Tables 1 to 3), the cost of copies,
how often CUDA graphs help and hurt, and how many are used (GraCE Fig. 4, PyGraph Fig. 2 and Table 4).

The chosen variant of each function is read from `Metrics.encore_report`. Rows of Encore 0.1 have other fields: there
selection timed each candidate, for groups of functions that run together. With `selection="measure"` newer rows have
times as well.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models import registry
from models.registry import TP_MARK
from optimizations.byte_units import format_bytes, parse_bytes
from suite.measure.metrics import floor
from suite.measure.modes import (
    DEFAULT_MODE,
    GRAPH_MODE,
    INDIRECTION_MODE,
    PLACEMENT_MODE,
    REFERENCE_MODE,
    UNPARTITIONED_MODE,
)
from suite.report.chart import Bar, LineChart, Scale
from suite.report.grid import NOT_MEASURED, Grid, Point, Series, known
from suite.report.paper.exhibit import NOT_HELD, Exhibit, Made, Results
from suite.report.table import Row
from suite.results.schema import Cell, Status


def workloads(exhibit: Exhibit, results: Results) -> Made:
    """Return one row per published workload, with whether the run has it, if there is a run."""
    here = registry.workloads()
    rows = []
    for label in exhibit.labels(results):
        paper, own = results.published.workloads[exhibit.source][label], here.get(label)
        differs = [name for name in ("name", "task", "batch") if getattr(own, name, None) != paper[name]]
        row: dict[str, object] = {"workload": label}
        row |= {name: getattr(own, name, None) for name in ("name", "suite", "task", "batch")}
        row |= {f"published_{name}": paper[name] for name in ("name", "task", "batch")}
        row["parameters"] = own and own.parameters
        row["differs"] = (", ".join(differs) or "nothing listed") if own else "not in the suite"
        rows.append(row | ({"measured": label in results.ratios.labels} if results.run is not None else {}))
    there = sum(row["differs"] == "nothing listed" for row in rows)
    measured = f"{there} in the suite, {sum(bool(row.get('measured')) for row in rows)} measured"
    origin = results.provenance(exhibit.labels(results))
    return exhibit.whole(results, rows, [Point("workloads", len(rows), measured)], origin=origin)


def coverage(exhibit: Exhibit, results: Results) -> Grid:
    """Show the paper's rows, with every mode of the suite that uses CUDA graphs."""
    paper = results.published.coverage_percent[exhibit.source]
    systems = {UNPARTITIONED_MODE: "stock", PLACEMENT_MODE: "placement"}

    def measure(label: str, mode: str) -> Bar:
        percent = results.metric(label, mode, "coverage.percent")
        return known(percent, results.state(label, mode))

    def published(label: str, mode: str) -> float:
        return paper[label][systems[mode]]

    def point(label: str) -> Point:
        ours = [measure(label, mode).value for mode in systems]
        texts = (NOT_MEASURED if percent is None else f"{percent:.4g} %" for percent in ours)
        return Point(label, " to ".join(f"{published(label, mode):g} %" for mode in systems), " to ".join(texts))

    return Grid(
        "percent",
        "% of kernels in one iteration",
        Scale.PERCENT,
        tuple(sorted(paper)),
        tuple(
            Series(
                mode,
                partial(measure, mode=mode),
                partial(published, mode=mode) if mode in systems else None,
                text="{:.1f}".format,
            )
            for mode in (UNPARTITIONED_MODE, GRAPH_MODE, PLACEMENT_MODE, INDIRECTION_MODE)
        ),
        [point(label) for label in sorted(paper)],
        "stock and after placement, ",
    )


def copies(exhibit: Exhibit, results: Results) -> Grid:
    """Show bytes by workload, with the number of recorded graphs."""
    printed = results.published.bytes_copied.get(exhibit.source, {})
    labels = exhibit.labels(results)

    def measure(label: str, mode: str) -> Bar:
        copied, pointers = (results.metric(label, mode, f"copies.{of}_bytes") for of in ("placeholder", "pointer"))
        return known(None if copied is None else copied + (pointers or 0), results.state(label, mode))

    def paper(label: str, when: str) -> float | None:
        return parse_bytes(str(printed[label][when])) if label in printed else None

    def more(label: str) -> Row:
        row = printed.get(label)
        graphs = results.metric(label, INDIRECTION_MODE, "graphs.cuda_graphs")
        return {"graphs": graphs, "published_graphs": row and row["graphs"]}

    pairs = [(paper(label, "before"), paper(label, "after")) for label in labels]
    own = [(measure(label, PLACEMENT_MODE).value, measure(label, INDIRECTION_MODE).value) for label in labels]
    return Grid(
        "bytes",
        "bytes per iteration",
        Scale.BYTES,
        labels,
        tuple(
            Series(mode, partial(measure, mode=mode), partial(paper, when=when) if when else None, text=_bytes_text)
            for mode, when in ((GRAPH_MODE, None), (PLACEMENT_MODE, "before"), (INDIRECTION_MODE, "after"))
        ),
        [Point("all workloads, before and after", _sum_text(pairs) if printed else NOT_HELD, _sum_text(own))],
        "before and after indirection, ",
        more,
    )


def _bytes_text(count: float) -> str:
    return format_bytes(count).replace(".0 ", " ") if count else ""


def _sum_text(pairs: list[tuple[float | None, float | None]]) -> str:
    whole = [(before, after) for before, after in pairs if before is not None and after is not None]
    sums = (format_bytes(sum(side)) for side in zip(*whole, strict=True))
    return f"{' to '.join(sums)} in {len(whole)}" if whole else NOT_MEASURED


def copy_share(exhibit: Exhibit, results: Results) -> Grid:
    """Show the time saved by indirection in percent of the host time with copies; negative if it is slower."""
    shares = results.published.copy_share_percent[exhibit.source]

    def measure(label: str) -> Bar:
        ratio = results.ratio(label, INDIRECTION_MODE, PLACEMENT_MODE)
        if ratio.value is None or ratio.interval is None:
            return ratio
        low, share, high = (100 * (1 - 1 / one) for one in (ratio.interval[0] or 1e-9, ratio.value, ratio.interval[1]))
        return Bar(share, (low, high), failure=ratio.failure)

    found = {label: measure(label).value for label in shares}
    texts = {label: NOT_MEASURED if value is None else f"{value:.1f} %" for label, value in found.items()}
    return Grid(
        "percent",
        f"% of {PLACEMENT_MODE}'s host time",
        Scale.LINEAR,
        exhibit.labels(results),
        (Series("share that indirection takes away", measure, shares.get, column="share", text="{:.1f}".format),),
        [Point(label, f"{share:g} %", texts[label]) for label, share in shares.items()],
        "share of copies, ",
        shown=(-40, 60),
    )


def overhead(exhibit: Exhibit, results: Results) -> Grid:
    """Show by which share reading inputs in place reduces an iteration's time outside of its CUDA graphs."""

    def of(label: str, mode: str, column: str) -> float | None:
        cell = results.passed(label, mode)
        return floor.METRIC.of_row(cell).get(column) if cell is not None else None

    def measure(label: str) -> Bar:
        whole, graphs = (of(label, PLACEMENT_MODE, column) for column in ("whole_us", "floor_us"))
        in_place = of(label, INDIRECTION_MODE, "whole_us")
        if whole is None or graphs is None or in_place is None or whole <= graphs:
            state = results.state(label, PLACEMENT_MODE, INDIRECTION_MODE)
            return Bar(failure=state or f"distance to the floor {NOT_MEASURED}")
        return Bar(100 * (whole - in_place) / (whole - graphs))

    labels = exhibit.labels(results)
    found = [value for label in labels if (value := measure(label).value) is not None]
    median = f"{statistics.median(found):.0f} % (median of {len(found)})" if found else NOT_MEASURED
    return Grid(
        "percent",
        f"% of {PLACEMENT_MODE}'s time beyond its graphs",
        Scale.LINEAR,
        labels,
        (Series("copies", measure, text="{:.0f}".format),),
        [
            Point(
                "copies, of a graph's overhead", f"{exhibit.headline(results)['copies_of_overhead_percent']} %", median
            )
        ],
        shown=(-100, 150),
    )


CANDIDATE_OF = {"no graph": "none", "copies": "copy", "in place": "indirection"}
"""The names that rows of Encore 0.1 have for the decisions of `optimizations.selection`."""


@dataclass(frozen=True, slots=True)
class SelectedFunction:
    """Describe a function of which graphs are recorded.

    Attributes:
        group: the group of functions that were timed together.
        kept: "none" (no graph), "copy" or "indirection"; None if undecided.
        median_us: time of an iteration by candidate, of those that were timed.
    """

    group: int
    kept: str | None
    median_us: Mapping[str, float]

    def gain(self, candidate: str | None) -> float | None:
        """Return the speed-up of the candidate over no graph; None if either was not timed."""
        without, own = self.median_us.get("none"), self.median_us.get(candidate or "")
        return without / own if without and own else None


def selected_functions(cell: Cell | None) -> Iterator[SelectedFunction]:
    """Yield the functions of a cell that passed, in the order of its report; none where nothing was selected."""
    if cell is None or cell.status is not Status.PASS or cell.metrics is None:
        return
    reports: list[Any] = cell.metrics.encore_report or []
    records = [record for graph in reports for record in graph.get("selection") or ()]
    for number, record in enumerate(records):
        if "decision" in record:
            found = {CANDIDATE_OF[name]: time for name, time in record["median_us"]}
            yield SelectedFunction(number, CANDIDATE_OF.get(record["decision"]), found)
        elif "candidates" in record and isinstance(record.get("group"), int):
            found = {one["candidate"]: one["median_us"] for one in record["candidates"] if one["median_us"]}
            yield SelectedFunction(record["group"], record["kept"], found)


def judged_groups(cell: Cell | None) -> list[SelectedFunction]:
    """Return the first function of each group of a cell: all functions of a group have its times."""
    groups: dict[int, SelectedFunction] = {}
    for function in selected_functions(cell):
        groups.setdefault(function.group, function)
    return list(groups.values())


_CLASSES = ("faster", "within 2 %", "slower")
_EDGE = 1.02
"""PyGraph's classes: faster or slower by more than 2 %."""
_SPLIT = re.compile(rf"{TP_MARK}(\d+)")


@dataclass(frozen=True, slots=True)
class _Gains:
    """Hold the speed-ups over no CUDA graphs by mode, slowest first.

    `unit` is the counted unit, `papers` the mode that corresponds to the paper's CUDA graphs, `note` describes which
    units are counted.
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
    found = {
        mode: results.gains(results.ratios.labels, mode) for mode in (UNPARTITIONED_MODE, GRAPH_MODE, DEFAULT_MODE)
    }
    measured = [set(own) for own in found.values() if own]
    common = _once(set.intersection(*measured)) if measured else set()
    by_mode = {mode: sorted((own[label], label) for label in own.keys() & common) for mode, own in found.items()}
    return _Gains("workloads", UNPARTITIONED_MODE, by_mode, "Counted are the workloads that all modes have.")


def _of_graphs(results: Results) -> _Gains:
    """Collect groups of graphs that were timed without a graph, with stock's replay, and in the chosen variant.

    A timed workload counts by itself, with or without a decision: where it is split over GPUs, a decision may concern
    only a part of it, such as two graphs among hundreds.
    """
    timed: dict[str, list[tuple[float, float | None, str]]] = {}
    for label in results.ratios.labels:
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
    """Return one row for each workload: the one that is not split, else that of the fewest GPUs.

    The others are the same program.
    """
    fewest: dict[str, tuple[int, str]] = {}
    for label in labels:
        gpus = _SPLIT.search(label)
        row = (int(gpus[1]) if gpus else 0, label)
        whole = _SPLIT.sub("", label)
        fewest[whole] = min(row, fewest.get(whole, row))
    return {label for _, label in fewest.values()}


def distribution(exhibit: Exhibit, results: Results) -> Made:
    """Show share of workloads up to a ratio over compile, for stock's graphs and for Encore."""
    gains = _gains(results)
    published = str(exhibit.headline(results)["graphs_slower_share"])
    lines, points = {}, []
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
            lines[mode] = ((found[0][0], 0.0), *steps)
    slower_papers, _, whole = published.partition(" of ")
    share = 100 * float(slower_papers) / float(whole.split()[0])
    chart = LineChart(
        exhibit.stem,
        exhibit.title(results.published),
        f"times faster than {REFERENCE_MODE}" if gains.unit == "workloads" else "times faster than without a graph",
        f"% of {gains.unit} up to that",
        lines,
        shares=True,
        published=((1.0, share, f"published: {share:.0f} % of CUDA graphs are slower"),),
        note=f"Left of the dotted line CUDA graphs cost more than they save. {gains.note}",
    )
    return exhibit.whole(results, rows, points, chart)


def mixed(exhibit: Exhibit, results: Results) -> Made:
    """Count the applications with several graphs where some are faster than without and others slower."""
    rows: list[Row] = []
    count = 0
    for label in sorted(_once(results.ratios.labels)):
        groups = judged_groups(results.passed(label, DEFAULT_MODE))
        gains = [gain for group in groups if (gain := group.gain("copy")) is not None]
        if len(gains) > 1:
            faster = sum(gain > 1 for gain in gains)
            count += 0 < faster < len(gains)
            rows.append({"workload": label, "graphs": len(gains), "faster": faster, "slower": len(gains) - faster})
    measured = f"{count} of {len(rows)}" if rows else NOT_MEASURED
    published = exhibit.headline(results)["mixed_applications"]
    ends = [{"workload": f"with both kinds: {measured}", "published": published}]
    point = Point("applications with faster and slower graphs", published, measured)
    return exhibit.whole(results, rows, [point], summary=ends, columns=["workload"])


def classes(exhibit: Exhibit, results: Results) -> Grid:
    """Show shares of workloads that stock's graphs, and Encore, make faster, do not change, or make slower."""
    headline = exhibit.headline(results)
    printed = dict(zip(_CLASSES, ("graphs_faster_2pct", "graphs_same", "graphs_slower"), strict=True))
    whole = int(headline["graphs"])
    gains = _gains(results)

    def measure(name: str, mode: str) -> Bar:
        values = [value for value, _ in gains.by_mode[mode]]
        count = sum(_CLASSES[0 if one > _EDGE else 2 if one < 1 / _EDGE else 1] == name for one in values)
        if not values:
            return Bar(failure=NOT_MEASURED)
        return Bar(100 * count / len(values), label=f"{count} of {len(values)}")

    def paper(name: str) -> float:
        return 100 * float(headline[printed[name]]) / whole

    return Grid(
        "percent",
        f"% of {gains.unit}",
        Scale.PERCENT,
        _CLASSES,
        tuple(
            Series(mode, partial(measure, mode=mode), paper if mode == gains.papers else None) for mode in gains.by_mode
        ),
        [
            Point(
                f"{name} in {mode}",
                f"{headline[printed[name]]} of {whole}" if mode == gains.papers else None,
                measure(name, mode).label or NOT_MEASURED,
            )
            for mode in gains.by_mode
            for name in _CLASSES
        ],
        f"share of {whole} CUDA graphs, ",
        lambda name: {f"{mode}_count": measure(name, mode).label for mode in gains.by_mode},
        gains.note,
        group="class",
        origin=results.provenance(),
    )


_COUNTS = ("total", "enabled", "indirected", "disabled", "undecided")


def served(exhibit: Exhibit, results: Results) -> Made:
    """Show a row per published workload, and the sums."""
    rows: list[Row] = []
    sums = dict.fromkeys(_COUNTS, 0)
    labels = exhibit.labels(results)
    for label in labels:
        kept = [one.kept for one in selected_functions(results.passed(label, DEFAULT_MODE))]
        if not kept:
            rows.append({"workload": label, "missing": results.state(label, DEFAULT_MODE) or "no graph was recorded"})
            continue
        in_place = kept.count("indirection")
        counts = (len(kept), kept.count("copy") + in_place, in_place, kept.count("none"), kept.count(None))
        rows.append({"workload": label, **dict(zip(_COUNTS, counts, strict=True))})
        sums = {name: sums[name] + count for name, count in zip(_COUNTS, counts, strict=True)}
    total, enabled = (exhibit.headline(results).get(name) for name in ("graphs_total", "graphs_enabled"))
    summary: list[Row] = [{"workload": "all", **sums}] if sums["total"] else []
    summary += [{"workload": "published", "total": total, "enabled": enabled}] if total is not None else []
    printed = f"{enabled} of {total}" if total is not None else NOT_HELD
    measured = f"{sums['enabled']} of {sums['total']}" if sums["total"] else NOT_MEASURED
    point = Point("CUDA graphs that serve calls", printed, measured)
    origin = results.provenance(labels)
    return exhibit.whole(results, rows, [point], summary=summary, columns=["workload", *_COUNTS], origin=origin)
