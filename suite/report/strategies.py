"""Ways to capture a training iteration side by side: each torch.compile graph, forward and backward, or all of it."""

from __future__ import annotations

from collections.abc import Sequence

from suite.modes import CAPTURED, EAGER_MODE, MODES, REFERENCE_MODE, Mode
from suite.report.cell_tables import Row, host_median_us, recorded_graphs, replay_peak_bytes
from suite.report.compare import Comparison
from suite.report.load import Run
from suite.report.speedup_tables import KERNELS_NOTE, ratio_text
from suite.report.table import Table, make_table
from suite.schema import Cell, Status

NAME = "strategies"

OVER_REFERENCE = f"over_{REFERENCE_MODE}"


def strategies(run: Run, comparisons: Sequence[Comparison]) -> Table | None:
    """A row for each mode of the workloads that ran in a mode that captures more; None where none did."""
    modes = _modes(run)
    more = [mode.name for mode in modes if mode.captures_more]
    labels = [label for label in run.labels if any(run.find(label, name) for name in more)]
    if not labels:
        return None
    columns = ["workload", "mode", "status", "captured", "cuda_graphs", "graph_launches", "coverage_percent", "host_us"]
    columns += [OVER_REFERENCE, "replay_peak_reserved_bytes", f"reserved_over_{EAGER_MODE}_ratio", "refused"]
    return make_table(
        NAME,
        "Capture strategies",
        "Workloads that ran in a mode that captures more than torch.compile's graphs. captured: what becomes one CUDA "
        "graph, or two of forward and backward. CUDA graphs: those recorded. launches and coverage: of one steady "
        f"iteration. host: median. over {REFERENCE_MODE}: how many times faster, by host time, with the 95 % "
        "interval and verdict. replay peak reserved: of PyTorch's allocator, in steady replay, and how many times "
        f"{EAGER_MODE}'s. refused: the first line of the error. {KERNELS_NOTE}",
        columns,
        (
            {
                "workload": label,
                "mode": mode.name,
                "status": cell.status.value,
                "captured": mode.captured,
                **_values(run, comparisons, label, cell),
            }
            for label in labels
            for mode in modes
            if (cell := run.find(label, mode.name)) is not None
        ),
    )


def _modes(run: Run) -> list[Mode]:
    """The run's modes with CUDA graphs and the one they are compared with; those that capture least come first."""
    known = [MODES[name] for name in run.modes if name in MODES]
    kept = [mode for mode in known if mode.needs_gpu or mode.name == REFERENCE_MODE]
    return sorted(kept, key=lambda mode: list(CAPTURED).index(mode.captures))


def _values(run: Run, comparisons: Sequence[Comparison], label: str, cell: Cell) -> Row:
    row: Row = {}
    mode = MODES[cell.mode]
    if mode.name != REFERENCE_MODE:
        row[OVER_REFERENCE] = ratio_text(run, comparisons, label, cell.mode, REFERENCE_MODE)
    if cell.status is not Status.PASS:
        return row | {"refused": cell.first_error_line}
    row["host_us"] = host_median_us(cell)
    coverage = cell.metrics.coverage if cell.metrics else None
    if coverage is not None:
        row |= {"graph_launches": coverage.graph_launches, "coverage_percent": coverage.percent}
    row["cuda_graphs"] = recorded_graphs(cell)
    reserved, eager = (replay_peak_bytes(side) for side in (cell, run.find(label, EAGER_MODE)))
    row["replay_peak_reserved_bytes"] = reserved
    if reserved is not None and eager:
        row[f"reserved_over_{EAGER_MODE}_ratio"] = reserved / eager
    return row
