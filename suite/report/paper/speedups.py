"""Show speed-ups of the papers: GraCE Figs. 3, 10, 11 and 12 (tensor parallelism), PyGraph Figs. 7 and 8, and the gain
of concurrent kernels, which no paper has."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from models.registry import TP_MARK
from suite.measure.modes import (
    DEFAULT_MODE,
    GRAPH_MODE,
    INDIRECTION_MODE,
    LANES_MODE,
    LEAN_MODE,
    PLACEMENT_MODE,
    REFERENCE_MODE,
    UNPARTITIONED_MODE,
)
from suite.report.cell_tables import host_median_us
from suite.report.chart import Bar, Scale
from suite.report.compare import samples_by_process
from suite.report.grid import NOT_MEASURED, WHISKERS, Grid, Point, Series, count_note, known, plain_mean
from suite.report.paper.exhibit import NOT_HELD, Exhibit, Results, ratio_series
from suite.report.runs import cell_label, row_label
from suite.results import stats
from suite.results.errors import WrongUse
from suite.results.store import describe, read_unpacked

_Grid = partial(Grid, unit="speedup", scale=Scale.RATIO, shown=(1 / 8, 8))
_OVER_COMPILE = f"times faster than {REFERENCE_MODE}"


def overall(exhibit: Exhibit, results: Results) -> Grid:
    """Show bars over compile; the geometric mean is over the workloads that all modes have."""
    whole, labels, source = DEFAULT_MODE, exhibit.labels(results), exhibit.source
    modes = (UNPARTITIONED_MODE, GRAPH_MODE, whole)
    means = results.means(labels, modes, REFERENCE_MODE)
    headline = exhibit.headline(results)
    over_graphs = ("over stock CUDA graphs of a whole FX graph", headline["geomean_vs_graph"])
    largest = f"{headline['max_vs_graph']} ({headline['max_vs_graph_workload']})"
    points = [
        Point(*over_graphs, results.mean_text(labels, whole, UNPARTITIONED_MODE)),
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
    return _Grid(
        axis=_OVER_COMPILE,
        labels=labels,
        series=(
            ratio_series(results, source, UNPARTITIONED_MODE, REFERENCE_MODE),
            ratio_series(results, source, GRAPH_MODE, REFERENCE_MODE, published=None),
            ratio_series(results, source, whole, REFERENCE_MODE),
            ratio_series(results, source, whole, UNPARTITIONED_MODE, column="over_graphs", drawn=False),
        ),
        points=points,
        note=count_note(means),
        means=means,
    )


_STEPS = (
    ("placement", PLACEMENT_MODE, UNPARTITIONED_MODE, "placement_over_graph"),
    ("indirection", INDIRECTION_MODE, PLACEMENT_MODE, "indirection_over_placement"),
    ("lean", LEAN_MODE, INDIRECTION_MODE, ""),
    ("selection", DEFAULT_MODE, LEAN_MODE, "encore_over_indirection"),
)
"""(name, mode, the mode it extends, the key of the papers' ratio of the step in `results/published.json`)."""


def steps(exhibit: Exhibit, results: Results) -> Grid:
    """Show bars over compile, and in the table what each step gains over the one before."""
    labels, source = exhibit.labels(results), exhibit.source
    modes = (UNPARTITIONED_MODE, *(mode for _, mode, _, _ in _STEPS))
    rows = results.published.speedups.get(source, {})

    def paper(label: str, ratio: str) -> float | None:
        return rows.get(label, {}).get(ratio)

    means = results.means(labels, modes, REFERENCE_MODE)
    lacks = NOT_HELD if source == "pygraph" else None
    return _Grid(
        axis=_OVER_COMPILE,
        labels=labels,
        series=(
            *(ratio_series(results, source, mode, REFERENCE_MODE, published=None, listed=False) for mode in modes),
            *(
                ratio_series(
                    results, source, mode, before, published=partial(paper, ratio=ratio), column=name, drawn=False
                )
                for name, mode, before, ratio in _STEPS
            ),
        ),
        points=[
            Point(f"{name} over {before}", lacks if ratio else None, results.mean_text(labels, mode, before))
            for name, mode, before, ratio in _STEPS
        ],
        note=count_note(means),
        means=means,
    )


REWRITTEN = "current"
"""The variant whose program has no CPU tensors."""
_REWRITABLE = ("DALLE2", "MMC", "ST", "VM", "XLNET-I")


def rewritten(exhibit: Exhibit, results: Results) -> Grid:
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
    published = exhibit.headline(results)["rewritten_program_without_graphs"]
    placement = results.mean_text(_REWRITABLE, PLACEMENT_MODE, UNPARTITIONED_MODE)
    return _Grid(
        axis="times faster than the program as it is",
        labels=_REWRITABLE,
        series=(without, whole, placed),
        points=[
            Point("rewritten program, without graphs", published, _mean_text(without)),
            Point("rewritten program, whole graphs", None, _mean_text(whole)),
            Point(f"{PLACEMENT_MODE} over {UNPARTITIONED_MODE}, program as it is", None, placement),
        ],
        note="Each bar compares two programs, or two modes, under the same use of CUDA graphs.",
    )


def _mean_text(series: Series) -> str:
    values = [value for label in _REWRITABLE if (value := series.measure(label).value)]
    return f"{plain_mean(values).value:.2f} of {len(values)}" if values else NOT_MEASURED


def _rewritten(results: Results, label: str, mode: str) -> Bar:
    """Return the speed-up of the rewritten program in this mode, or the reason why it is unknown.

    The two programs were measured one after another: process r of one is paired with process r of the other. Both are
    of one run, as hosts differ.
    """
    there = row_label(label, REWRITTEN)
    if why := results.state(label, mode):
        return Bar(failure=why)
    if why := results.state(there, mode):
        return Bar(failure=f"variant {REWRITTEN} {NOT_MEASURED}" if why == NOT_MEASURED else why)
    joined = results.run.of_variants if results.run is not None else ()
    published = next((one for one in joined if (cell_label(one), one.mode) == (label, mode)), None)
    slow, fast = (
        list(samples_by_process(cell.blocks).values())
        for cell in (published or results.passed(label, mode), results.passed(there, mode))
        if cell is not None
    )
    count = min(len(slow), len(fast))
    if not count:
        return Bar(failure=NOT_MEASURED)
    ratio = stats.speed_up(slow[:count], fast[:count])
    return Bar(ratio.value, ratio.interval())


_MODELS = ("DALLE2", "ST", "VM", "XLNET-I", "DECODER")
"""The paper's four, and a plain transformer of today."""
_DEGREES = (1, 2, 4)


def split(exhibit: Exhibit, results: Results) -> Grid:
    """Show bars over compile on as many GPUs."""
    whole = DEFAULT_MODE
    modes = (UNPARTITIONED_MODE, GRAPH_MODE, whole)
    labels = tuple(f"{model}{TP_MARK}{degree}" for model in _MODELS for degree in _DEGREES)

    def more(label: str) -> dict[str, object]:
        model, _, degree = label.partition(TP_MARK)
        cells = [cell for mode in (REFERENCE_MODE, *modes) if (cell := results.passed(label, mode)) is not None]
        equal = [cell.correctness.ranks_equal for cell in cells if cell.correctness is not None]
        compared = [one for one in equal if one is not None]
        reference = results.passed(label, REFERENCE_MODE)
        return {
            "model": model,
            "tp": int(degree),
            "compile_us": host_median_us(reference) if reference is not None else None,
            "ranks_equal": all(compared) if compared else None,
        }

    points = [
        Point("speed-ups that the text names", exhibit.headline(results)["tensor_parallel"], NOT_MEASURED),
        Point(f"largest over {REFERENCE_MODE}", None, results.extreme_text(labels, whole, REFERENCE_MODE)),
    ]
    for degree in _DEGREES:
        own = [label for label in labels if label.endswith(f"{TP_MARK}{degree}")]
        what = f"over stock CUDA graphs, {degree} GPU{'s' * (degree > 1)}"
        points.append(Point(what, None, results.mean_text(own, whole, GRAPH_MODE)))
    return _Grid(
        axis=_OVER_COMPILE,
        labels=labels,
        series=tuple(ratio_series(results, exhibit.source, mode, REFERENCE_MODE, published=None) for mode in modes),
        points=points,
        more=more,
        note=f"Each on as many GPUs as its name says, over compile on as many. {WHISKERS}",
    )


GRAPHS = "graphs alone"
"""The series of device times: all graphs as chains over all of them with branches."""


def concurrency(exhibit: Exhibit, results: Results) -> Grid:
    """Show for each workload whole iterations with branches over those without, and the graphs alone."""
    published, proved = exhibit.labels(results), results.proved
    every = dict.fromkeys([*published, *results.ratios.labels, *proved])
    timed = {one for one in every if results.ratios.cell(one, LANES_MODE)}
    labels = tuple(one for one in every if one in timed or one in proved) or published

    def of_graphs(label: str) -> Bar:
        found = proved.get(label)
        if found is None:
            return Bar(failure=NOT_MEASURED)
        return known(found["gain"], "each kernel needs the one before it")

    means = results.means(labels, [LANES_MODE], LEAN_MODE)
    gains, judged = ([one[name] for one in proved.values() if one[name] is not None] for name in ("gain", "same_bits"))
    of_graphs_alone = NOT_MEASURED
    if gains:
        mean, devices = plain_mean([max(1.0, gain) for gain in gains]), {one["device"] for one in proved.values()}
        of_graphs_alone = f"{mean.value:.2f} of {mean.count}, {', '.join(sorted(devices))}"
    same = f"{sum(judged)} of {len(judged)}"
    columns = ("graphs", "branched", "same_bits", "memory_ratio")
    return _Grid(
        axis=f"times faster than {LEAN_MODE}, or than chains",
        labels=labels,
        series=(
            *([ratio_series(results, exhibit.source, LANES_MODE, LEAN_MODE, published=None)] if timed else []),
            Series(GRAPHS, of_graphs, column="graphs_alone"),
        ),
        points=[
            Point(f"{LANES_MODE} over {LEAN_MODE}", None, results.mean_text(labels, LANES_MODE, LEAN_MODE)),
            Point("these by verdict", None, results.verdicts_text(labels, LANES_MODE, LEAN_MODE)),
            Point("device time of graphs, the chain where it is faster", None, of_graphs_alone),
            Point("workloads with the bits of the chain", None, same if judged else NOT_MEASURED),
        ],
        more=lambda label: {name: proved.get(label, {}).get(name) for name in columns},
        note=count_note(means),
        shown=(1 / 2, 2),
        means=means | ({GRAPHS: plain_mean(gains)} if gains else {}),
    )


def read_proof(path: Path) -> dict[str, dict[str, Any]]:
    """Read rows that `tests/gpu/concurrency_proof.py` wrote, by workload as reports call it.

    `gain` is the device time of its graphs as chains over that with branches, None where no kernels are independent.
    Of its `graphs`, Encore would use branches for those that are `branched`. `same_bits`: results are bitwise equal to
    the chain's, None where there were no branches. `memory_ratio` is reserved memory over that without branches.

    Raises:
        WrongUse: the file cannot be read or has other lines.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        rows = [json.loads(line) for line in read_unpacked(path).splitlines()]
        passed = [(row_label(*row["workload"].split("/")), row) for row in rows if row["status"] == "ok"]
        bytes_of = {(row["phase"], label): row.get("reserved_bytes") for label, row in passed}
        for label, row in passed:
            if row["phase"] == "measure":
                chain, branches = bytes_of.get(("chain", label)), bytes_of.get(("branches", label))
                found[label] = {
                    "gain": row["times"]["gain"] if "times" in row else None,
                    "graphs": len(row["recordings"]),
                    "branched": sum(one["winner"] == "branches" for one in row.get("decisions", [])),
                    "same_bits": row["bits"]["equal"] if "bits" in row else None,
                    "memory_ratio": branches / chain if chain and branches else None,
                    "device": row.get("run", {}).get("device", "an unknown GPU"),
                }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongUse(f"{describe(path)} holds no rows of tests/gpu/concurrency_proof.py: {error}") from error
    return found
