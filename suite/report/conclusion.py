"""Summarize a report in one sentence, or a user's program in six lines.

The sentence counts verdicts of one group of rows, which figures and means of the report also use. The six lines are on
speed, memory, start, parts that were not captured, and advice.
"""

from __future__ import annotations

from collections import Counter

from optimizations.byte_units import format_bytes
from suite.measure.modes import DEFAULT_MODE, EAGER_MODE, GRAPH_MODE, MODES, REFERENCE_MODE
from suite.report.cell_tables import compile_conditions, host_median_us, replay_peak_bytes
from suite.report.compare import VERDICT_WORDS, Comparison, Ratios
from suite.report.published import Published
from suite.report.runs import RowGroup, Run, cell_label, row_groups
from suite.report.start import start_in, start_of
from suite.results.schema import Cell, Status
from suite.results.stats import Verdict
from suite.settings import recorded_plan


def of_run(ratios: Ratios, published: Published) -> str:
    """Compare Encore with stock CUDA graphs in a run or, without rows of those, with compiled code.

    It is about the run's first group of rows: GraCE's workloads where it has any.
    """
    own = [mode for mode in ratios.modes if mode in MODES and MODES[mode].is_encores]
    baseline = GRAPH_MODE if GRAPH_MODE in ratios.modes else REFERENCE_MODE
    if not own or baseline not in ratios.modes:
        return f"Encore is not compared here: the run has the modes {', '.join(ratios.modes) or 'none'}."
    # Whole steps and callables are captured only where a program does so, and measured for some workloads.
    mode = ([mode for mode in own if not MODES[mode].captures_more] or own)[-1]
    labels = {cell_label(cell) for cell in ratios.cells if cell.mode == mode}
    group = next(group for group in row_groups(ratios.labels, published) if labels.intersection(group.labels))
    return _sentence(mode, baseline, ratios, group)


def _sentence(mode: str, baseline: str, ratios: Ratios, group: RowGroup) -> str:
    stock = "stock CUDA graphs" if baseline == GRAPH_MODE else f"mode {baseline}"
    ours = f"Encore ({mode})"
    found = (ratios.find(label, mode, baseline) for label in group.labels)
    items = [item for item in found if item is not None]
    if not group.has_means:
        return f"No mean tells whether {ours} is faster than {stock}: all rows are of workloads split over GPUs."
    gains = [item for item in items if item.is_gain]
    mean = ratios.mean(group.labels, mode, baseline)
    if mean is None:
        none = sum(item.ratio is None for item in items)
        return (
            f"It cannot be told whether {ours} is faster than {stock}: of {len(items)} workloads {none} have no "
            f"result, and in {len(items) - none} the two may have run other kernels, or had not settled."
        )
    counts = Counter(item.verdict for item in gains)
    said = ", ".join(f"{word} in {counts[verdict]}" for verdict, word in VERDICT_WORDS.items() if counts[verdict])
    rest = f"; {len(items) - len(gains)} more cannot be compared" if len(items) > len(gains) else ""
    factor = "about as fast as" if mean.low <= 1 <= mean.high else f"{mean.value:.2f} times as fast as"
    workloads = _count(mean.count, "workload") if group.suffix else f"{mean.count} of {group.title}"
    return (
        f"{ours} is {factor} {stock} over {workloads} (geometric mean {mean.value:.2f}, 95 % interval "
        f"{mean.low:.2f} to {mean.high:.2f}): {said}{rest}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


BUSY_SHARE = 0.9
"""If kernels take this share of an iteration, the GPU is busy and CUDA graphs cannot save time."""
_CALLED = {REFERENCE_MODE: "torch.compile without CUDA graphs", GRAPH_MODE: "stock CUDA graphs"}
_BROKEN = "torch.compile itself cannot run it ({reason}). Make it work there first: Encore adds nothing before that."


def six_lines(run: Run, name: str) -> tuple[str, ...]:
    """Return the conclusion on program `name`, six lines of the form "subject: what was found"."""
    cells: dict[str, Cell | None] = dict.fromkeys((EAGER_MODE, REFERENCE_MODE, GRAPH_MODE, DEFAULT_MODE))
    cells |= {cell.mode: cell for cell in run.cells if cell.workload == name}
    ours = cells[DEFAULT_MODE]
    ratios = Ratios(run.cells)

    def over(baseline: str) -> Comparison | None:
        return None if ours is None else ratios.against(ours, baseline)

    return (
        f"over compile: {_ratio(over(REFERENCE_MODE), REFERENCE_MODE, cells)}",
        f"over stock's graphs: {_ratio(over(GRAPH_MODE), GRAPH_MODE, cells)}",
        f"memory: {_memory(cells)}",
        f"start: {_start(run, ratios, cells)}",
        f"not captured: {_not_captured(ours)}",
        f"what to do: {_advice(over(REFERENCE_MODE), over(GRAPH_MODE), cells)}",
    )


def _state(cell: Cell | None) -> str | None:
    """Return the reason why a cell has no numbers, or None if it passed."""
    if cell is None:
        return "not measured"
    return None if cell.status is Status.PASS else f"{cell.status}: {cell.first_error_line}"


def _ratio(item: Comparison | None, baseline: str, cells: dict[str, Cell | None]) -> str:
    for mode in (DEFAULT_MODE, baseline):
        if (state := _state(cells[mode])) is not None:
            return f"{mode} has no time ({state})"
    if item is None or item.ratio is None:
        return (item.missing if item is not None else None) or "not measured"
    ratio = item.ratio
    said = VERDICT_WORDS[item.verdict]
    if item.verdict is None:
        said = f"not a gain of CUDA graphs: {item.mark}"
    return f"Encore is {ratio.text()} times as fast as {_CALLED[baseline]}: {said}"


def _memory(cells: dict[str, Cell | None]) -> str:
    peak = replay_peak_bytes(cells[DEFAULT_MODE])
    if peak is None:
        return "not measured"
    others = {mode: replay_peak_bytes(cells[mode]) for mode in (REFERENCE_MODE, GRAPH_MODE)}
    over = [f"{peak / other:.2f} of {_CALLED[mode]}" for mode, other in others.items() if other]
    return f"{format_bytes(peak)} at most while replaying" + (f", {' and '.join(over)}" if over else "")


def _start(run: Run, ratios: Ratios, cells: dict[str, Cell | None]) -> str:
    ours = cells[DEFAULT_MODE]
    if ours is None or ours.compile is None:
        return "not measured"
    times = ours.compile
    calls = (times.warm_up_calls or recorded_plan(run.environment).warm_up) + (times.settle_calls or 0)
    settled = f"settled after {calls} calls" if times.settled else f"not settled after {calls} calls"
    start, other = start_of(ours), start_in(REFERENCE_MODE, ours, ratios)
    if start is None or other is None:
        pays = "when it pays for its start was not measured (--cold-compile-times does)"
    elif (paid := start.pays_after(other)) is not None:
        pays = f"it has paid for its start after {paid:,} calls (compiled: {compile_conditions(times)})"
    else:
        pays = "it does not pay for its start: it is not faster than compile"
    return f"{settled}; {pays}"


def _not_captured(ours: Cell | None) -> str:
    if ours is None or ours.metrics is None or ours.metrics.coverage is None:
        return "not measured"
    coverage, graphs = ours.metrics.coverage, ours.metrics.graphs
    total = coverage.graph_kernels + coverage.eager_kernels
    if not coverage.eager_kernels:
        return f"nothing: all {total} kernels of a call are in CUDA graphs"
    reasons = [] if graphs is None else sorted(graphs.not_captured, key=lambda one: -one.count)
    first = f"; {reasons[0].reason} at {reasons[0].source_line or 'an unknown line'}" if reasons else ""
    more = f" and {len(reasons) - 1} more reasons in the report" if len(reasons) > 1 else ""
    return f"{coverage.eager_kernels} of {total} kernels of a call{first}{more}"


def _advice(over_compile: Comparison | None, over_graph: Comparison | None, cells: dict[str, Cell | None]) -> str:
    reference, ours = cells[REFERENCE_MODE], cells[DEFAULT_MODE]
    if reference is not None and reference.status in (Status.COMPILE_ERROR, Status.RUN_ERROR, Status.FAIL_ACCURACY):
        return _BROKEN.format(reason=_state(reference))
    if ours is None:
        return "measure the modes compile, graph and encore on an NVIDIA GPU: this run has no mode with Encore"
    if ours.status is Status.OOM:
        return "it does not fit next to its CUDA graphs: use a smaller batch, or a GPU with more memory"
    if ours.status is Status.FAIL_ACCURACY:
        return "do not use Encore for it: results differ from eager's by more than rounding explains; please report it"
    if ours.status is not Status.PASS:
        return f"Encore cannot run it ({_state(ours)}); docs/troubleshooting.md lists what to do"
    verdicts = [None if item is None else item.verdict for item in (over_compile, over_graph)]
    kernels_us, call_us = ours.at("metrics.kernel_time_us"), host_median_us(ours)
    if kernels_us is not None and call_us and kernels_us >= BUSY_SHARE * call_us and verdicts[0] is not Verdict.FAST:
        return f"little: kernels take {100 * kernels_us / call_us:.0f} % of a call, so the GPU is the limit"
    if verdicts[0] is Verdict.FAST and verdicts[1] in (Verdict.SAME, Verdict.SLOW):
        return 'torch.compile(model, mode="reduce-overhead") gives as much; Encore adds no speed here'
    if verdicts[0] is Verdict.FAST:
        return 'use torch.compile(model, backend="encore")'
    if verdicts[0] in (Verdict.SLOW, Verdict.SAME):
        return "stay with torch.compile without CUDA graphs: they do not make it faster"
    return "measure longer, without --quick or with --processes 5: the interval does not decide"
