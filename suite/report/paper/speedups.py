"""Show speed-ups of the papers: GraCE Figs. 3, 10, 11 and 12 (tensor parallelism), PyGraph Figs. 7 and 8."""

from __future__ import annotations

from dataclasses import replace

from models.registry import TP_MARK
from suite.measure.modes import (
    DEFAULT_MODE,
    GRAPH_MODE,
    INDIRECTION_MODE,
    LEAN_MODE,
    PLACEMENT_MODE,
    REFERENCE_MODE,
    UNPARTITIONED_MODE,
)
from suite.report.cell_tables import host_median_us
from suite.report.chart import Scale
from suite.report.compare import TimeKind, samples_by_process
from suite.report.paper.exhibit import (
    NOT_HELD,
    NOT_MEASURED,
    WHISKERS,
    Exhibit,
    Grid,
    Made,
    Point,
    Results,
    Series,
    Value,
    count_note,
    make_grid,
    ratio_series,
)
from suite.report.runs import row_label
from suite.results import stats
from suite.results.errors import EncoreError


def _grid(axis: str, labels: tuple[str, ...], series: tuple[Series, ...]) -> Grid:
    return Grid("speedup", f"times faster than {axis}", Scale.RATIO, labels, series, shown=(1 / 8, 8))


def make_overall(exhibit: Exhibit, results: Results) -> Made:
    """Show bars over compile; the geometric mean is over the workloads that all modes have."""
    whole, labels = results.whole_mode, exhibit.labels(results)
    modes = (UNPARTITIONED_MODE, GRAPH_MODE, whole)
    series = [
        ratio_series(
            results, exhibit.source, mode, REFERENCE_MODE, **({"published": None} if mode == GRAPH_MODE else {})
        )
        for mode in modes
    ]
    over = ratio_series(results, exhibit.source, whole, UNPARTITIONED_MODE, column="over_graphs", drawn=False)
    means = results.means(labels, modes, REFERENCE_MODE)
    headline = results.published.headline[exhibit.source]
    largest = f"{headline['max_vs_graph']} ({headline['max_vs_graph_workload']})"
    points = [
        Point(
            "over stock CUDA graphs of a whole FX graph",
            headline["geomean_vs_graph"],
            results.mean_text(labels, whole, UNPARTITIONED_MODE),
        ),
        Point("largest of these", largest, results.extreme_text(labels, whole, UNPARTITIONED_MODE)),
        Point("over today's stock CUDA graphs", None, results.mean_text(labels, whole, GRAPH_MODE)),
        Point("these by verdict", None, results.verdicts_text(labels, whole, GRAPH_MODE)),
    ]
    if worst := headline.get("worst_graph_vs_compile"):
        slowest = results.extreme_text(labels, UNPARTITIONED_MODE, REFERENCE_MODE, largest=False)
        points.append(Point(f"slowest with stock CUDA graphs, over {REFERENCE_MODE}", worst, slowest))
    if (other := headline.get("a6000_graph_vs_compile")) is not None:
        points += [
            Point(f"RTX A6000: CUDA graphs over {REFERENCE_MODE}", other),
            Point(f"RTX A6000: whole system over {REFERENCE_MODE}", headline["a6000_geomean_vs_compile"]),
        ]
    grid = replace(_grid(REFERENCE_MODE, labels, (*series, over)), note=count_note(means))
    return make_grid(exhibit, results, grid, points, means)


_STEPS = (
    ("placement", PLACEMENT_MODE, UNPARTITIONED_MODE, "placement_over_graph"),
    ("indirection", INDIRECTION_MODE, PLACEMENT_MODE, "indirection_over_placement"),
    ("lean", LEAN_MODE, INDIRECTION_MODE, ""),
    ("selection", DEFAULT_MODE, LEAN_MODE, "encore_over_indirection"),
)
"""(name, mode, what it is added to, what the papers' ratio of the step is called in `results/published.json`)."""


def make_steps(exhibit: Exhibit, results: Results) -> Made:
    """Show bars over compile, and in the table what each step gains over the one before."""
    labels = exhibit.labels(results)
    modes = (UNPARTITIONED_MODE, *(mode for _, mode, _, _ in _STEPS))
    measured = tuple(mode for mode in modes if results.run is not None and mode in results.run.modes)
    bars = [
        ratio_series(results, exhibit.source, mode, REFERENCE_MODE, published=None, listed=False)
        for mode in measured or modes
    ]
    rows = results.published.speedups.get(exhibit.source, {})
    steps = [
        ratio_series(
            results,
            exhibit.source,
            mode,
            before,
            published=lambda label, ratio=ratio: rows.get(label, {}).get(ratio),
            column=name,
            drawn=False,
        )
        for name, mode, before, ratio in _STEPS
    ]
    means = results.means(labels, modes, REFERENCE_MODE)
    lacking = [mode for mode in modes if mode not in measured]
    note = f"{count_note(means)} Not measured: {', '.join(lacking)}." if lacking else count_note(means)
    lacks = NOT_HELD if exhibit.source == "pygraph" else None
    points = [
        Point(f"{name} over {before}", lacks if ratio else None, results.mean_text(labels, mode, before))
        for name, mode, before, ratio in _STEPS
    ]
    grid = replace(_grid(REFERENCE_MODE, labels, (*bars, *steps)), note=note.strip())
    return make_grid(exhibit, results, grid, points, means)


_REWRITTEN = "current"
"""The variant whose program keeps nothing on the CPU."""
_REWRITABLE = ("DALLE2", "MMC", "ST", "VM", "XLNET-I")


def make_rewritten(exhibit: Exhibit, results: Results) -> Made:
    """Show bars of published over rewritten program, without and with CUDA graphs, and of Encore's placement."""
    printed = results.published.rewritten_program.get(exhibit.source, {})

    def series(name: str, mode: str, column: str) -> Series:
        return Series(
            name,
            lambda label: _rewritten(results, label, mode),
            lambda label: printed.get(label, {}).get(column),
            column=column,
        )

    without = series("rewritten, no graphs", REFERENCE_MODE, "without_graphs")
    whole = series("rewritten, whole graphs", UNPARTITIONED_MODE, "with_graphs")
    placed = ratio_series(results, exhibit.source, PLACEMENT_MODE, UNPARTITIONED_MODE, published=None)
    grid = replace(
        _grid("the program as it is", _REWRITABLE, (without, whole, placed)),
        note="Each bar compares two programs, or two modes, under the same use of CUDA graphs.",
    )
    found = [value.number for label in _REWRITABLE if (value := without.measure(label)).number is not None]
    points = [
        Point(
            "rewritten program, without graphs",
            results.published.headline[exhibit.source]["rewritten_program_without_graphs"],
            f"in {len(found)} workloads" if found else NOT_MEASURED,
        ),
        Point(
            f"{PLACEMENT_MODE} over {UNPARTITIONED_MODE}, program as it is",
            None,
            results.mean_text(_REWRITABLE, PLACEMENT_MODE, UNPARTITIONED_MODE),
        ),
    ]
    return make_grid(exhibit, results, grid, points)


def _rewritten(results: Results, label: str, mode: str) -> Value:
    """Return how many times faster the rewritten program is in this mode, or why that is not known.

    The two programs were measured one after another: process r of one stands for the r-th that was started.
    """
    there = row_label(label, _REWRITTEN)
    for row in (label, there):
        if why := results.state(row, mode):
            return Value(missing=why if row == label or why != NOT_MEASURED else f"variant {_REWRITTEN} {NOT_MEASURED}")
    before, after = results.passed(label, mode), results.passed(there, mode)
    assert before is not None and after is not None, "both have passed"
    slow, fast = (list(samples_by_process(cell.blocks, TimeKind.LATENCY).values()) for cell in (before, after))
    count = min(len(slow), len(fast))
    if not count:
        return Value(missing=NOT_MEASURED)
    try:
        ratio = stats.speed_up(slow[:count], fast[:count])
    except ValueError as error:
        raise EncoreError(f"the recorded samples of {label} in {mode} cannot be compared: {error}") from error
    return Value(ratio.value, (ratio.low, ratio.high))


MODELS = ("DALLE2", "ST", "VM", "XLNET-I", "DECODER")
"""The paper's four, and a plain transformer of today."""
DEGREES = (1, 2, 4)
LABELS = tuple(f"{model}{TP_MARK}{degree}" for model in MODELS for degree in DEGREES)


def make_split(exhibit: Exhibit, results: Results) -> Made:
    """Show bars over compile on as many GPUs."""
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

    series = tuple(ratio_series(results, exhibit.source, mode, REFERENCE_MODE, published=None) for mode in modes)
    note = f"Each on as many GPUs as its name says, over compile on as many. {WHISKERS}"
    grid = replace(_grid(REFERENCE_MODE, LABELS, series), more=more, note=note)
    text = results.published.headline[exhibit.source]["tensor_parallel"]
    largest = results.extreme_text(LABELS, results.whole_mode, REFERENCE_MODE)
    points = [
        Point("speed-ups that the text names", text, NOT_MEASURED),
        Point(f"largest over {REFERENCE_MODE}", None, largest),
    ]
    for degree in DEGREES:
        labels = [label for label in LABELS if label.endswith(f"{TP_MARK}{degree}")]
        measured = results.mean_text(labels, results.whole_mode, GRAPH_MODE)
        points.append(Point(f"over stock CUDA graphs, {degree} GPU{'s' * (degree > 1)}", None, measured))
    return make_grid(exhibit, results, grid, points)


_OVERALL = (
    f"The paper's CUDA graphs take a whole FX graph or nothing: {UNPARTITIONED_MODE}; {GRAPH_MODE} is today's stock. "
    "Inputs rotate over several addresses here, in the papers they stayed where they were. Bars of the papers' figures "
    "carry no numbers: a published value is here only where the text gives it."
)
_ADDED = (
    "Each step is its own mode: placement adds to stock's whole-graph capture, indirection to placement, "
    "lean replay to indirection, encore (which chooses) to that. Published values are those that the text gives, of a "
    "step over the one before."
)
_MOVED = (
    f"The rewritten program is the variant {_REWRITTEN} where a workload has one (measured in another group, so "
    f"drift is in the ratio). The third bar is Encore's placement over {UNPARTITIONED_MODE} with the program as it is. "
    "MMC is not in the paper's figure."
)
_SPLIT = (
    "Times are of the slowest rank, sample by sample, all ranks having started together; the paper takes the largest "
    "of the ranks' medians. Which modules of DALLE2, ST and VM the paper splits is not published. Its bars carry no "
    "numbers, and of which bars the text's are is not recorded here. DECODER is of no paper."
)
_STEPS_UNKNOWN = f"{_ADDED} The paper's text prints five values; they are not known here."
_SHOWS_OVERALL = "stock CUDA graphs and {} over PyTorch 2 without graphs"
EXHIBITS = (
    Exhibit("fig3", "grace", "Fig. 3", "what moving a few tensors to the GPU is worth", _MOVED, make_rewritten),
    Exhibit("fig10", "grace", "Fig. 10", _SHOWS_OVERALL.format("GraCE"), _OVERALL, make_overall),
    Exhibit("fig11", "grace", "Fig. 11", "what each optimisation adds", _ADDED, make_steps),
    Exhibit("pygraph-fig7", "pygraph", "Fig. 7", _SHOWS_OVERALL.format("PyGraph"), _OVERALL, make_overall),
    Exhibit("pygraph-fig8", "pygraph", "Fig. 8", "what each optimisation adds", _STEPS_UNKNOWN, make_steps),
    Exhibit("fig12", "grace", "Fig. 12", "tensor parallelism over one, two and four GPUs", _SPLIT, make_split),
)
