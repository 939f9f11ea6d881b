"""Show coverage and copies of the papers: GraCE's and PyGraph's Tables 2 and 3, and what copies cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from optimizations.byte_units import format_bytes, parse_bytes
from suite.measure.metrics import floor
from suite.measure.modes import GRAPH_MODE, INDIRECTION_MODE, PLACEMENT_MODE, UNPARTITIONED_MODE
from suite.report.chart import Scale
from suite.report.paper.exhibit import (
    NOT_HELD,
    NOT_MEASURED,
    Exhibit,
    Grid,
    Made,
    Point,
    Results,
    Series,
    Value,
    known,
    make_grid,
)


def make_coverage(exhibit: Exhibit, results: Results) -> Made:
    """Show the paper's rows, with every mode of the suite that uses CUDA graphs."""
    paper = results.published.coverage_percent[exhibit.source]
    labels = tuple(sorted(paper))

    def measure(label: str, mode: str) -> Value:
        cell = results.passed(label, mode)
        covered = cell.metrics.coverage if cell and cell.metrics else None
        return known(None if covered is None else covered.percent, results.state(label, mode))

    systems = {UNPARTITIONED_MODE: "stock", PLACEMENT_MODE: "placement"}
    series = tuple(
        Series(
            mode,
            lambda label, mode=mode: measure(label, mode),  # type: ignore[misc]
            (lambda label, mode=mode: getattr(paper[label], systems[mode])) if mode in systems else None,  # type: ignore[misc]
            text="{:.1f}".format,
        )
        for mode in (UNPARTITIONED_MODE, GRAPH_MODE, PLACEMENT_MODE, INDIRECTION_MODE)
    )
    axis = "% of kernels in one iteration"
    grid = Grid("percent", axis, Scale.PERCENT, labels, series, "stock and after placement, ")
    points = []
    for label in labels:
        ours = [measure(label, mode).number for mode in systems]
        texts = (NOT_MEASURED if percent is None else f"{percent:.4g} %" for percent in ours)
        printed = f"{paper[label].stock:g} % to {paper[label].placement:g} %"
        points.append(Point(label, printed, " to ".join(texts)))
    return make_grid(exhibit, results, grid, points)


def make_bytes(exhibit: Exhibit, results: Results) -> Made:
    """Show bytes by workload, with the number of recorded graphs."""
    printed = results.published.bytes_copied.get(exhibit.source, {})
    labels = exhibit.labels(results)

    def measure(label: str, mode: str) -> Value:
        cell = results.passed(label, mode)
        copies = cell.metrics.copies if cell and cell.metrics else None
        counted = copies is not None and copies.placeholder_bytes is not None
        count = (copies.placeholder_bytes or 0) + (copies.pointer_bytes or 0) if copies and counted else None
        return known(count, results.state(label, mode))

    def paper(label: str, when: str) -> float | None:
        return parse_bytes(getattr(printed[label], when)) if label in printed else None

    def more(label: str) -> dict[str, object]:
        cell, row = results.passed(label, INDIRECTION_MODE), printed.get(label)
        graphs = cell.metrics.graphs if cell and cell.metrics else None
        return {"graphs": graphs and graphs.cuda_graphs, "published_graphs": row and row.graphs}

    series = tuple(
        Series(
            mode,
            lambda label, mode=mode: measure(label, mode),  # type: ignore[misc]
            (lambda label, when=when: paper(label, when)) if when else None,  # type: ignore[misc]
            text=_bytes_text,
        )
        for mode, when in ((GRAPH_MODE, None), (PLACEMENT_MODE, "before"), (INDIRECTION_MODE, "after"))
    )
    marks = "before and after indirection, "
    grid = Grid("bytes", "bytes per iteration", Scale.BYTES, labels, series, marks, more)
    pairs = [(paper(label, "before"), paper(label, "after")) for label in labels]
    own = [(measure(label, PLACEMENT_MODE).number, measure(label, INDIRECTION_MODE).number) for label in labels]
    point = Point("all workloads, before and after", _sum_text(pairs) if printed else NOT_HELD, _sum_text(own))
    return make_grid(exhibit, results, grid, [point])


def _bytes_text(count: float) -> str:
    return format_bytes(count).replace(".0 ", " ") if count else ""


def _sum_text(pairs: list[tuple[float | None, float | None]]) -> str:
    whole = [(before, after) for before, after in pairs if before is not None and after is not None]
    sums = (format_bytes(sum(side)) for side in zip(*whole, strict=True))
    return f"{' to '.join(sums)} in {len(whole)}" if whole else NOT_MEASURED


def make_share(exhibit: Exhibit, results: Results) -> Made:
    """Show what indirection takes away, in percent of the host time with copies; below 0 it costs more than it
    saves."""
    shares = results.published.copy_share_percent[exhibit.source]

    def measure(label: str) -> Value:
        ratio = results.ratio(label, INDIRECTION_MODE, PLACEMENT_MODE)
        if ratio.number is None or ratio.interval is None:
            return ratio
        low, share, high = (
            100 * (1 - 1 / value) for value in (ratio.interval[0] or 1e-9, ratio.number, ratio.interval[1])
        )
        return Value(share, (low, high), ratio.missing)

    series = Series("share that indirection takes away", measure, shares.get, column="share", text="{:.1f}".format)
    axis = f"% of {PLACEMENT_MODE}'s host time"
    labels = exhibit.labels(results)
    grid = Grid("percent", axis, Scale.LINEAR, labels, (series,), "share of copies, ", shown=(-40, 60))
    found = {label: measure(label).number for label in shares}
    texts = {label: NOT_MEASURED if value is None else f"{value:.1f} %" for label, value in found.items()}
    return make_grid(
        exhibit, results, grid, [Point(label, f"{share:g} %", texts[label]) for label, share in shares.items()]
    )


def make_overhead(exhibit: Exhibit, results: Results) -> Made:
    """Show the share of what an iteration takes beyond its CUDA graphs that is gone when inputs are read in place."""

    def of(label: str, mode: str) -> Mapping[str, float | None]:
        cell = results.passed(label, mode)
        return floor.METRIC.of_row(cell) if cell is not None else {}

    def measure(label: str) -> Value:
        placed, in_place = of(label, PLACEMENT_MODE), of(label, INDIRECTION_MODE).get("whole_us")
        whole, graphs = placed.get("whole_us"), placed.get("floor_us")
        if whole is None or graphs is None or in_place is None or whole <= graphs:
            state = results.state(label, PLACEMENT_MODE) or results.state(label, INDIRECTION_MODE)
            return Value(missing=state or f"distance to the floor {NOT_MEASURED}")
        return Value(100 * (whole - in_place) / (whole - graphs))

    labels = exhibit.labels(results)
    series = Series("copies", measure, text="{:.0f}".format)
    axis = f"% of {PLACEMENT_MODE}'s time beyond its graphs"
    grid = Grid("percent", axis, Scale.LINEAR, labels, (series,), shown=(-100, 150))
    found = [value.number for label in labels if (value := measure(label)).number is not None]
    median = f"{statistics.median(found):.0f} % (median of {len(found)})" if found else NOT_MEASURED
    published = results.published.headline[exhibit.source]["copies_of_overhead_percent"]
    return make_grid(exhibit, results, grid, [Point("copies, of a graph's overhead", f"{published} %", median)])


_COVERAGE = (
    f"The paper's stock is {UNPARTITIONED_MODE}. A copy of inputs that is a kernel counts as one outside of graphs, in "
    "the papers too. Today's kernels are others and fewer: only the shares can be set side by side."
)
_BYTES = (
    "Before is the paper's placement without indirection, after its pointers; in the suite placement and indirection. "
    "Library versions decide which outputs take part in differentiation, and with them what training copies. Counted "
    "where the copy is made; the papers' training includes the optimizer, the suite's does not unless asked."
)
_SHARE = (
    f"Measured is what indirection takes away: the host time of {PLACEMENT_MODE} that {INDIRECTION_MODE} does not "
    "need, in percent, with its 95 % interval; below 0 it costs more than it saves. The paper gives the share of "
    "copies for two workloads."
)
_OVERHEAD = (
    f"Measured as what {INDIRECTION_MODE} saves of {PLACEMENT_MODE}'s time beyond its CUDA graphs alone (the metric "
    "floor), one iteration waited for at a time. Below 0, and above 100, other differences of the two modes outweigh "
    "the copies."
)

_UNKNOWN = f"{_BYTES} The paper prints 40 values; they are not known here."
_COVERED, _COPIED = "coverage by CUDA graphs, before and after placement", "bytes copied, before and after indirection"
EXHIBITS = (
    Exhibit("table2", "grace", "Table 2", _COVERED, _COVERAGE, make_coverage),
    Exhibit("table3", "grace", "Table 3", _COPIED, _BYTES, make_bytes),
    Exhibit("copy-share", "grace", "section 2.3.2", "what copying of inputs costs", _SHARE, make_share),
    Exhibit("pygraph-table2", "pygraph", "Table 2", _COVERED, _COVERAGE, make_coverage),
    Exhibit("pygraph-table3", "pygraph", "Table 3", _COPIED, _UNKNOWN, make_bytes),
    Exhibit("pygraph-section3", "pygraph", "section 3", "what a graph's overhead is made of", _OVERHEAD, make_overhead),
)
