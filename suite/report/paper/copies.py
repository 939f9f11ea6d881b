"""Show coverage and copies of the papers: GraCE's and PyGraph's Tables 2 and 3, and what copies cost."""

from __future__ import annotations

import statistics

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
    labels_of,
    make_grid,
)
from suite.report.published import PublishedCopies, PublishedCoverage


def make_coverage(exhibit: Exhibit, results: Results) -> Made:
    """Show the paper's rows, with every mode of the suite that uses CUDA graphs."""
    printed = results.published.coverage_percent[exhibit.source]

    def paper(label: str) -> PublishedCoverage | None:
        return printed.get(results.published.printed(exhibit.source, label))

    def measure(label: str, mode: str) -> Value:
        cell = results.passed(label, mode)
        covered = cell.metrics.coverage if cell and cell.metrics else None
        return known(None if covered is None else covered.percent, results.state(label, mode))

    systems = {UNPARTITIONED_MODE: "stock", PLACEMENT_MODE: "placement"}
    labels = tuple(label for label in labels_of(results, exhibit.source) if paper(label) is not None)
    series = tuple(
        Series(
            mode,
            lambda label, mode=mode: measure(label, mode),  # type: ignore[misc]
            (lambda label, mode=mode: getattr(paper(label), systems[mode])) if mode in systems else None,  # type: ignore[misc]
            text="{:.1f}".format,
        )
        for mode in (UNPARTITIONED_MODE, GRAPH_MODE, PLACEMENT_MODE, INDIRECTION_MODE)
    )
    grid = Grid(
        "percent", "% of kernels in one iteration", Scale.PERCENT, labels, series, "stock and after placement, "
    )
    points = [
        Point(label, _percents(paper(label)), _measured_percents([measure(label, mode).number for mode in systems]))
        for label in labels
    ]
    return make_grid(exhibit, results, grid, points=points)


def _percents(found: PublishedCoverage | None) -> str | None:
    return None if found is None else f"{found.stock:g} % to {found.placement:g} %"


def _measured_percents(found: list[float | None]) -> str:
    return " to ".join(NOT_MEASURED if percent is None else f"{percent:.4g} %" for percent in found)


def make_bytes(exhibit: Exhibit, results: Results) -> Made:
    """Show bytes by workload, with the number of recorded graphs."""
    printed = results.published.bytes_copied.get(exhibit.source, {})
    labels = labels_of(results, exhibit.source)

    def paper(label: str) -> PublishedCopies | None:
        return printed.get(results.published.printed(exhibit.source, label))

    def measure(label: str, mode: str) -> Value:
        cell = results.passed(label, mode)
        copies = cell.metrics.copies if cell and cell.metrics else None
        count = None
        if copies is not None and copies.placeholder_bytes is not None:
            count = copies.placeholder_bytes + (copies.pointer_bytes or 0)
        return known(count, results.state(label, mode))

    def before(label: str) -> float | None:
        return parse_bytes(row.before) if (row := paper(label)) else None

    def after(label: str) -> float | None:
        return parse_bytes(row.after) if (row := paper(label)) else None

    def more(label: str) -> dict[str, object]:
        cell, row = results.passed(label, INDIRECTION_MODE), paper(label)
        graphs = cell.metrics.graphs if cell and cell.metrics else None
        return {
            "graphs": graphs.cuda_graphs if graphs else None,
            "published_graphs": row.graphs if row else None,
        }

    series = tuple(
        Series(mode, lambda label, mode=mode: measure(label, mode), mark, text=_bytes_text)  # type: ignore[misc]
        for mode, mark in ((GRAPH_MODE, None), (PLACEMENT_MODE, before), (INDIRECTION_MODE, after))
    )
    grid = Grid(
        "bytes",
        "bytes per iteration",
        Scale.BYTES,
        labels,
        series,
        "before and after indirection, ",
        ("graphs", "published_graphs"),
        more,
    )
    pairs = [(before(label), after(label)) for label in labels]
    own = [(measure(label, PLACEMENT_MODE).number, measure(label, INDIRECTION_MODE).number) for label in labels]
    points = [Point("all workloads, before and after", _sum_text(pairs) if printed else NOT_HELD, _sum_text(own))]
    return make_grid(exhibit, results, grid, points=points)


def _bytes_text(count: float) -> str:
    return format_bytes(count).replace(".0 ", " ") if count else ""


def _sum_text(pairs: list[tuple[float | None, float | None]]) -> str:
    whole = [pair for pair in pairs if None not in pair]
    sums = [sum(value for value in side if value is not None) for side in zip(*whole, strict=True)]
    return f"{format_bytes(sums[0])} to {format_bytes(sums[1])} in {len(whole)}" if whole else NOT_MEASURED


def make_share(exhibit: Exhibit, results: Results) -> Made:
    """Show what indirection takes away, in percent of the host time with copies; below 0 it costs more than it
    saves."""
    shares = results.published.copy_share_percent[exhibit.source]

    def measure(label: str) -> Value:
        ratio = results.ratio(label, INDIRECTION_MODE, PLACEMENT_MODE)
        why = results.why_no_ratio(label, INDIRECTION_MODE, PLACEMENT_MODE)
        if ratio is None:
            return Value(missing=why)
        low, share, high = (100 * (1 - 1 / value) for value in (ratio.low or 1e-9, ratio.value, ratio.high))
        return Value(share, (low, high), why)

    series = Series("share that indirection takes away", measure, shares.get, column="share", text="{:.1f}".format)
    labels = labels_of(results, exhibit.source)
    axis = f"% of {PLACEMENT_MODE}'s host time"
    grid = Grid("percent", axis, Scale.LINEAR, labels, (series,), "share of copies, ", shown=(-40, 60))
    points = [Point(label, f"{share:g} %", _percent_text(measure(label).number)) for label, share in shares.items()]
    return make_grid(exhibit, results, grid, points=points)


def _percent_text(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f} %"


def make_overhead(exhibit: Exhibit, results: Results) -> Made:
    """Show the share of what an iteration takes beyond its CUDA graphs that is gone when inputs are read in place."""

    def of(label: str, mode: str, name: str) -> float | None:
        cell = results.passed(label, mode)
        return floor.METRIC.of_row(cell).get(name) if cell is not None else None

    def measure(label: str) -> Value:
        whole, graphs = of(label, PLACEMENT_MODE, "whole_us"), of(label, PLACEMENT_MODE, "floor_us")
        in_place = of(label, INDIRECTION_MODE, "whole_us")
        if whole is None or graphs is None or in_place is None or whole <= graphs:
            state = results.state(label, PLACEMENT_MODE) or results.state(label, INDIRECTION_MODE)
            return Value(missing=state or f"distance to the floor {NOT_MEASURED}")
        return Value(100 * (whole - in_place) / (whole - graphs))

    labels = labels_of(results, exhibit.source)
    series = Series("copies", measure, text="{:.0f}".format)
    axis = f"% of {PLACEMENT_MODE}'s time beyond its graphs"
    grid = Grid("percent", axis, Scale.LINEAR, labels, (series,), shown=(-100, 150))
    found = [value.number for label in labels if (value := measure(label)).number is not None]
    median = f"{statistics.median(found):.0f} % (median of {len(found)})" if found else NOT_MEASURED
    published = results.published.headline[exhibit.source]["copies_of_overhead_percent"]
    return make_grid(exhibit, results, grid, points=[Point("copies, of a graph's overhead", f"{published} %", median)])


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

EXHIBITS = (
    Exhibit(
        "table2", "grace", "Table 2", "coverage by CUDA graphs, before and after placement", _COVERAGE, make_coverage
    ),
    Exhibit("table3", "grace", "Table 3", "bytes copied, before and after indirection", _BYTES, make_bytes),
    Exhibit("copy-share", "grace", "section 2.3.2", "what copying of inputs costs", _SHARE, make_share),
    Exhibit(
        "pygraph-table2",
        "pygraph",
        "Table 2",
        "coverage by CUDA graphs, before and after placement",
        _COVERAGE,
        make_coverage,
    ),
    Exhibit(
        "pygraph-table3",
        "pygraph",
        "Table 3",
        "bytes copied, before and after indirection",
        f"{_BYTES} The paper prints 40 values; they are not known here.",
        make_bytes,
    ),
    Exhibit("pygraph-section3", "pygraph", "section 3", "what a graph's overhead is made of", _OVERHEAD, make_overhead),
)
