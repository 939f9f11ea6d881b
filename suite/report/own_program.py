"""What a run says of a program of the user's own, in six lines: speed, memory, start, what was not captured, advice."""

from __future__ import annotations

from optimizations.byte_units import format_bytes
from suite.measure.modes import DEFAULT_MODE, EAGER_MODE, GRAPH_MODE, REFERENCE_MODE
from suite.report.cell_tables import host_median_us, replay_peak_bytes
from suite.report.compare import Comparison, Kernels, TimeKind, compare, find
from suite.report.load import Run
from suite.results.schema import Cell, CompileConditions, Status
from suite.results.stats import Verdict
from suite.settings import recorded_plan

BUSY_SHARE = 0.9
"""Kernels that take this share of an iteration keep the GPU busy: CUDA graphs have nothing to remove."""
_CALLED = {REFERENCE_MODE: "torch.compile without CUDA graphs", GRAPH_MODE: "stock CUDA graphs"}
_SAID = {
    Verdict.FAST: "faster",
    Verdict.SLOW: "slower",
    Verdict.SAME: "no difference",
    Verdict.AMBG: "these samples do not decide it",
}
_BROKEN = "torch.compile itself cannot run it ({reason}). Make it work there first: Encore adds nothing before that."


def six_lines(run: Run, name: str) -> tuple[str, ...]:
    """Return the conclusion on program `name`, six lines of the form "subject: what was found"."""
    cells: dict[str, Cell | None] = dict.fromkeys((EAGER_MODE, REFERENCE_MODE, GRAPH_MODE, DEFAULT_MODE))
    cells |= {cell.mode: cell for cell in run.cells if cell.workload == name}
    ours = cells[DEFAULT_MODE]
    compared = compare(run, (TimeKind.LATENCY,))

    def over(baseline: str) -> Comparison | None:
        return None if ours is None else find(compared, ours, baseline, TimeKind.LATENCY)

    return (
        f"over compile: {_ratio(over(REFERENCE_MODE), REFERENCE_MODE, cells)}",
        f"over stock's graphs: {_ratio(over(GRAPH_MODE), GRAPH_MODE, cells)}",
        f"memory: {_memory(cells)}",
        f"start: {_start(run, cells)}",
        f"not captured: {_not_captured(ours)}",
        f"what to do: {_advice(over(REFERENCE_MODE), over(GRAPH_MODE), cells)}",
    )


def _state(cell: Cell | None) -> str | None:
    """Return why a cell has no numbers, None where it passed."""
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
    said = (
        _SAID[item.verdict]
        if item.verdict is not None
        else "not a gain of CUDA graphs: " + (item.kernels.value if item.kernels is not None else Kernels.UNKNOWN.value)
    )
    interval = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"Encore is {interval} times as fast as {_CALLED[baseline]}: {said}"


def _memory(cells: dict[str, Cell | None]) -> str:
    peak = replay_peak_bytes(cells[DEFAULT_MODE])
    if peak is None:
        return "not measured"
    others = {mode: replay_peak_bytes(cells[mode]) for mode in (REFERENCE_MODE, GRAPH_MODE)}
    over = [f"{peak / other:.2f} of {_CALLED[mode]}" for mode, other in others.items() if other]
    return f"{format_bytes(peak)} at most while replaying" + (f", {' and '.join(over)}" if over else "")


def _start(run: Run, cells: dict[str, Cell | None]) -> str:
    ours, reference = cells[DEFAULT_MODE], cells[REFERENCE_MODE]
    if ours is None or ours.compile is None:
        return "not measured"
    times = ours.compile
    calls = recorded_plan(run.environment).warm_up + (times.settle_calls or 0)
    settled = f"settled after {calls} calls" if times.settled else f"not settled after {calls} calls"
    pays = "when it pays for its start was not measured (--cold-compile-times does)"
    if reference is not None and reference.compile is not None:
        alone = {times.conditions, reference.compile.conditions} == {CompileConditions.COLD_ALONE}
        more_s = times.warm_up_s - reference.compile.warm_up_s
        own_us, their_us = host_median_us(ours), host_median_us(reference)
        if alone and own_us is not None and their_us is not None and their_us > own_us:
            pays = f"it pays for its start after about {max(0, round(more_s * 1e6 / (their_us - own_us))):,} calls"
        elif alone and own_us is not None and their_us is not None:
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
    if ours.status in (Status.OOM, Status.OOM_EXPECTED):
        return "it does not fit next to its CUDA graphs: use a smaller batch, or a GPU with more memory"
    if ours.status is Status.FAIL_ACCURACY:
        return "do not use Encore for it: results differ from eager's by more than rounding explains; please report it"
    if ours.status is not Status.PASS:
        return f"Encore cannot run it ({_state(ours)}); docs/troubleshooting.md lists what to do"
    verdicts = [None if item is None else item.verdict for item in (over_compile, over_graph)]
    kernels_us, call_us = ours.metrics.kernel_time_us if ours.metrics else None, host_median_us(ours)
    if kernels_us is not None and call_us and kernels_us >= BUSY_SHARE * call_us and verdicts[0] is not Verdict.FAST:
        return f"little: kernels take {100 * kernels_us / call_us:.0f} % of a call, so the GPU is the limit"
    if verdicts[0] is Verdict.FAST and verdicts[1] in (Verdict.SAME, Verdict.SLOW):
        return 'torch.compile(model, mode="reduce-overhead") gives as much; Encore adds no speed here'
    if verdicts[0] is Verdict.FAST:
        return 'use torch.compile(model, backend="encore")'
    if verdicts[0] in (Verdict.SLOW, Verdict.SAME):
        return "stay with torch.compile without CUDA graphs: they do not make it faster"
    return "measure longer, without --quick or with --processes 5: the interval does not decide"
