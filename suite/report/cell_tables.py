"""Make tables of each cell's measurements, and of failures.

A failed cell has a row in every table of measurements, with only its status.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from suite.measure.metrics import Metric, metrics
from suite.report.runs import Run, cell_label
from suite.report.table import Table, make_table
from suite.results.schema import THROTTLING, Block, Cell, CompileTimes, Status

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class RunTable:
    """Declare a table of a run: its description, and a function that makes the rows of one cell.

    Each row begins with the workload and mode of its cell. `only_passed`: there is one row for each cell, with its
    status, and values where it passed.
    """

    title: str
    note: str
    of_cell: Callable[[Cell], Row | Iterable[Row]]
    only_passed: bool = True


def all_tables(run: Run) -> tuple[Table, ...]:
    """Make every table of `TABLES`, and one for each metric of `suite.measure.metrics`, in the order of the report."""
    tables = TABLES | {
        one.name: RunTable(one.title, one.note, lambda cell, one=one: _of_metric(one, cell))  # type: ignore[misc]
        for one in metrics()
    }
    made = [make_table(name, of.title, of.note, _rows(of, run)) for name, of in tables.items()]
    return *made, failed(run)


def _of_metric(metric: Metric, cell: Cell) -> Row:
    values = metric.of_row(cell)
    return {column: values.get(column) for column in metric.columns}


def _rows(of: RunTable, run: Run) -> Iterator[Row]:
    for cell in run.cells:
        known = of.of_cell(cell) if cell.status is Status.PASS or not of.only_passed else {}
        if isinstance(known, dict):
            yield _named(cell) | {"status": cell.status.value} | known
        else:
            yield from (_named(cell) | row for row in known)


def _named(cell: Cell) -> Row:
    return {"workload": cell_label(cell), "mode": cell.mode}


def host_median_us(cell: Cell) -> float | None:
    """Return the median over all samples of a cell's host time to completion."""
    samples = _all_samples(cell, lambda block: block.host_us)
    return statistics.median(samples) if samples else None


def replay_peak_bytes(cell: Cell | None) -> int | None:
    """Return the peak bytes that the allocator reserved in steady replay, of a cell that passed."""
    passed = cell is not None and cell.status is Status.PASS
    return cell.at("metrics.memory.replay_peak_reserved_bytes") if cell is not None and passed else None


def _times_of(cell: Cell) -> Row:
    host, median = _all_samples(cell, lambda block: block.host_us), host_median_us(cell)
    device = _all_samples(cell, lambda block: block.device_us or [])
    kernel = cell.at("metrics.kernel_time_us")
    low, high = map(float, np.quantile(host, [0.05, 0.95])) if host else (None, None)
    return {
        "host_us": median,
        "host_p05_us": low,
        "host_p95_us": high,
        "device_us": statistics.median(device) if device else None,
        "kernel_us": kernel,
        "rest_us": None if median is None or kernel is None else median - kernel,
        "host_to_kernel_ratio": median / kernel if median is not None and kernel else None,
        "samples": len(host),
        "blocks": len(cell.blocks),
        "processes": cell.processes,
        "grouping": cell.grouping.value,
    }


def _values(paths: Mapping[str, str]) -> Callable[[Cell], Row]:
    """Return the row of a cell: a column for each path of fields, None where nothing was measured."""
    return lambda cell: {column: cell.at(path) for column, path in paths.items()}


def _fields(record: str, names: str) -> dict[str, str]:
    """Return paths of a record's fields, by columns of the same names."""
    return {name: f"{record}.{name}" for name in names.split()}


def _compile_times_of(cell: Cell) -> Row:
    if cell.compile is None:
        return {}
    return {
        **{name: getattr(cell.compile, name) for name in ("first_call_s", "warm_up_s", "waited_s")},
        "measured": compile_conditions(cell.compile),
        **{f"{part}_s": s for part, s in sorted(cell.compile.parts.items())},
    }


def compile_conditions(times: CompileTimes) -> str:
    """Describe the conditions of compile times."""
    return "unknown" if times.conditions is None else times.conditions.value


def throttling(run: Run) -> str | None:
    """Return a warning that names workloads during which the GPU lowered its clocks, with NVML's reasons; None without
    any."""
    reasons: dict[str, set[str]] = {}
    for cell in run.cells:
        for state in (state for block in cell.blocks for state in (block.gpu_before, block.gpu_after) if state):
            if found := set(state.throttle_reasons).intersection(THROTTLING):
                reasons.setdefault(cell_label(cell), set()).update(found)
    if not reasons:
        return None
    named = "; ".join(f"{label} ({', '.join(sorted(found))})" for label, found in reasons.items())
    return f"THROTTLED while measured, so that times of modes may depend on which one ran before: {named}"


def _all_samples(cell: Cell, samples: Callable[[Block], list[float]]) -> list[float]:
    return [sample for block in cell.blocks for sample in samples(block)]


TABLES: dict[str, RunTable] = {
    "times": RunTable(
        "Time per iteration",
        "host: call to completion, median and 5th and 95th percentile of all samples; device: CUDA events. "
        "kernel: sum of kernel times of one profiled iteration; rest = host - kernel, below 0 where "
        "kernels overlap or the profiler slows them; host to kernel ratio: distance to the limit.",
        _times_of,
    ),
    "coverage": RunTable(
        "Coverage: kernels launched by CUDA graphs",
        "Of one steady iteration; copies and memsets do not count.",
        _values(
            {"coverage_percent": "metrics.coverage.percent", "graph_kernels": "metrics.coverage.graph_kernels"}
            | {"other_kernels": "metrics.coverage.eager_kernels", "graph_launches": "metrics.coverage.graph_launches"}
            | _fields("metrics.graphs", "fx_graphs graph_breaks partitions cuda_graphs")
        ),
    ),
    "copies": RunTable(
        "Copies per iteration",
        "placeholder: data copied into graph placeholders before replay; pointer: what was written instead. Byte units "
        "are binary.",
        _values(_fields("metrics.copies", "placeholder_bytes placeholder_tensors pointer_bytes")),
    ),
    "memory": RunTable(
        "Peak memory",
        "Of PyTorch's allocator, while compiling and recording, and in steady replay. Graph pools show in reserved.",
        _values(
            _fields("metrics.memory", "compile_peak_allocated_bytes compile_peak_reserved_bytes")
            | _fields("metrics.memory", "replay_peak_allocated_bytes replay_peak_reserved_bytes")
        ),
    ),
    "compile_times": RunTable(
        "Compile time",
        "first call: to the first result; warm up: through recording. The rest are Dynamo's own timers, in seconds. "
        "measured: what was cached, and whether other modes compiled at the same time. waited: for kernels of the mode "
        "that compiles first; in no other column.",
        _compile_times_of,
    ),
    "correctness": RunTable(
        "Correctness",
        "Outputs, loss and gradients against eager on several inputs. bitwise: equal, bit for bit, to the mode named.",
        _values(
            {"passed": "correctness.passed", "inputs": "correctness.input_count"}
            | _fields("correctness", "compute_dtype max_relative_error tolerance reference_error widened_error worst")
            | _fields("correctness", "deterministic fallback_random bitwise_with bitwise")
        ),
        only_passed=False,
    ),
    "not_captured": RunTable(
        "Not captured, and why",
        "Inductor's own reason and the user's source line, per graph mode.",
        lambda cell: (reason.model_dump() for reason in cell.at("metrics.graphs.not_captured") or ()),
        only_passed=False,
    ),
}
"""Tables of each cell's measurements and their conditions, by name, in the order of the report."""


def failed(run: Run) -> Table:
    """List cells that did not pass, and cells that were not measured."""
    meant = (
        "cells of workloads that no run has." if run.parts else "cells the run has not come to (`encore run --resume`)."
    )
    rows: list[Row] = [_named(cell) | {"status": cell.status.value, "error": cell.error} for cell in run.failed]
    rows += [{"workload": workload, "mode": mode, "status": "not run"} for workload, mode in run.missing]
    note = f"Cells that did not pass, with their error, and {meant}"
    return make_table("failed", "Failed, or not run", note, rows, columns=["workload", "mode", "status", "error"])
