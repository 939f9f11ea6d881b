"""Rows of TorchBench's models, and text about them, from runs of the suite.

    PYTHONPATH=DIR encore run --set torchbench --variant random-weights --warm-cache --processes 1 --measure-s 2 \
        --modes eager,compile,graph,encore --timeout 3m --out OUT/run
    encore run EOS TKE --modes compile,graph,encore --processes 1 --out OUT/own
    python -m tests.judges torchbench OUT

DIR is a checkout of pytorch/benchmark. The variant has weights that nothing must be downloaded for. A model that cannot
be imported or built is a failed row of the suite. EOS and TKE are the suite's own programs of two of the models.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODES = {"compile": "compile", "stock": "graph", "encore": "encore"}
"""The suite's modes by the judges' names of compilers."""


def rows_of_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each model and compiler, of the last folder that has it, after one of facts."""
    from suite.results import store

    compilers = {mode: compiler for compiler, mode in MODES.items()}
    rows: list[dict[str, Any]] = []
    for folder in folders:
        recorded = store.read_run(folder)
        environment = recorded.environment
        facts = {
            "device": environment.gpu.name if environment.gpu else "cpu",
            "commit": environment.git_commit,
            "code_changed": environment.git_dirty,
            "torch": environment.torch,
            "triton": environment.packages.get("triton"),
            "python": environment.python or platform.python_version(),
        }
        cells = {(cell.workload, cell.mode): cell for cell in recorded.cells}
        rows += [{"run": facts}, *(
            _row(cell, compilers[mode], cells.get((workload, MODES["compile"])))
            for (workload, mode), cell in cells.items() if mode in compilers
        )]  # fmt: skip
    return rows


def _row(cell: Any, compiler: str, plain: Any) -> dict[str, Any]:
    """Return the row of a cell. `plain`: plain compile's, which took turns with it."""
    from suite.results.schema import Status
    from suite.results.stats import speed_up

    prefix, _, name = cell.workload.rpartition(":")
    task = f"torchbench|{name if prefix else f'{name} of the suite'}"
    wrong = f"{cell.status}: {cell.first_error_line}"[:400]
    if cell.status is Status.MODEL_FAIL_TO_LOAD:
        return {"task": task, "compiler": "eager", "skipped": wrong}
    row: dict[str, Any] = {"task": task, "compiler": compiler, "passed": cell.status is Status.PASS}
    metrics = cell.metrics
    row["replays"] = metrics.coverage.graph_launches if metrics and metrics.coverage else 0
    row["seconds"] = cell.wall_s
    if not row["passed"]:
        row |= {"wrong": wrong, "crashed": cell.status is Status.CRASH}
    if metrics and metrics.kernels:
        row["kernels"] = sum(metrics.kernels.values())
        row["generated"] = sum(count for key, count in metrics.kernels.items() if key.startswith("triton_"))
    if metrics and metrics.coverage and metrics.coverage.percent is not None:
        row["in_graphs"] = round(metrics.coverage.percent, 1)
    if plain is not None and plain is not cell and plain.blocks and cell.blocks:
        ratio = speed_up([[block.host_us for block in plain.blocks]], [[block.host_us for block in cell.blocks]])
        row["over_compile"] = [round(each, 3) for each in (ratio.value, ratio.low, ratio.high)]
        row["others_cores"] = cell.others.cpu_cores if cell.others else None
    return row


def brief(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return paragraphs of all models: kernels, of Triton and in graphs in per cent; and times of those that have."""
    from .rows import by_task

    models, timed = [], []
    for task, of in by_task(rows).items():
        judge, name = task.split("|", 1)
        plain, stock, encore = (of.get(compiler, {}) for compiler in MODES)
        if judge != "torchbench" or not plain.get("kernels"):
            continue
        shares = [100 * plain["generated"] / plain["kernels"], *(one.get("in_graphs") for one in (stock, encore))]
        numbers = ["?" if one is None else f"{one:.0f}" for one in shares]
        models.append(f"{name} {'/'.join([str(plain['kernels']), *numbers])}")
        if "over_compile" in stock and "over_compile" in encore:
            timed.append(f"{name} {stock['over_compile'][0]:.2f}/{encore['over_compile'][0]:.2f}")
    parts = ["Kernels / per cent of them Triton's / in stock's graphs / in Encore's: " + ", ".join(models) + "."]
    if timed:
        cores = max(row.get("others_cores") or 0 for row in rows)
        how = f"Stock / Encore over plain compile, while other programs used up to {cores:.1f} cores: "
        parts += [how + ", ".join(timed) + ".", " ".join(_gains(rows))]
    return "\n\n".join(parts)


def _gains(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that say in which models graphs help and in which they hurt, by the interval of the ratio."""
    lines = []
    for compiler, text in (("stock", "Stock's graphs"), ("encore", "Encore")):
        timed = {row["task"].split("|")[1]: row["over_compile"] for row in rows if row.get("compiler") == compiler
                 and "over_compile" in row}  # fmt: skip
        faster = [name for name, (_, low, _) in timed.items() if low > 1]
        slower = [name for name, (_, _, high) in timed.items() if high < 1]
        lines.append(
            f"{text}: {len(faster)} of {len(timed)} timed are faster than plain compile by the interval of blocks, "
            f"slower {', '.join(slower) or 'none'}."
        )
    return lines
