"""GraCE Fig. 12: workloads split over one, two and four GPUs, with stock CUDA graphs and with the whole system."""

from __future__ import annotations

from models.registry import TP_MARK
from suite.measure.modes import GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.cell_tables import host_median_us
from suite.report.chart import Scale
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Point, Results
from suite.report.paper.grid import Grid, make_grid, ratio_series
from suite.report.paper.speedups import SHOWN, WHISKERS
from suite.report.table import make_table

MODELS = ("DALLE2", "ST", "VM", "XLNET-I", "DECODER")
"""The paper's four, and a plain transformer of today."""
DEGREES = (1, 2, 4)
LABELS = tuple(f"{model}{TP_MARK}{degree}" for model in MODELS for degree in DEGREES)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Bars over compile on as many GPUs."""
    modes = (UNPARTITIONED_MODE, GRAPH_MODE, results.whole_mode)

    def more(label: str) -> dict[str, object]:
        model, _, degree = label.partition(TP_MARK)
        cells = [cell for mode in (REFERENCE_MODE, *modes) if (cell := results.passed(label, mode)) is not None]
        equal = [cell.correctness.ranks_equal for cell in cells if cell.correctness is not None]
        known = [one for one in equal if one is not None]
        reference = results.passed(label, REFERENCE_MODE)
        return {
            "model": model,
            "tp": int(degree),
            "compile_us": host_median_us(reference) if reference is not None else None,
            "ranks_equal": all(known) if known else None,
        }

    grid = Grid(
        "speedup",
        f"times faster than {REFERENCE_MODE}",
        Scale.RATIO,
        LABELS,
        tuple(ratio_series(results, exhibit.source, mode, REFERENCE_MODE, published=None) for mode in modes),
        more_columns=("model", "tp", "compile_us", "ranks_equal"),
        more=more,
        note=f"Each on as many GPUs as its name says, over compile on as many. {WHISKERS}",
        shown=SHOWN,
    )
    text = results.published.headline[exhibit.source]["tensor_parallel"]
    largest = results.extreme_text(LABELS, results.whole_mode, REFERENCE_MODE)
    points = [
        Point("speed-ups that the text names", text, NOT_MEASURED),
        Point(f"largest over {REFERENCE_MODE}", None, largest),
        *(
            Point(
                f"over stock CUDA graphs, {degree} GPU{'s' * (degree > 1)}",
                None,
                results.mean_text(
                    [label for label in LABELS if label.endswith(f"{TP_MARK}{degree}")], results.whole_mode, GRAPH_MODE
                ),
            )
            for degree in DEGREES
        ),
    ]
    return make_grid(exhibit, results, grid, points=points)


def make_ranks(exhibit: Exhibit, results: Results) -> Made:
    """Coverage and copies of each rank."""
    rows: list[dict[str, object]] = []
    for label in LABELS:
        for mode in (GRAPH_MODE, results.whole_mode):
            cell = results.passed(label, mode)
            if label.endswith(f"{TP_MARK}1"):
                continue
            if cell is None or not cell.ranks:
                rows.append({"workload": label, "mode": mode, "missing": results.state(label, mode) or NOT_MEASURED})
                continue
            for part in cell.ranks:
                coverage, copies = (part.metrics.coverage, part.metrics.copies) if part.metrics else (None, None)
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
    whole = sum(row.get("coverage_percent") == 100 for row in rows)
    measured = sum("rank" in row for row in rows)
    point = Point("ranks whose kernels are all in graphs", None, f"{whole} of {measured}" if measured else NOT_MEASURED)
    return Made(table, None, results.provenance(LABELS), (point,))


_DIFFERS = (
    "Times are of the slowest rank, sample by sample, all ranks having started together; the paper takes the largest "
    "of the ranks' medians. Which modules of DALLE2, ST and VM the paper splits is not published. Its bars carry no "
    "numbers, and of which bars the text's are is not recorded here. DECODER is of no paper."
)
_DIFFERS_RANKS = (
    "The paper has no such table: it shows whether graphs launch the kernels of all ranks alike, and what each copies."
)

EXHIBITS = (
    Exhibit("fig12", "grace", "Fig. 12", "tensor parallelism over one, two and four GPUs", _DIFFERS, make),
    Exhibit("fig12-ranks", "grace", "Fig. 12", "coverage and copies of each rank", _DIFFERS_RANKS, make_ranks),
)
