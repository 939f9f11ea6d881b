"""GraCE Fig. 3: what a few CPU tensors cost: the program as published against the same with them on the GPU."""

from __future__ import annotations

import math
import zlib

from suite import stats_across_runs as stats
from suite.errors import EncoreError
from suite.modes import PLACEMENT_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.compare import Kernels, compare_kernels
from suite.report.load import row_label
from suite.report.paper.exhibit import NOT_MEASURED, VOID, Exhibit, Made, Results, chart_or_none, reasons
from suite.report.table import make_table

_WORKLOADS = ("DALLE2", "MMC", "ST", "VM", "XLNET-I")
_REWRITTEN = "current"
"""The variant whose program keeps nothing on the CPU."""
_WITHOUT, _WITH = "rewritten, no graphs", "rewritten, whole graphs"
_DIFFERS = (
    f"The rewritten program is the variant {_REWRITTEN} where a workload has one (measured apart from the other, so "
    f"drift is in the ratio). The third bar is Encore's placement over {UNPARTITIONED_MODE} with the program as it is. "
    "MMC is not in the paper's figure."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Bars of published over rewritten program, without and with CUDA graphs, and of Encore's placement."""
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for label in _WORKLOADS:
        paper = results.published.rewritten_program.get(exhibit.source, {}).get(label, {})
        row: dict[str, object] = {"workload": label}
        whys: dict[str, str | None] = {}
        for series, mode, column, key in (
            (_WITHOUT, REFERENCE_MODE, "without_graphs", "without_graphs"),
            (_WITH, UNPARTITIONED_MODE, "with_graphs", "with_graphs"),
        ):
            ratio, why = _rewritten(results, label, mode)
            whys[series] = why
            row[f"{column}_published_speedup"] = paper.get(key)
            if ratio is None:
                bars[label, series] = Bar(failure=_short(why), published=paper.get(key))
                continue
            row |= {f"{column}_speedup": ratio.value, f"{column}_low": ratio.low, f"{column}_high": ratio.high}
            interval = (ratio.low, ratio.high) if math.isfinite(ratio.high) else None
            bars[label, series] = Bar(ratio.value, interval, published=paper.get(key), label=f"{ratio.value:.2f}")
        bars[label, PLACEMENT_MODE] = results.bar(label, PLACEMENT_MODE, UNPARTITIONED_MODE)
        if placed := results.ratio(label, PLACEMENT_MODE, UNPARTITIONED_MODE):
            row |= {"placement_speedup": placed.value, "placement_low": placed.low, "placement_high": placed.high}
        whys[PLACEMENT_MODE] = results.why_no_ratio(label, PLACEMENT_MODE, UNPARTITIONED_MODE)
        row["missing"] = reasons(whys)
        rows.append(row)
    columns = ["workload"]
    for name in ("without_graphs", "with_graphs"):
        columns += [f"{name}_speedup", f"{name}_low", f"{name}_high", f"{name}_published_speedup"]
    columns += ["placement_speedup", "placement_low", "placement_high", "missing"]
    title = exhibit.title(results.published)
    chart = Chart(
        exhibit.stem,
        title,
        "times faster than the program as it is",
        Scale.RATIO,
        _WORKLOADS,
        (_WITHOUT, _WITH, PLACEMENT_MODE),
        bars,
        published=results.published.sources[exhibit.source].setting,
        note="Each bar compares two programs, or two modes, under the same use of CUDA graphs.",
        shown=(1 / 8, 8),
    )
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, rows)
    return Made(table, chart_or_none(chart), results.provenance())


def _short(why: str | None) -> str | None:
    """The reason as it fits into the figure."""
    return NOT_MEASURED if why is not None and why.endswith(NOT_MEASURED) else why


def _rewritten(results: Results, label: str, mode: str) -> tuple[stats.RatioAcrossRuns | None, str | None]:
    """How many times faster the rewritten program is in this mode, or why that is not known."""
    there = row_label(label, _REWRITTEN)
    for row in (label, there):
        if why := results.state(row, mode):
            return None, why if row == label or why != NOT_MEASURED else f"variant {_REWRITTEN} {NOT_MEASURED}"
    before, after = results.passed(label, mode), results.passed(there, mode)
    slow, fast = ([block.host_us for block in cell.blocks if block.host_us] if cell else [] for cell in (before, after))
    if before is None or after is None or not slow or not fast:
        return None, NOT_MEASURED
    try:
        ratio = stats.unpaired_ratio(slow, fast, seed=(zlib.crc32(f"{label} {mode} rewritten".encode()),))
    except ValueError as error:
        raise EncoreError(f"the recorded samples of {label} in {mode} cannot be compared: {error}") from error
    if compare_kernels(after, before, ratio.value) is Kernels.OTHER:
        return None, VOID
    return ratio, None


EXHIBITS = (Exhibit("fig3", "grace", "Fig. 3", "what moving a few tensors to the GPU is worth", _DIFFERS, make),)
