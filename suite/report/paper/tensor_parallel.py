"""GraCE Fig. 12: workloads split over one, two and four GPUs, with stock CUDA graphs and with the whole system."""

from __future__ import annotations

from models.registry import TP_MARK
from suite.modes import GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.cell_tables import host_median_us
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Results, chart_or_none, reasons
from suite.report.table import make_table
from suite.schema import Cell

MODELS = ("DALLE2", "ST", "VM", "XLNET-I", "DECODER")
"""The paper's four, and a plain transformer of today."""
DEGREES = (1, 2, 4)
_DIFFERS = (
    "Times are of the slowest rank, sample by sample, all ranks having started together; the paper takes the largest "
    "of the ranks' medians. Which modules of DALLE2, ST and VM the paper splits is not published. Its bars carry no "
    "numbers, so none stand next to these. DECODER is of no paper."
)
_DIFFERS_RANKS = (
    "The paper has no such table: it shows whether graphs launch the kernels of all ranks alike, and what each copies."
)


def _labels() -> list[str]:
    return [f"{model}{TP_MARK}{degree}" for model in MODELS for degree in DEGREES]


def _modes(results: Results) -> tuple[str, ...]:
    return (UNPARTITIONED_MODE, GRAPH_MODE, results.whole_mode)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Bars over compile on as many GPUs."""
    modes = _modes(results)
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for label in _labels():
        model, _, degree = label.partition(TP_MARK)
        row: dict[str, object] = {"workload": label, "model": model, "tp": int(degree)}
        for mode in modes:
            bars[label, mode] = results.bar(label, mode)
            if ratio := results.ratio(label, mode):
                row |= {f"{mode}_speedup": ratio.value, f"{mode}_low": ratio.low, f"{mode}_high": ratio.high}
        passed = results.passed(label, REFERENCE_MODE)
        if passed is not None:
            row["compile_us"] = host_median_us(passed)
        equal = [] if passed is None else [passed]
        equal += [cell for mode in modes if (cell := results.passed(label, mode)) is not None]
        row["ranks_equal"] = _all_equal(equal)
        row["missing"] = reasons({mode: results.why_no_ratio(label, mode) for mode in modes})
        rows.append(row)
    columns = ["workload", "model", "tp", "compile_us"]
    for mode in modes:
        columns += [f"{mode}_speedup", f"{mode}_low", f"{mode}_high"]
    title = exhibit.title(results.published)
    table = make_table(exhibit.stem, title, exhibit.note(results), [*columns, "ranks_equal", "missing"], rows)
    chart = Chart(
        exhibit.stem,
        title,
        f"times faster than {REFERENCE_MODE}",
        Scale.RATIO,
        tuple(_labels()),
        modes,
        bars,
        note="Each on as many GPUs as its name says, over compile on as many. Whiskers: 95 % intervals.",
        shown=(1 / 8, 8),
    )
    return Made(table, chart_or_none(chart), results.provenance())


def _all_equal(cells: list[Cell]) -> bool | None:
    """Whether the ranks of all modes have the same bits; None where there are not several."""
    told = [cell.correctness.ranks_equal for cell in cells if cell.correctness is not None]
    known = [one for one in told if one is not None]
    return all(known) if known else None


def make_ranks(exhibit: Exhibit, results: Results) -> Made:
    """Coverage and copies of each rank."""
    rows: list[dict[str, object]] = []
    for label in _labels():
        if label.endswith(f"{TP_MARK}1"):
            continue
        for mode in (GRAPH_MODE, results.whole_mode):
            cell = results.passed(label, mode)
            if cell is None or not cell.ranks:
                why = results.state(label, mode) or NOT_MEASURED
                rows.append({"workload": label, "mode": mode, "missing": why})
                continue
            for part in cell.ranks:
                metrics = part.metrics
                coverage = metrics.coverage if metrics else None
                copies = metrics.copies if metrics else None
                rows.append(
                    {
                        "workload": label,
                        "mode": mode,
                        "rank": part.rank,
                        "coverage_percent": coverage.percent if coverage else None,
                        "placeholder_bytes": copies.placeholder_bytes if copies else None,
                        "pointer_bytes": copies.pointer_bytes if copies else None,
                        "missing": None if coverage or copies else "not profiled",
                    }
                )
    columns = ["workload", "mode", "rank", "coverage_percent", "placeholder_bytes", "pointer_bytes", "missing"]
    title = exhibit.title(results.published)
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, rows)
    return Made(table, None, results.provenance())


EXHIBITS = (
    Exhibit("fig12", "grace", "Fig. 12", "tensor parallelism over one, two and four GPUs", _DIFFERS, make),
    Exhibit("fig12-ranks", "grace", "Fig. 12", "coverage and copies of each rank", _DIFFERS_RANKS, make_ranks),
)
