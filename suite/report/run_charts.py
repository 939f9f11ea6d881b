"""The figures of a recorded run, as charts. A figure without a single value is left out, not drawn empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from suite.modes import DEFAULT_MODE, MODES, REFERENCE_MODE
from suite.report import compare
from suite.report.cell_tables import compile_conditions, host_median_us, replay_peak_bytes
from suite.report.chart import Bar, Chart, Scale
from suite.report.compare import Comparison, Kernels, MeanSpeedup, TimeKind
from suite.report.load import Run, cell_label, is_as_published, mode_order
from suite.report.published import Published
from suite.schema import Cell, Status
from suite.stats import Verdict

NAMES = ("speedup", "time_split", "coverage", "copies", "memory", "compile_time")
GEOMEAN = "geomean"
COMMON_GEOMEAN = "geomean*"


def all_charts(
    run: Run, comparisons: Sequence[Comparison], means: Sequence[MeanSpeedup], published: Published
) -> tuple[Chart, ...]:
    """Every figure this run has values for."""
    charts = (
        speedup(run, comparisons, means, published),
        time_split(run),
        coverage(run, published),
        copies(run, published),
        memory(run),
        compile_time(run),
    )
    return tuple(chart for chart in charts if any(bar.value is not None for bar in chart.bars.values()))


def speedup(run: Run, comparisons: Sequence[Comparison], means: Sequence[MeanSpeedup], published: Published) -> Chart:
    """Latency of each mode over the reference mode, per workload, and the geometric means."""
    modes = tuple(mode for mode in run.modes if mode != REFERENCE_MODE)
    bars: dict[tuple[str, str], Bar] = {}
    for cell in run.cells:
        item = compare.find(comparisons, cell, REFERENCE_MODE, TimeKind.LATENCY)
        if item is None:
            continue
        paper = published.speedup("grace", cell.workload, cell.mode, REFERENCE_MODE) if is_as_published(cell) else None
        if item.ratio is None or item.kernels is Kernels.OTHER:
            bar = Bar(failure=item.missing or "void", published=paper)
        else:
            bar = Bar(
                item.ratio.value,
                _interval(item.ratio.low, item.ratio.high),
                published=paper,
                undecided=item.verdict in (Verdict.AMBG, None),
            )
        bars[cell_label(cell), cell.mode] = bar
    counts, summary = [], {GEOMEAN: "Geomean over workloads"}
    for mean in means:
        if (mean.baseline, mean.metric) != (REFERENCE_MODE, TimeKind.LATENCY):
            continue
        group = COMMON_GEOMEAN if mean.common else GEOMEAN
        bars[group, mean.mode] = Bar(mean.mean.value, _interval(mean.mean.low, mean.mean.high))
        if mean.common:
            summary[group] = f"Geomean*: the {mean.mean.count} where every mode passed"
        else:
            counts.append(f"{mean.mode} {mean.mean.count}")
    summary[GEOMEAN] += f": {', '.join(counts) or 'none'} of {len(run.labels)}"
    return Chart(
        "speedup",
        f"Speed-up over {REFERENCE_MODE} (host time of one iteration)",
        f"times faster than {REFERENCE_MODE}",
        Scale.RATIO,
        (*run.labels, *summary),
        modes,
        bars,
        summary_groups=len(summary),
        published=published.sources["grace"].setting,
        note=f"Whiskers: 95 % intervals. {'. '.join(summary.values())}.",
        shown=(1 / 8, 8),
    )


def time_split(run: Run) -> Chart:
    """Host time per iteration as kernel time and the rest, in percent of the reference mode's host time."""

    def bar(cell: Cell) -> Bar:
        reference = run.find(cell_label(cell), REFERENCE_MODE)
        whole = host_median_us(reference) if reference and reference.status is Status.PASS else None
        host, kernel = host_median_us(cell), cell.metrics.kernel_time_us if cell.metrics else None
        if whole is None or host is None or kernel is None:
            return Bar()
        return Bar(value=100 * kernel / whole, total=100 * host / whole)

    return _per_cell(
        run,
        Chart(
            "time_split",
            "Host time of one iteration: kernel time and the rest",
            f"% of {REFERENCE_MODE}'s host time",
            Scale.LINEAR,
            run.labels,
            run.modes,
            {},
            parts=("kernel time", "the rest"),
            note="The rest: launches, copies, checks, waiting. Where kernels overlap, the sum of their times may pass "
            "the host time; the bar then has no rest. Times in microseconds are in the table.",
            shown=(0, 200),
        ),
        bar,
    )


def coverage(run: Run, published: Published) -> Chart:
    """Kernels launched by CUDA graphs in percent, for modes that have some."""

    def bar(cell: Cell) -> Bar:
        paper = published.coverage("grace", cell.workload, cell.mode) if is_as_published(cell) else None
        measured = cell.metrics.coverage if cell.metrics else None
        return Bar(measured.percent if measured else None, published=paper)

    return _per_cell(
        run,
        Chart(
            "coverage",
            "Coverage: kernels launched by CUDA graphs",
            "% of kernels in one iteration",
            Scale.PERCENT,
            run.labels,
            _graph_modes(run),
            {},
            published=published.sources["grace"].setting,
            note=_of_selection(run).strip(),
        ),
        bar,
    )


def _of_selection(run: Run) -> str:
    """Why mode `encore` may have no kernels in graphs, or the copies of stock, where the other modes have not."""
    if DEFAULT_MODE not in run.modes:
        return ""
    return f" In {DEFAULT_MODE} selection kept what is fastest: no graph (0), a graph with copies, or one without."


def copies(run: Run, published: Published) -> Chart:
    """Data and pointer bytes that replay copies per iteration, for modes that have CUDA graphs."""

    def bar(cell: Cell) -> Bar:
        paper = published.copied_bytes("grace", cell.workload, cell.mode) if is_as_published(cell) else None
        measured = cell.metrics.copies if cell.metrics else None
        if measured is None or measured.placeholder_bytes is None:
            return Bar(published=paper)
        return Bar(float(measured.placeholder_bytes + (measured.pointer_bytes or 0)), published=paper)

    return _per_cell(
        run,
        Chart(
            "copies",
            "Bytes copied for replay: placeholder data and pointers",
            "bytes per iteration",
            Scale.BYTES,
            run.labels,
            _graph_modes(run),
            {},
            published=published.sources["grace"].setting,
            note="Published bytes next to stock modes are GraCE's before indirection, with its placement."
            + _of_selection(run),
        ),
        bar,
    )


def memory(run: Run) -> Chart:
    """Peak reserved memory in steady replay over that of the reference mode."""

    def bar(cell: Cell) -> Bar:
        reference = run.find(cell_label(cell), REFERENCE_MODE)
        whole, own = replay_peak_bytes(reference), replay_peak_bytes(cell)
        return Bar(own / whole) if own is not None and whole else Bar()

    return _per_cell(
        run,
        Chart(
            "memory",
            f"Peak memory of steady replay over that of {REFERENCE_MODE}",
            f"times {REFERENCE_MODE}'s bytes",
            Scale.RATIO,
            run.labels,
            tuple(mode for mode in run.modes if mode != REFERENCE_MODE),
            {},
            note="Bytes that PyTorch's allocator has reserved, graph pools included; below 1 is less.",
        ),
        bar,
    )


def compile_time(run: Run) -> Chart:
    """Time to the first result, and through warm-up."""
    return _per_cell(
        run,
        Chart(
            "compile_time",
            "Compile time",
            "seconds",
            Scale.LINEAR,
            run.labels,
            run.modes,
            {},
            parts=("to the first result", "rest of warm-up and recording"),
            note=f"Measured: {'; '.join(_compile_conditions(run))}.",
        ),
        lambda cell: Bar(cell.compile.first_call_s, total=cell.compile.warm_up_s) if cell.compile else Bar(),
    )


def _compile_conditions(run: Run) -> list[str]:
    """How compile times were measured, each way with its modes, in the order of the modes."""
    found: dict[str, list[str]] = {}
    for cell in sorted(run.cells, key=lambda cell: mode_order(cell.mode)):
        if cell.compile is not None and cell.status is Status.PASS:
            modes = found.setdefault(compile_conditions(cell.compile), [])
            modes += [cell.mode] if cell.mode not in modes else []
    return [f"{conditions} ({', '.join(modes)})" for conditions, modes in found.items()]


def _per_cell(run: Run, empty: Chart, bar: Callable[[Cell], Bar]) -> Chart:
    """The chart with a bar for every cell in one of its modes; of a failed cell the bar is its status."""
    bars = {
        (cell_label(cell), cell.mode): bar(cell) if cell.status is Status.PASS else Bar(failure=cell.status.value)
        for cell in run.cells
        if cell.mode in empty.series
    }
    return replace(empty, bars=bars)


def _graph_modes(run: Run) -> tuple[str, ...]:
    """Modes of the run that have CUDA graphs, and those this version does not know."""
    return tuple(mode for mode in run.modes if mode not in MODES or MODES[mode].needs_gpu)


def _interval(low: float, high: float) -> tuple[float, float] | None:
    """An interval to draw; none where it is open (a single block)."""
    return (low, high) if math.isfinite(high) else None
