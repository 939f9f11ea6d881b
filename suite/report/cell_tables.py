"""Make tables of what was measured of each cell, and of later processes, missing samples and failures.

A cell that failed has its row in every table of measurements, with its status and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from suite.measure.metrics import Metric, metrics
from suite.report.runs import Run, cell_label, said_of_others
from suite.report.selected import CANDIDATES, selected_functions
from suite.report.table import Table, make_table
from suite.results.schema import Block, Cell, CompileTimes, LaterProcess, Status

Row = dict[str, object]

THROTTLING = frozenset({"SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"})
"""Clock-event reasons that lower a clock because power or cooling is short; the others are settings."""

TUNING = "CachingAutotuner.benchmark_all_configs"
"""Inductor's timer around the runs of a kernel's configurations."""


@dataclass(frozen=True, slots=True)
class RunTable:
    """Hold a table of a run. `note` and `columns` may depend on the run; `rows` makes its rows."""

    title: str
    note: str | Callable[[Run], str]
    columns: Sequence[str] | Callable[[Run], Sequence[str]]
    rows: Callable[[Run], Iterable[Row]]


def all_tables(run: Run) -> tuple[Table, ...]:
    """Make every table of `TABLES`, and one for each metric of `suite.measure.metrics`, in the order of the report."""
    return (
        *(table(name, run) for name in TABLES),
        *(_made(metric.name, _of_metric(metric), run) for metric in metrics()),
    )


def table(name: str, run: Run) -> Table:
    """Make the table of this name."""
    return _made(name, TABLES[name], run)


def _made(name: str, of: RunTable, run: Run) -> Table:
    note = of.note if isinstance(of.note, str) else of.note(run)
    columns = of.columns(run) if callable(of.columns) else of.columns
    return make_table(name, of.title, note, columns, of.rows(run))


def _per_cell(
    title: str,
    note: str | Callable[[Run], str],
    columns: Sequence[str] | Callable[[Run], Sequence[str]],
    values: Callable[[Cell], Row],
    *,
    only_passed: bool = True,
) -> RunTable:
    """Describe a table with one row per cell: workload, mode, status, and values of cells that passed (else of all)."""

    def rows(run: Run) -> Iterator[Row]:
        for cell in run.cells:
            known = values(cell) if cell.status is Status.PASS or not only_passed else {}
            yield _named(cell) | {"status": cell.status.value} | known

    def all_columns(run: Run) -> list[str]:
        return ["workload", "mode", "status", *(columns(run) if callable(columns) else columns)]

    return RunTable(title, note, all_columns, rows)


def _of_metric(metric: Metric) -> RunTable:
    return _per_cell(metric.title, metric.note, metric.columns, lambda cell: dict(metric.of_row(cell)))


def _named(cell: Cell) -> Row:
    return {"workload": cell_label(cell), "mode": cell.mode}


def host_median_us(cell: Cell) -> float | None:
    """Return the median over all samples of a cell's host time to completion."""
    samples = _all_samples(cell, lambda block: block.host_us)
    return statistics.median(samples) if samples else None


def replay_peak_bytes(cell: Cell | None) -> int | None:
    """Return the peak bytes that the allocator reserved in steady replay, of a cell that passed."""
    if cell is None or cell.status is not Status.PASS or cell.metrics is None or cell.metrics.memory is None:
        return None
    return cell.metrics.memory.replay_peak_reserved_bytes


def _times_of(cell: Cell) -> Row:
    host = _all_samples(cell, lambda block: block.host_us)
    device = _all_samples(cell, lambda block: block.device_us or [])
    throughput = [block.throughput_us for block in cell.blocks if block.throughput_us is not None]
    kernel = cell.metrics.kernel_time_us if cell.metrics else None
    row: Row = {
        "samples": len(host),
        "blocks": len(cell.blocks),
        "processes": cell.processes,
        "grouping": cell.grouping.value,
        "kernel_us": kernel,
    }
    if host:
        median = statistics.median(host)
        low, high = np.quantile(host, [0.05, 0.95])
        row |= {"host_us": median, "host_p05_us": float(low), "host_p95_us": float(high)}
        if kernel is not None:
            row["rest_us"] = median - kernel
            row["host_to_kernel_ratio"] = median / kernel if kernel else None
    row["device_us"] = statistics.median(device) if device else None
    row["throughput_us"] = statistics.median(throughput) if throughput else None
    return row


def _coverage_of(cell: Cell) -> Row:
    row: Row = {}
    measured = cell.metrics.coverage if cell.metrics else None
    if measured:
        row |= {
            "coverage_percent": measured.percent,
            "graph_kernels": measured.graph_kernels,
            "other_kernels": measured.eager_kernels,
            "graph_launches": measured.graph_launches,
        }
    if cell.metrics and cell.metrics.graphs:
        row |= cell.metrics.graphs.model_dump(exclude={"not_captured"})
    return row


def _copies_of(cell: Cell) -> Row:
    row: Row = {}
    measured = cell.metrics.copies if cell.metrics else None
    if measured:
        transfers = measured.host_to_device
        row |= measured.model_dump(exclude={"host_to_device"}) | {
            "host_to_device_bytes": sum(transfer.copied_bytes for transfer in transfers),
            "host_to_device_copies": sum(transfer.count for transfer in transfers),
            "blocking_copies": sum(transfer.count for transfer in transfers if transfer.blocking),
        }
    return row


def _compile_times_of(cell: Cell) -> Row:
    if cell.compile is None:
        return {}
    return {
        "first_call_s": cell.compile.first_call_s,
        "warm_up_s": cell.compile.warm_up_s,
        "waited_s": cell.compile.waited_s,
        "measured": compile_conditions(cell.compile),
        **{f"{part}_s": s for part, s in cell.compile.parts.items()},
    }


def compile_conditions(times: CompileTimes) -> str:
    """Return how compile times were measured, in words."""
    return "unknown" if times.conditions is None else times.conditions.value


def throttling(run: Run) -> str | None:
    """Return a warning that names workloads during which the GPU lowered its clocks, with NVML's reasons; None without
    any."""
    reasons: dict[str, set[str]] = {}
    for cell in run.cells:
        for block in cell.blocks:
            for state in (block.gpu_before, block.gpu_after):
                if state is not None and (found := set(state.throttle_reasons) & THROTTLING):
                    reasons.setdefault(cell_label(cell), set()).update(found)
    if not reasons:
        return None
    named = "; ".join(f"{label} ({', '.join(sorted(found))})" for label, found in reasons.items())
    return f"THROTTLED while measured, so that times of modes may depend on which one ran before: {named}"


def _conditions_of(cell: Cell) -> Row:
    readings = [state for block in cell.blocks for state in (block.gpu_before, block.gpu_after) if state is not None]
    clocks = [state.sm_clock_mhz for state in readings if state.sm_clock_mhz is not None]
    return {
        "sm_clock_low_mhz": min(clocks, default=None),
        "sm_clock_high_mhz": max(clocks, default=None),
        "memory_clock_mhz": max((s.memory_clock_mhz for s in readings if s.memory_clock_mhz is not None), default=None),
        "power_high_w": max((s.power_w for s in readings if s.power_w is not None), default=None),
        "temperature_high_c": max((s.temperature_c for s in readings if s.temperature_c is not None), default=None),
        "throttle": ", ".join(sorted({reason for s in readings for reason in s.throttle_reasons})) or None,
        "other_cores": cell.others.cpu_cores if cell.others else None,
        "other_gpus": cell.others.gpus_at_work if cell.others else None,
    }


def _all_samples(cell: Cell, samples: Callable[[Block], list[float]]) -> list[float]:
    return [sample for block in cell.blocks for sample in samples(block)]


def _memory_of(cell: Cell) -> Row:
    return cell.metrics.memory.model_dump() if cell.metrics and cell.metrics.memory else {}


def _correctness_of(cell: Cell) -> Row:
    if cell.correctness is None:
        return {}
    recorded = cell.correctness.model_dump(include=set(_CORRECTNESS))
    return recorded | {"inputs": cell.correctness.input_count}


def _selection_rows(run: Run) -> Iterator[Row]:
    for cell in run.cells:
        for function in selected_functions(cell):
            times = {f"{candidate}_us": time for candidate, time in function.median_us.items()}
            yield _named(cell) | function.model_dump(exclude={"candidates"}) | times


def _not_captured_rows(run: Run) -> Iterator[Row]:
    for cell in run.cells:
        graphs = cell.metrics.graphs if cell.metrics else None
        for reason in graphs.not_captured if graphs else ():
            yield _named(cell) | reason.model_dump()


def _failed_rows(run: Run) -> Iterator[Row]:
    for cell in run.failed:
        yield _named(cell) | {"status": cell.status.value, "error": cell.error}
    for workload, mode in run.missing:
        yield {"workload": workload, "mode": mode, "status": "not run"}


def _later_rows(run: Run) -> Iterator[Row]:
    for cell in run.cells:
        for process in cell.later:
            yield _named(cell) | _later(process)


def _later(process: LaterProcess) -> dict[str, object]:
    times, served = process.compile, process.selection
    return {
        "process": process.process + 1,
        "first_call_s": times.first_call_s if times else None,
        "tuning_s": times.parts.get(TUNING) if times else None,
        "retuned": "; ".join(process.retuned) or None,
        "settled": None if times is None or times.settled is None else "yes" if times.settled else "no",
        "kept": _each(one.kept or one.state for one in served),
        "voided": _each(reason for one in served for reason in one.voided),
    }


def _each(texts: Iterable[str]) -> str | None:
    """Return each text once, in the order in which they came; None without any."""
    return "; ".join(dict.fromkeys(text for text in texts if text)) or None


def _shortage_rows(run: Run) -> Iterator[Row]:
    for cell in run.cells:
        for one in cell.shortages:
            found: Row = {"of": one.mode, "process": one.process + 1}
            yield _named(cell) | found | {"phase": one.phase, "error": one.error}


def _superseded_rows(run: Run) -> Iterator[Row]:
    """List failed cells that were measured again: a report without them would hide that a cell has ever failed."""
    for each in run.superseded:
        row = _named(each.cell) | {"status": each.cell.status.value, "error": each.cell.error}
        yield row | {"failed_in": each.run_id, "replaced_by": each.by or "the same run"}


def _compile_columns(run: Run) -> list[str]:
    parts = sorted({part for cell in run.cells if cell.compile for part in cell.compile.parts})
    return ["first_call_s", "warm_up_s", "waited_s", "measured", *(f"{part}_s" for part in parts)]


_TIMES = ("host_us", "host_p05_us", "host_p95_us", "device_us", "throughput_us", "kernel_us", "rest_us")
_COVERAGE = (
    "coverage_percent", "graph_kernels", "other_kernels", "graph_launches", "fx_graphs",
    "graph_breaks", "partitions", "cuda_graphs",
)  # fmt: skip
_COPIES = (
    "placeholder_bytes", "placeholder_tensors", "pointer_bytes", "device_to_device_bytes", "host_to_device_bytes",
    "host_to_device_copies", "blocking_copies",
)  # fmt: skip
_CORRECTNESS = (
    "passed", "inputs", "compute_dtype", "max_relative_error", "tolerance", "reference_error", "widened_error",
    "worst", "deterministic", "fallback_random", "bitwise_with", "bitwise",
)  # fmt: skip
_CONDITIONS = ("sm_clock_low_mhz", "sm_clock_high_mhz", "memory_clock_mhz", "power_high_w", "temperature_high_c")
_SELECTION = ("workload", "mode", "graph", "group", "direction", "kernels", "copied_bytes")

TABLES: dict[str, RunTable] = {
    "times": _per_cell(
        "Time per iteration",
        "host: call to completion, median and 5th and 95th percentile of all samples; device: CUDA events; throughput: "
        "back to back. kernel: sum of kernel times of one profiled iteration; rest = host - kernel, below 0 where "
        "kernels overlap or the profiler slows them; host to kernel ratio: distance to the limit.",
        (*_TIMES, "host_to_kernel_ratio", "samples", "blocks", "processes", "grouping"),
        _times_of,
    ),
    "coverage": _per_cell(
        "Coverage: kernels launched by CUDA graphs",
        "Of one steady iteration; copies and memsets do not count.",
        _COVERAGE,
        _coverage_of,
    ),
    "copies": _per_cell(
        "Copies per iteration",
        "placeholder: data copied into graph placeholders before replay; pointer: what was written instead. Byte units "
        "are binary.",
        _COPIES,
        _copies_of,
    ),
    "memory": _per_cell(
        "Peak memory",
        "Of PyTorch's allocator, while compiling and recording, and in steady replay. Graph pools show in reserved.",
        [f"{phase}_peak_{kind}_bytes" for phase in ("compile", "replay") for kind in ("allocated", "reserved")],
        _memory_of,
    ),
    "compile_times": _per_cell(
        "Compile time",
        "first call: to the first result; warm up: through recording. The rest are Dynamo's own timers, in seconds. "
        "measured: what was cached, and whether other modes compiled at the same time. waited: for kernels of the mode "
        "that compiles first; in no other column.",
        _compile_columns,
        _compile_times_of,
    ),
    "selection": RunTable(
        "Which graphs serve calls",
        "A row per function that graphs are recorded of. none: without a graph; copy: a graph whose inputs are copied; "
        "indirection: one that reads them in place. Times are medians of an iteration of the functions of a group, "
        "which were judged together. excess: what timing a group took beyond its fastest way.",
        (*_SELECTION, *(f"{candidate}_us" for candidate in CANDIDATES), "kept", "excess_s", "reason"),
        _selection_rows,
    ),
    "correctness": _per_cell(
        "Correctness",
        "Outputs, loss and gradients against eager on several inputs. bitwise: equal, bit for bit, to the mode named.",
        _CORRECTNESS,
        _correctness_of,
        only_passed=False,
    ),
    "conditions": _per_cell(
        "State of the GPU while measuring",
        lambda run: (
            "NVML readings before and after each block. other cores, other GPUs: of the host, that other programs kept "
            f"busy meanwhile. throttle: the clock-event reasons that were active, idle left out.{said_of_others(run)}"
        ),
        (*_CONDITIONS, "throttle", "other_cores", "other_gpus"),
        _conditions_of,
    ),
    "not_captured": RunTable(
        "Not captured, and why",
        "Inductor's own reason and the user's source line, per graph mode.",
        ("workload", "mode", "reason", "source_line", "count"),
        _not_captured_rows,
    ),
    "failed": RunTable(
        "Failed, or not run",
        lambda run: (
            "Cells that did not pass, with their error, and cells of workloads that no run has."
            if run.parts
            else "Cells that did not pass, with their error, and cells the run has not come to (`encore run --resume`)."
        ),
        ("workload", "mode", "status", "error"),
        _failed_rows,
    ),
    "later_processes": RunTable(
        "Later processes of a mode",
        "What a mode's processes after the first did. All that they compile is cached. So nothing should have been "
        "tuned (tuning), and no kernel be another than in the first process (retuned; where there are any, ratios of "
        "the mode have no verdict). kept: how selection served calls.",
        ("workload", "mode", "process", "first_call_s", "tuning_s", "retuned", "settled", "kept", "voided"),
        _later_rows,
    ),
    "shortages": RunTable(
        "Missing after samples",
        "Memory was short; what was measured before stands. phase prepare: the process was not measured, and none "
        "after it. measure: it dropped out while it was timed; ratios are over the blocks that both modes have. "
        "metrics: coverage, copies and kernels are missing, as far as they were not known before. Where samples are "
        "of kernels that were not checked, ratios between compiled modes have no verdict.",
        ("workload", "mode", "of", "process", "phase", "error"),
        _shortage_rows,
    ),
    "superseded": RunTable(
        "Failed before, measured again since",
        "These rows are in no other table: the workload was measured again, later in the same run or in another one.",
        ("workload", "mode", "status", "error", "failed_in", "replaced_by"),
        _superseded_rows,
    ),
}
"""Tables of what was measured of each cell, and what happened besides, by name, in the order of the report."""
