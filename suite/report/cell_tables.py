"""What was measured of each cell. A cell that failed has its row in every table, with its status and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from suite.measure.metrics import Metric, metrics
from suite.measure.modes import MODES
from suite.report import same_time
from suite.report.load import Run, cell_label, is_as_published
from suite.report.published import Published
from suite.report.selected import CANDIDATES, selected_functions
from suite.report.table import Table, make_table
from suite.results.schema import Block, Cell, CompileTimes, Status

Row = dict[str, object]

THROTTLING = frozenset({"SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"})
"""Clock-event reasons that lower a clock because power or cooling is short; the others are settings."""


def all_tables(run: Run, published: Published) -> tuple[Table, ...]:
    """Every table that has a row per cell, in the order of the report."""
    return (
        times(run),
        coverage(run, published),
        copies(run, published),
        memory(run),
        compile_times(run),
        selection(run),
        correctness(run),
        conditions(run),
        not_captured(run),
        failed(run),
        *(of_metric(run, metric) for metric in metrics()),
    )


def of_metric(run: Run, metric: Metric) -> Table:
    """The table of a metric of `suite.measure.metrics`."""
    return _cell_table(
        run,
        metric.name,
        metric.title,
        metric.note,
        metric.columns,
        lambda cell: dict(metric.of_row(cell)),
    )


def times(run: Run) -> Table:
    """Times per iteration, and host time split into kernel time and the rest."""
    columns = ["host_us", "host_p05_us", "host_p95_us", "device_us", "throughput_us", "kernel_us", "rest_us"]
    columns += ["host_to_kernel_ratio", "samples", "blocks", "processes", "grouping"]
    return _cell_table(
        run,
        "times",
        "Time per iteration",
        "host: call to completion, median and 5th and 95th percentile of all samples; device: CUDA events; throughput: "
        "back to back. kernel: sum of kernel times of one profiled iteration; rest = host - kernel, below 0 where "
        "kernels overlap or the profiler slows them; host to kernel ratio: distance to the limit.",
        columns,
        _times_of,
    )


def coverage(run: Run, published: Published) -> Table:
    """Kernels under graph launches, and what the cell compiled to."""
    columns = ["coverage_percent", "graph_kernels", "other_kernels", "graph_launches", "captured_kernel_nodes"]
    columns += ["fx_graphs", "graph_breaks", "partitions", "cuda_graphs"]
    columns += ["grace_coverage_percent", "pygraph_coverage_percent"]
    return _cell_table(
        run,
        "coverage",
        "Coverage: kernels launched by CUDA graphs",
        "Of one steady iteration; copies and memsets do not count. captured kernel nodes is the cross-check. "
        "Published stock coverage is that of PyTorch 2.4 (whole FX graph or nothing). "
        + published.caption("grace", "pygraph"),
        columns,
        lambda cell: _coverage_of(cell, published),
    )


def copies(run: Run, published: Published) -> Table:
    """Bytes moved per iteration."""
    columns = ["placeholder_bytes", "placeholder_tensors", "pointer_bytes", "device_to_device_bytes"]
    columns += ["host_to_device_bytes", "host_to_device_copies", "blocking_copies", "grace_bytes"]
    return _cell_table(
        run,
        "copies",
        "Copies per iteration",
        "placeholder: data copied into graph placeholders before replay; pointer: what was written instead. Byte units "
        "are binary. The published bytes next to stock modes are GraCE's before indirection (with its placement). "
        + published.caption("grace"),
        columns,
        lambda cell: _copies_of(cell, published),
    )


def memory(run: Run) -> Table:
    """Peak bytes while compiling and while replaying."""
    columns = [f"{phase}_peak_{kind}_bytes" for phase in ("compile", "replay") for kind in ("allocated", "reserved")]
    return _cell_table(
        run,
        "memory",
        "Peak memory",
        "Of PyTorch's allocator, while compiling and recording, and in steady replay. Graph pools show in reserved.",
        columns,
        lambda cell: cell.metrics.memory.model_dump() if cell.metrics and cell.metrics.memory else {},
    )


def compile_times(run: Run) -> Table:
    """Time to the first result and through warm-up."""
    parts = sorted({part for cell in run.cells if cell.compile for part in cell.compile.parts})
    return _cell_table(
        run,
        "compile_times",
        "Compile time",
        "first call: to the first result; warm up: through recording. The rest are Dynamo's own timers, in seconds. "
        "measured: what was cached, and whether other modes compiled at the same time. waited: for kernels of the mode "
        "that compiles first; in no other column.",
        ["first_call_s", "warm_up_s", "waited_s", "measured", *(f"{part}_s" for part in parts)],
        _compile_times_of,
    )


def correctness(run: Run) -> Table:
    """The comparison with eager, made before any timing."""
    columns = [
        "passed",
        "inputs",
        "compute_dtype",
        "max_relative_error",
        "tolerance",
        "reference_error",
        "widened_error",
        "worst",
    ]
    columns += ["deterministic", "fallback_random", "bitwise_with", "bitwise"]

    def values(cell: Cell) -> Row:
        if cell.correctness is None:
            return {}
        recorded = cell.correctness.model_dump()
        return {name: value for name, value in recorded.items() if name in columns} | {
            "inputs": cell.correctness.input_count
        }

    return _cell_table(
        run,
        "correctness",
        "Correctness",
        "Outputs, loss and gradients against eager on several inputs. bitwise: equal, bit for bit, to the mode named.",
        columns,
        values,
        only_passed=False,
    )


def conditions(run: Run) -> Table:
    """State of the GPU around the timed blocks, and what else was at work on the host."""
    return _cell_table(
        run,
        "conditions",
        "State of the GPU while measuring",
        "NVML readings before and after each block. other cores, other GPUs: of the host, that other programs kept "
        "busy meanwhile. throttle: the clock-event reasons that were active, idle left out." + same_time.said(run),
        [
            "sm_clock_low_mhz",
            "sm_clock_high_mhz",
            "memory_clock_mhz",
            "power_high_w",
            "temperature_high_c",
            "throttle",
            "other_cores",
            "other_gpus",
        ],
        _conditions_of,
    )


def selection(run: Run) -> Table:
    """Which way each captured function is served, and the times that decided it, where ways were timed."""
    return make_table(
        "selection",
        "Which graphs serve calls",
        "A row per function that graphs are recorded of. none: without a graph; copy: a graph whose inputs are copied; "
        "indirection: one that reads them in place. Times are medians of an iteration of the functions of a group, "
        "which were judged together. excess: what timing a group took beyond its fastest way.",
        [
            *("workload", "mode", "graph", "group", "direction", "kernels", "copied_bytes"),
            *(f"{candidate}_us" for candidate in CANDIDATES),
            *("kept", "excess_s", "reason"),
        ],
        (
            {
                "workload": cell_label(cell),
                "mode": cell.mode,
                **function.model_dump(exclude={"candidates"}),
                **{f"{candidate}_us": time for candidate, time in function.median_us.items()},
            }
            for cell in run.cells
            for function in selected_functions(cell)
        ),
    )


def not_captured(run: Run) -> Table:
    """What stayed outside CUDA graphs, in Inductor's words."""
    return make_table(
        "not_captured",
        "Not captured, and why",
        "Inductor's own reason and the user's source line, per graph mode.",
        ["workload", "mode", "reason", "source_line", "count"],
        (
            {"workload": cell_label(cell), "mode": cell.mode, **reason.model_dump()}
            for cell in run.cells
            if cell.metrics and cell.metrics.graphs
            for reason in cell.metrics.graphs.not_captured
        ),
    )


def failed(run: Run) -> Table:
    """Cells without a result: those that failed, and those that the run set out to measure and has not."""
    rows: Iterator[Row] = (
        {"workload": cell_label(cell), "mode": cell.mode, "status": cell.status.value, "error": cell.error}
        for cell in run.failed
    )
    missing: Iterator[Row] = (
        {"workload": workload, "mode": mode, "status": "not run"} for workload, mode in run.missing
    )
    return make_table(
        "failed",
        "Failed, or not run",
        "Cells that did not pass, with their error, and cells of workloads that no run has."
        if run.parts
        else "Cells that did not pass, with their error, and cells the run has not come to (`encore run --resume`).",
        ["workload", "mode", "status", "error"],
        chain(rows, missing),
    )


def host_median_us(cell: Cell) -> float | None:
    """Median over all samples of a cell's host time to completion."""
    samples = _all_samples(cell, lambda block: block.host_us)
    return statistics.median(samples) if samples else None


def replay_peak_bytes(cell: Cell | None) -> int | None:
    """Peak bytes that the allocator reserved in steady replay, of a cell that passed."""
    if cell is None or cell.status is not Status.PASS or cell.metrics is None or cell.metrics.memory is None:
        return None
    return cell.metrics.memory.replay_peak_reserved_bytes


def recorded_graphs(cell: Cell) -> int | None:
    """How many CUDA graphs were recorded. Until 2026-11-26 rows had 0 of what Encore captures around the module: those
    are the graphs that an iteration launches, each once."""
    coverage, graphs = (cell.metrics.coverage, cell.metrics.graphs) if cell.metrics else (None, None)
    counted = graphs.cuda_graphs if graphs is not None else None
    return coverage.graph_launches if _captures_more(cell.mode) and not counted and coverage is not None else counted


def _captures_more(mode: str) -> bool:
    return mode in MODES and MODES[mode].captures_more


def _cell_table(
    run: Run,
    name: str,
    title: str,
    note: str,
    columns: Sequence[str],
    values: Callable[[Cell], Row],
    only_passed: bool = True,
) -> Table:
    """A table with one row per cell: workload, mode, status, and the values of cells that passed (else of all)."""
    return make_table(
        name,
        title,
        note,
        ["workload", "mode", "status", *columns],
        (
            {
                "workload": cell_label(cell),
                "mode": cell.mode,
                "status": cell.status.value,
                **(values(cell) if cell.status is Status.PASS or not only_passed else {}),
            }
            for cell in run.cells
        ),
    )


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


def _coverage_of(cell: Cell, published: Published) -> Row:
    row: Row = {}
    measured = cell.metrics.coverage if cell.metrics else None
    if measured:
        row |= {
            "coverage_percent": measured.percent,
            "graph_kernels": measured.graph_kernels,
            "other_kernels": measured.eager_kernels,
            "graph_launches": measured.graph_launches,
            "captured_kernel_nodes": measured.captured_kernel_nodes,
        }
    if cell.metrics and cell.metrics.graphs:
        row |= cell.metrics.graphs.model_dump(exclude={"not_captured"}) | {"cuda_graphs": recorded_graphs(cell)}
    if is_as_published(cell):
        for source in ("grace", "pygraph"):
            row[f"{source}_coverage_percent"] = published.coverage(source, cell.workload, cell.mode)
    return row


def _copies_of(cell: Cell, published: Published) -> Row:
    row: Row = {}
    measured = cell.metrics.copies if cell.metrics else None
    if measured:
        transfers = measured.host_to_device
        row |= measured.model_dump(exclude={"host_to_device"}) | {
            "host_to_device_bytes": sum(transfer.copied_bytes for transfer in transfers),
            "host_to_device_copies": sum(transfer.count for transfer in transfers),
            "blocking_copies": sum(transfer.count for transfer in transfers if transfer.blocking),
        }
        # Until 2026-11-26 rows of modes that capture more had 0 of what was not counted there.
        if measured.placeholder_bytes and not measured.placeholder_tensors:
            row["placeholder_tensors"] = None
        if _captures_more(cell.mode) and not measured.pointer_bytes:
            row["pointer_bytes"] = None
    if is_as_published(cell):
        row["grace_bytes"] = published.copied_bytes("grace", cell.workload, cell.mode)
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
    """How compile times were measured, in words."""
    if times.conditions is not None:
        return times.conditions.value
    return "cached, side by side" if times.warm_cache else "cold, side by side"


def throttling(run: Run) -> str | None:
    """A warning that names workloads during which the GPU lowered its clocks, with NVML's reasons; None without any."""
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
