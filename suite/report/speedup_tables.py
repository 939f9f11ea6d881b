"""Make tables of speed-ups of a run's modes: per workload with intervals and verdicts, and on average.

Note [The same against the same]: every FAST or SLOW between two modes that are the same program is a false finding, so
their share among these pairs measures the reliability of other verdicts. Modes count as the same program if one
declares it (`suite.measure.modes.Mode.same_as`), and both ran the same kernels in equally many graphs and copied as
much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from suite.measure.metrics import floor
from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, MODES, REFERENCE_MODE
from suite.report.cell_tables import Row, host_median_us
from suite.report.compare import (
    STOCK_MODES,
    UNSETTLED,
    Comparison,
    Kernels,
    Ratios,
    baselines,
    mean_text,
)
from suite.report.published import Published
from suite.report.runs import cell_label, row_groups
from suite.report.table import Table, make_table
from suite.results.schema import Cell, Status
from suite.results.stats import Verdict

KERNELS_NOTE = (
    f"{Kernels.RETUNED.value}: the modes do not run the same kernels; {Kernels.UNSEEN.value}: which kernels they ran "
    "was not recorded; such a ratio has no verdict and is in no mean."
)
"""Note under tables with ratios whose kernels may differ."""


def all_tables(ratios: Ratios, published: Published) -> tuple[Table, ...]:
    """Make every table of speed-ups, in the order of the report."""
    return (
        headline(ratios, published),
        *(overview(ratios, published, baseline) for baseline in OVERVIEWS.values()),
        speedups(ratios),
        same_program(ratios),
    )


OVERVIEWS = {"overview": REFERENCE_MODE, "over_graphs": GRAPH_MODE}
"""The tables that set all modes next to each other, with what their speed-ups are over."""


def overview(ratios: Ratios, published: Published, baseline: str = REFERENCE_MODE) -> Table:
    """Set a mode's time and each other mode's speed-up over it side by side, a row for each workload."""
    over = {cell.mode for cell in ratios.cells if baseline in baselines(cell)}
    modes = [mode for mode in ratios.modes if mode in over]
    time_column = f"{baseline}_us"
    rows = []
    for label in ratios.labels if modes or baseline == REFERENCE_MODE else ():
        reference = ratios.cell(label, baseline)
        row: Row = {"workload": label}
        if reference is not None:
            passed = reference.status is Status.PASS
            row[time_column] = host_median_us(reference) if passed else reference.status.value
        for mode in modes:
            row[mode] = ratio_text(ratios, label, mode, baseline)
        rows.append(row)
    return make_table(
        next(name for name, mode in OVERVIEWS.items() if mode == baseline),
        f"Speed-up over {baseline}",
        f"Host time of {baseline} (median) and how many times faster each mode is, with its 95 % interval and "
        f"verdict. A cell without a ratio has the reason. {KERNELS_NOTE} "
        f"{_MEANS_NOTE}",
        rows,
        _group_means(ratios, published, modes, baseline),
        ["workload", time_column],
    )


_MEANS_NOTE = "Geometric means go over the rows of one group that all of these modes have, and say how many these are."


def _group_means(ratios: Ratios, published: Published, modes: Sequence[str], baseline: str) -> list[Row]:
    """Make a row of geometric means for each group of rows that has any."""
    rows: list[Row] = []
    for group in row_groups(ratios.labels, published):
        means = ratios.means(group.labels if group.has_means else (), [(mode, baseline) for mode in modes])
        if means:
            texts = {mode: mean_text(mean) for (mode, _), mean in means.items()}
            rows.append({"workload": f"geomean: {group.title}", **texts})
    return rows


def headline(ratios: Ratios, published: Published) -> Table:
    """List each of GraCE's workloads (else all) in the default mode: its speed-up over stock and distance to the floor.

    The last rows have the geometric means and the verdicts.
    """
    rows: list[Row] = []
    groups = row_groups(ratios.labels, published)
    for label in groups[0].labels if groups else ():
        reference, cell = ratios.cell(label, REFERENCE_MODE), ratios.cell(label, DEFAULT_MODE)
        if reference is None or cell is None or not (reference.status is cell.status is Status.PASS):
            continue
        row: Row = {"workload": label, f"{REFERENCE_MODE}_us": host_median_us(reference)}
        for baseline in STOCK_MODES:
            row[f"over_{baseline}"] = ratio_text(ratios, label, DEFAULT_MODE, baseline)
        for mode in (GRAPH_MODE, DEFAULT_MODE):
            own = ratios.cell(label, mode)
            row[f"{mode}_over_floor"] = own and floor.METRIC.of_row(own).get("over_floor_ratio")
        rows.append(row)
    labels = [str(row["workload"]) for row in rows]
    means = {
        f"over_{baseline}": mean_text(mean)
        for baseline in STOCK_MODES
        if (mean := ratios.mean(labels, DEFAULT_MODE, baseline)) is not None
    }
    verdicts = {f"over_{baseline}": _verdicts_cell(ratios, baseline, labels) for baseline in STOCK_MODES}
    return make_table(
        "headline",
        "The papers' workloads under Encore",
        f"over: how many times faster {DEFAULT_MODE} is than {REFERENCE_MODE} (no graphs) and {GRAPH_MODE} (stock's), "
        "host time, with the 95 % interval and verdict. Geometric means go over the rows with the same kernels and a "
        f"settled {DEFAULT_MODE}; {UNSETTLED}: it was not, so that the row has no verdict. over floor: how "
        "many times as long as its graphs alone an iteration takes.",
        rows,
        [{"workload": "geometric mean", **means}, {"workload": "verdicts", **verdicts}] if means else [],
    )


def _verdicts_cell(ratios: Ratios, baseline: str, labels: Sequence[str]) -> str:
    """Count the rows that have each verdict, and those without one."""
    counts = ratios.verdicts(labels, DEFAULT_MODE, baseline)
    return ", ".join(f"{counts[one]} {one or 'none'}" for one in (*Verdict, None) if counts[one])


def speedups(ratios: Iterable[Comparison]) -> Table:
    """List each mode over each of its baselines."""
    return make_table(
        "speedups",
        "Every mode over its baselines",
        "Of host time to completion. low and high bound the 95 % interval; blocks: the fewest of a process. Where "
        "modes were not measured in turn, drift is in the ratio.",
        map(_speedup_row, ratios),
    )


def ratio_text(ratios: Ratios, label: str, mode: str, baseline: str) -> str:
    """Write a mode's speed-up over a baseline, with interval and verdict, or why there is none."""
    item = ratios.find(label, mode, baseline)
    if item is None or item.ratio is None:
        return "not run" if item is None else item.missing or "no samples"
    aside = "" if item.alternating else ", not alternating"
    return f"{item.ratio.text()} {item.mark}{aside}"


def _speedup_row(item: Comparison) -> Row:
    ratio = item.ratio
    return {
        "workload": cell_label(item.cell),
        "mode": item.cell.mode,
        "baseline": item.baseline,
        "speedup": ratio and ratio.value,
        "low": ratio and ratio.low,
        "high": ratio and ratio.high,
        "verdict": item.verdict and item.verdict.value,
        "kernels": item.kernels and item.kernels.value,
        "processes": ratio and ratio.processes,
        "blocks": ratio and ratio.blocks,
        "alternating": item.alternating if ratio else None,
        "missing": item.missing,
    }


def same_program_pairs(ratios: Ratios) -> list[Comparison]:
    """Return comparisons of passed cells of one row that are the same program."""
    found = []
    for cell in ratios.cells:
        for other in MODES[cell.mode].same_as if cell.mode in MODES else ():
            reference = ratios.cell(cell_label(cell), other)
            if reference is not None and cell.status is reference.status is Status.PASS and same_work(cell, reference):
                found.append(ratios.against(cell, other))
    return [pair for pair in found if pair.kernels is Kernels.SAME]


def same_work(cell: Cell, other: Cell) -> bool:
    """Return whether both launched as much in as many graphs and copied as much."""
    both = [[one.at("metrics.coverage"), one.at("metrics.copies")] for one in (cell, other)]
    return both[0] == both[1] and both[0][0] is not None


def false_findings(pairs: list[Comparison]) -> list[Comparison]:
    """Return the comparisons of equal programs with verdict faster or slower."""
    return [pair for pair in pairs if pair.verdict in (Verdict.FAST, Verdict.SLOW)]


def same_program(ratios: Ratios) -> Table:
    """Show the ratios of modes that are the same program, with the rate of false findings."""
    pairs = same_program_pairs(ratios)
    wrong, undecided = len(false_findings(pairs)), sum(pair.verdict is Verdict.AMBG for pair in pairs)
    rate = f" ({100 * wrong / len(pairs):.1f} %)" if pairs else ""
    return make_table(
        "same_program",
        "The same against the same",
        f"False findings: {wrong} of {len(pairs)} verdicts{rate} on modes that are the same program are FAST or "
        f"SLOW, {undecided} are AMBG.",
        map(_speedup_row, pairs),
    )
