"""The conclusion of a report: one sentence, and the points for and against trusting it.

Nothing here is measured or judged again: the sentence counts verdicts of one group of rows, whose figures and means say
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from suite.explain.records import Explanation
from suite.measure.checkout import shown_code
from suite.measure.modes import GRAPH_MODE, MODES, PLACEMENT_MODE, REFERENCE_MODE
from suite.report import provenance, same_program
from suite.report.compare import Comparison, TimeKind, mean_over
from suite.report.explain_tables import lowerings_of
from suite.report.groups import RowGroup, row_groups
from suite.report.load import Run, cell_label
from suite.report.published import Published
from suite.results.schema import Cell, Environment, Status
from suite.results.stats import Verdict

DECIDED_SHARE = 0.9
"""Of all verdicts, so many must decide something for the whole to count as decided."""
FALSE_SHARE = 0.05
"""Of all comparisons of a program with itself, so many at most may find a difference."""
HARMLESS_REASONS = frozenset({"GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks", "SyncBoost"})
"""Clock-event reasons that slow nothing down while a block is measured."""


class Trust(StrEnum):
    """Whether the numbers can be relied on."""

    YES = "Yes"
    PARTLY = "With reservations"
    NO = "No"


@dataclass(frozen=True, slots=True)
class Point:
    """One reason for or against. `decisive` ones alone make a conclusion worthless where they do not hold."""

    holds: bool
    text: str
    decisive: bool = False


@dataclass(frozen=True, slots=True)
class Conclusion:
    """`baseline` is the mode that the sentence compares with, None where nothing is compared."""

    sentence: str
    points: tuple[Point, ...]
    baseline: str | None = None

    @property
    def trust(self) -> Trust:
        if any(point.decisive and not point.holds for point in self.points):
            return Trust.NO
        return Trust.YES if all(point.holds for point in self.points) else Trust.PARTLY


def of_run(run: Run, comparisons: Sequence[Comparison], published: Published) -> Conclusion:
    """What a run says of Encore over stock CUDA graphs or, where it has none, of graphs over compiled code.

    It is about the run's first group of rows: GraCE's workloads where it has any.
    """
    own = [mode for mode in run.modes if mode in MODES and MODES[mode].is_encores]
    graphs = [mode for mode in run.modes if mode in MODES and MODES[mode].uses_cuda_graphs]
    baseline = GRAPH_MODE if own and GRAPH_MODE in run.modes else REFERENCE_MODE
    modes = own or graphs or [mode for mode in run.modes if mode != baseline]
    # Whole steps and callables are captured where a program asks for it, and measured for some workloads only.
    usual = [mode for mode in modes if mode not in MODES or not MODES[mode].captures_more] or modes
    mode = usual[-1] if usual else None
    items = [
        item
        for item in comparisons
        if (item.cell.mode, item.baseline, item.metric) == (mode, baseline, TimeKind.LATENCY)
    ]
    groups = row_groups(run, published)
    sentence = f"Nothing can be compared: the run has {len(run.cells)} cells in {len(run.modes)} modes."
    if mode is not None and items:
        group = next(group for group in groups if any(cell_label(item.cell) in group.labels for item in items))
        sentence = _sentence(mode, baseline, comparisons, group)
    return Conclusion(sentence, tuple(_points(run, items)), None if mode is None else baseline)


def of_explanations(explanations: Sequence[Explanation]) -> Conclusion:
    """What analyses without a GPU say: how many models stock would capture as they are, and how many when placed."""
    whole = {GRAPH_MODE: 0, PLACEMENT_MODE: 0}
    for explanation in explanations:
        for setting in whole:
            parts = lowerings_of(explanation, setting)
            whole[setting] += bool(parts) and not any(one.kernels_outside or one.cpu_kernels for one in parts)
    failed = [explanation for explanation in explanations if explanation.error]
    waits = sum(any(one.blocking_copies for one in lowerings_of(e, GRAPH_MODE)) for e in explanations)
    sentence = (
        f"Of {len(explanations)} models, stock CUDA graphs would hold all kernels of {whole[GRAPH_MODE]}, and of "
        f"{whole[PLACEMENT_MODE]} after Encore's placement; in {waits} the host waits for a copy in each call today."
    )
    points = [
        Point(not failed, f"{len(explanations) - len(failed)} of {len(explanations)} analyses came to their end"),
        Point(False, "found without a GPU: kernels and copies are counted, nothing is timed"),
    ]
    return Conclusion(sentence, tuple(points))


def _sentence(mode: str, baseline: str, comparisons: Sequence[Comparison], group: RowGroup) -> str:
    stock = "stock CUDA graphs" if baseline == GRAPH_MODE else f"mode {baseline}"
    ours = f"Encore ({mode})" if MODES[mode].is_encores else f"Mode {mode}"
    items = [
        item
        for item in comparisons
        if (item.cell.mode, item.baseline, item.metric) == (mode, baseline, TimeKind.LATENCY)
        if cell_label(item.cell) in group.labels
    ]
    if not group.has_means:
        return f"No mean tells whether {ours} is faster than {stock}: all rows are of workloads split over GPUs."
    gains = [item for item in items if item.is_gain]
    mean = mean_over(comparisons, mode, baseline, group.labels)
    if mean is None:
        withdrawn = sum(item.ratio is not None for item in items)
        none = sum(item.ratio is None for item in items)
        reasons = [
            f"in {withdrawn} of {len(items)} workloads the two may have run other kernels, or had not settled"
            if withdrawn
            else "",
            f"{none} of {len(items)} workloads have no result" if none else "",
        ]
        return f"It cannot be told whether {ours} is faster than {stock}: {', '.join(filter(None, reasons))}."
    counts = Counter(item.verdict for item in gains)
    words = (
        (Verdict.FAST, "faster"),
        (Verdict.SAME, "the same"),
        (Verdict.SLOW, "slower"),
        (Verdict.AMBG, "undecided"),
    )
    said = [f"{word} in {counts[verdict]}" for verdict, word in words if counts[verdict]]
    left = len(items) - len(gains)
    rest = f"; {left} more cannot be compared" if left else ""
    factor = "as fast as" if mean.low <= 1 <= mean.high else "times as fast as"
    value = "about" if factor == "as fast as" else f"{mean.value:.2f}"
    which = f" of {group.title}" if not group.suffix else ""
    workloads = f"{mean.count}{which}" if which else _count(mean.count, "workload")
    return (
        f"{ours} is {value} {factor} {stock} over {workloads} (geometric mean "
        f"{mean.value:.2f}, 95 % interval {mean.low:.2f} to {mean.high:.2f}): {', '.join(said)}{rest}."
    )


def _points(run: Run, items: Sequence[Comparison]) -> Iterator[Point]:
    origin = provenance.of_run(run)
    if origin.warning:
        yield Point(False, origin.warning, decisive=True)
    checked = [cell for cell in run.cells if cell.correctness is not None]
    wrong = [cell for cell in run.cells if cell.status is Status.FAIL_ACCURACY]
    right = len(checked) - len({id(cell) for cell in wrong if cell.correctness is not None})
    yield Point(
        not wrong and bool(checked),
        f"Outputs, loss and gradients were compared with eager before anything was timed: {right} of {len(checked)} "
        "cells agree",
    )
    compared = [item for item in items if item.ratio is not None]
    same = [item for item in compared if item.is_gain]
    yield Point(
        len(same) == len(compared) and bool(same),
        f"In {len(same)} of {len(compared)} ratios both sides are known to run the same kernels"
        if compared
        else "There is no ratio whose kernels could be looked at",
        decisive=not same,
    )
    decided = [item for item in same if item.verdict not in (None, Verdict.AMBG)]
    if same:
        yield Point(
            len(decided) >= DECIDED_SHARE * len(same), f"The samples decide {len(decided)} of {len(same)} verdicts"
        )
    pairs = same_program.same_program_pairs(run)
    if pairs:
        found = len(same_program.false_findings(pairs))
        text = f"Of {_count(len(pairs), 'comparison')} of modes that are the same program, {found} found a difference"
        yield Point(found <= FALSE_SHARE * len(pairs), text)
    alternating = [item for item in compared if item.alternating]
    if len(alternating) < len(compared):
        text = f"{len(compared) - len(alternating)} ratios are of modes that were not measured in turns"
        yield Point(False, text)
    yield Point(
        not run.failed and not run.missing,
        f"{len(run.cells) - len(run.failed)} cells passed, {len(run.failed)} failed, {len(run.missing)} were not run",
    )
    short = sum(any(one.reason == "memory" for one in cell.shortages) for cell in run.cells)
    if short:
        yield Point(False, f"Memory was short in {_count(short, 'cell')} behind samples, which stand")
    unfinished = sum(cell.is_unfinished for cell in run.cells)
    if unfinished:
        yield Point(False, f"The run ended before {_count(unfinished, 'cell')} had all processes")
    if run.superseded:
        yield Point(False, f"{_count(len(run.superseded), 'cell')} had failed before and had to be measured again")
    slowed = {reason: cells for reason, cells in _slowed(run.cells).items() if reason not in HARMLESS_REASONS}
    if slowed:
        said = ", ".join(f"{reason} in {_count(cells, 'cell')}" for reason, cells in sorted(slowed.items()))
        yield Point(False, f"The GPU slowed down while it was measured: {said}")
    environments = [part.environment for part in run.parts if part.labels] or [run.environment]
    yield _of_one_code(environments)
    for remark in run.remarks:
        yield Point(False, remark[0].upper() + remark[1:])


def _of_one_code(environments: Sequence[Environment]) -> Point:
    """Whether the rows are of the same code, and of code that a reader can have."""
    codes = {environment.code for environment in environments}
    if None not in codes:
        committed = {environment.code for environment in environments if environment.git_dirty is False}
        return Point(
            len(codes) == 1 and codes == committed,
            (f"All rows are of code {shown_code(*codes)}" if len(codes) == 1 else f"The rows are of {len(codes)} codes")
            + ("" if codes == committed else ", not committed when it was measured"),
        )
    commits = {environment.git_commit for environment in environments}
    dirty = any(environment.git_dirty for environment in environments)
    return Point(
        len(commits) == 1 and None not in commits and not dirty,
        ("All rows are of one commit" if len(commits) == 1 else f"The rows are of {len(commits)} commits")
        + (", with changes that are in none" if dirty else "")
        + (", of which one is unknown" if None in commits else ""),
    )


def _slowed(cells: Sequence[Cell]) -> Counter[str]:
    """In how many cells each clock-event reason was seen around a block."""
    found: Counter[str] = Counter()
    for cell in cells:
        states = [state for block in cell.blocks for state in (block.gpu_before, block.gpu_after) if state is not None]
        found.update({reason for state in states for reason in state.throttle_reasons})
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
