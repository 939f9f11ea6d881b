"""PyTorch's own databases of operators, modules and optimizers, under plain compile, stock's graphs and Encore.

Each sample is called several times, with inputs at new addresses and of new values: eager, then under each compiler.
One sample of every entry comes first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from row_files import RowFile, facts
from worker_pool import Job, Pool

from . import rows as rows_of
from .databases import DATABASES, Task, tasks
from .trial import COMPILERS

DEVICES = {"cuda": tuple(COMPILERS), "simulated": ("compile", "encore")}
"""Compilers that a device can run."""

TIMEOUT_S, END_S = 90.0, 5.0
"""The longest time for one compiler, and the time that is left for the summary."""


def run(given: argparse.Namespace, rows: RowFile, environment: Mapping[str, str]) -> None:
    """Judge samples that have no rows yet. A row of each run's facts has the number that remains."""
    compilers = DEVICES[given.device]
    failed = failed_tasks(rows.rows) if given.again else set()
    counted = [row for row in rows.rows if row.get("task") not in failed]
    everything = tasks(DATABASES, "cpu" if given.device == "simulated" else given.device)
    part, parts = given.shard
    names = given.only.split(",") if given.only else ()
    chosen = [task for task in everything if not names or task.name in names or task.key in names][part - 1 :: parts]
    here = {**facts(device_name(given.device)), "compilers": compilers, "shard": f"{part}/{parts}"}

    def tell(row: dict[str, Any]) -> None:
        counted.append(row)
        rows.add(row)

    jobs = remaining(chosen, counted, compilers)
    print(f"{len(jobs)} samples to judge in {given.jobs} processes", file=sys.stderr)
    tell({"run": {**here, "remain": len(remaining(everything, counted, compilers))}})
    # Without a GPU a process would find out for half a minute which vector instructions it can use.
    extra = {} if given.device == "cuda" else {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
    pool = Pool(
        ("-P", "-m", "tests.judges.worker", given.device),
        jobs,
        tell,
        size=given.jobs,
        log=given.out / "workers.log",
        timeout_s=TIMEOUT_S,
        deadline=given.deadline - END_S,
        environment={**environment, **extra},
    )
    try:
        pool.run()
    finally:
        tell({"run": {**here, "remain": len(remaining(everything, counted, compilers))}})
    if pool.failed_starts:
        raise ChildProcessError(None, "workers end before they are ready; see", "workers.log")


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def failed_tasks(rows: Sequence[rows_of.Row]) -> set[str]:
    """Return the samples that fail under plain compile or under Encore, with whatever code their rows are of."""
    samples = rows_of.by_task(rows).items()
    return {
        key for key, of in samples if not all(of[name].get("passed") for name in of if name in ("compile", "encore"))
    }


def remaining(chosen: Sequence[Task], rows: Sequence[rows_of.Row], compilers: Sequence[str]) -> list[Job]:
    """Return the samples that have no rows yet, with the compilers that are missing."""
    done = rows_of.by_task(rows)
    found = []
    for task in chosen:
        has = done.get(task.key, {})
        missing = tuple(compiler for compiler in compilers if compiler not in has)
        if missing and "eager" not in has:
            found.append((task.key, missing))
    return found
