"""Make tables of each cell's measurements, and of missing samples and failures.

A failed cell has a row in every table of measurements, with only its status.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from suite.measure.metrics import Metric, metrics
from suite.report.runs import Run, cell_label, said_of_others
from suite.report.selected import selected_functions
from suite.report.table import Table, make_table
from suite.results.schema import Block, Cell, CompileTimes, GpuState, Status

Row = dict[str, object]

THROTTLING = frozenset({"SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"})
"""Clock-event reasons that lower a clock because of power or temperature; the others are settings."""


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
    return *made, conditions(run), failed(run)


def _of_metric(metric: Metric, cell: Cell) -> Row:
    values = metric.of_row(cell)
    return {column: values.get(column) for column in metric.columns}


def table(name: str, run: Run) -> Table:
    """Return the table of this name."""
    return next(each for each in all_tables(run) if each.name == name)


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
    throughput = [block.throughput_us for block in cell.blocks if block.throughput_us is not None]
    kernel = cell.at("metrics.kernel_time_us")
    low, high = map(float, np.quantile(host, [0.05, 0.95])) if host else (None, None)
    return {
        "host_us": median,
        "host_p05_us": low,
        "host_p95_us": high,
        "device_us": statistics.median(device) if device else None,
        "throughput_us": statistics.median(throughput) if throughput else None,
        "kernel_us": kernel,
        "rest_us": None if median is None or kernel is None else median - kernel,
        "host_to_kernel_ratio": median / kernel if median is not None and kernel else None,
        "samples": len(host),
        "blocks": len(cell.blocks),
        "processes": cell.processes,
        "grouping": cell.grouping.value,
    }


def _fields_of(cell: Cell, path: str, *excluded: str) -> Row:
    """Return the fields of the record at this path, empty where it was not measured."""
    found = cell.at(path)
    return found.model_dump(exclude=set(excluded)) if found is not None else {}


_COVERAGE = {"coverage_percent": "percent"} | {
    column: column.replace("other", "eager") for column in ("graph_kernels", "other_kernels", "graph_launches")
}


def _coverage_of(cell: Cell) -> Row:
    row = {column: cell.at(f"metrics.coverage.{field}") for column, field in _COVERAGE.items()}
    return row | _fields_of(cell, "metrics.graphs", "not_captured")


def _copies_of(cell: Cell) -> Row:
    transfers = cell.at("metrics.copies.host_to_device")
    if transfers is None:
        return {}
    return _fields_of(cell, "metrics.copies", "host_to_device") | {
        "host_to_device_bytes": sum(transfer.copied_bytes for transfer in transfers),
        "host_to_device_copies": sum(transfer.count for transfer in transfers),
        "blocking_copies": sum(transfer.count for transfer in transfers if transfer.blocking),
    }


def _compile_times_of(cell: Cell) -> Row:
    if cell.compile is None:
        return {}
    return {
        **{name: cell.at(f"compile.{name}") for name in ("first_call_s", "warm_up_s", "waited_s")},
        "measured": compile_conditions(cell.compile),
        **{f"{part}_s": s for part, s in sorted(cell.compile.parts.items())},
    }


def compile_conditions(times: CompileTimes) -> str:
    """Describe the conditions of compile times."""
    return "unknown" if times.conditions is None else times.conditions.value


def gpu_states(cell: Cell) -> list[GpuState]:
    """Return the readings of the GPU before and after each block."""
    return [state for block in cell.blocks for state in (block.gpu_before, block.gpu_after) if state is not None]


def throttling(run: Run) -> str | None:
    """Return a warning that names workloads during which the GPU lowered its clocks, with NVML's reasons; None without
    any."""
    reasons: dict[str, set[str]] = {}
    for cell in run.cells:
        for state in gpu_states(cell):
            if found := set(state.throttle_reasons) & THROTTLING:
                reasons.setdefault(cell_label(cell), set()).update(found)
    if not reasons:
        return None
    named = "; ".join(f"{label} ({', '.join(sorted(found))})" for label, found in reasons.items())
    return f"THROTTLED while measured, so that times of modes may depend on which one ran before: {named}"


def _conditions_of(cell: Cell) -> Row:
    readings = gpu_states(cell)

    def of(name: str) -> list[float]:
        return [value for state in readings if (value := getattr(state, name)) is not None]

    return {
        "sm_clock_low_mhz": min(of("sm_clock_mhz"), default=None),
        "sm_clock_high_mhz": max(of("sm_clock_mhz"), default=None),
        "memory_clock_mhz": max(of("memory_clock_mhz"), default=None),
        "power_high_w": max(of("power_w"), default=None),
        "temperature_high_c": max(of("temperature_c"), default=None),
        "throttle": ", ".join(sorted({reason for s in readings for reason in s.throttle_reasons})) or None,
        "other_cores": cell.others.cpu_cores if cell.others else None,
    }


def _all_samples(cell: Cell, samples: Callable[[Block], list[float]]) -> list[float]:
    return [sample for block in cell.blocks for sample in samples(block)]


def _correctness_of(cell: Cell) -> Row:
    found = cell.correctness
    return {} if found is None else {column: getattr(found, field) for column, field in _CORRECTNESS.items()}


_CORRECTNESS = {
    name: "input_count" if name == "inputs" else name
    for name in (
        "passed", "inputs", "compute_dtype", "max_relative_error", "tolerance", "reference_error", "widened_error",
        "worst", "deterministic", "fallback_random", "bitwise_with", "bitwise",
    )
}  # fmt: skip

TABLES: dict[str, RunTable] = {
    "times": RunTable(
        "Time per iteration",
        "host: call to completion, median and 5th and 95th percentile of all samples; device: CUDA events; throughput: "
        "back to back. kernel: sum of kernel times of one profiled iteration; rest = host - kernel, below 0 where "
        "kernels overlap or the profiler slows them; host to kernel ratio: distance to the limit.",
        _times_of,
    ),
    "coverage": RunTable(
        "Coverage: kernels launched by CUDA graphs",
        "Of one steady iteration; copies and memsets do not count.",
        _coverage_of,
    ),
    "copies": RunTable(
        "Copies per iteration",
        "placeholder: data copied into graph placeholders before replay; pointer: what was written instead. Byte units "
        "are binary.",
        _copies_of,
    ),
    "memory": RunTable(
        "Peak memory",
        "Of PyTorch's allocator, while compiling and recording, and in steady replay. Graph pools show in reserved.",
        lambda cell: _fields_of(cell, "metrics.memory"),
    ),
    "compile_times": RunTable(
        "Compile time",
        "first call: to the first result; warm up: through recording. The rest are Dynamo's own timers, in seconds. "
        "measured: what was cached, and whether other modes compiled at the same time. waited: for kernels of the mode "
        "that compiles first; in no other column.",
        _compile_times_of,
    ),
    "selection": RunTable(
        "Which graphs serve calls",
        "A row per function that graphs are recorded of. none: without a graph; copy: a graph whose inputs are copied; "
        "indirection: one that reads them in place. Times are medians of an iteration of the functions of a group, "
        "which were judged together.",
        lambda cell: (function.columns() for function in selected_functions(cell)),
        only_passed=False,
    ),
    "correctness": RunTable(
        "Correctness",
        "Outputs, loss and gradients against eager on several inputs. bitwise: equal, bit for bit, to the mode named.",
        _correctness_of,
        only_passed=False,
    ),
    "not_captured": RunTable(
        "Not captured, and why",
        "Inductor's own reason and the user's source line, per graph mode.",
        lambda cell: (reason.model_dump() for reason in cell.at("metrics.graphs.not_captured") or ()),
        only_passed=False,
    ),
    "shortages": RunTable(
        "Missing after samples",
        "Memory was short; what was measured before stands. phase prepare: the process was not measured, and none "
        "after it. measure: it dropped out while it was timed; ratios are over the blocks that both modes have. "
        "metrics: coverage, copies and kernels are missing, as far as they were not known before. Where samples are "
        "of kernels that were not checked, ratios between compiled modes have no verdict.",
        lambda cell: (
            {"of": one.mode, "process": one.process + 1, "phase": one.phase, "error": one.error}
            for one in cell.shortages
        ),
        only_passed=False,
    ),
}
"""Tables of each cell's measurements and their conditions, by name, in the order of the report."""


def conditions(run: Run) -> Table:
    """Make the table of the state of GPU and host. Its note names workloads that other load may have disturbed."""
    of = RunTable(
        "State of the GPU while measuring",
        "NVML readings before and after each block. other cores, other GPUs: of the host, that other programs kept "
        f"busy meanwhile. throttle: the clock-event reasons that were active, idle left out.{said_of_others(run)}",
        _conditions_of,
    )
    return make_table("conditions", of.title, of.note, _rows(of, run))


def failed(run: Run) -> Table:
    """List cells that did not pass, and cells that were not measured."""
    meant = (
        "cells of workloads that no run has." if run.parts else "cells the run has not come to (`encore run --resume`)."
    )
    rows: list[Row] = [_named(cell) | {"status": cell.status.value, "error": cell.error} for cell in run.failed]
    rows += [{"workload": workload, "mode": mode, "status": "not run"} for workload, mode in run.missing]
    note = f"Cells that did not pass, with their error, and {meant}"
    return make_table("failed", "Failed, or not run", note, rows, columns=["workload", "mode", "status", "error"])
