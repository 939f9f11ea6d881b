"""Run `encore run` from its options to its exit code: a new run, or one to go on with, checked before it starts."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from models.registry import DEFAULT_SET, TP_MARK, find, is_program
from suite.measure import environment
from suite.measure.gpu import find_gpu, visible_gpus
from suite.measure.modes import MODES, select_modes
from suite.results import store
from suite.results.errors import EncoreError, WrongUse
from suite.results.run_writer import RunWriter
from suite.results.schema import Cell, Environment, Status
from suite.results.store import RecordedRun, describe
from suite.run.group import Bench
from suite.run.matrix import matching, select_modes_for, select_workloads, split_names
from suite.run.own_program import examine_programs, name_programs
from suite.run.process import WORKER_COMMAND
from suite.run.runner import Job, Runner, RunOutcome, plan_jobs
from suite.run.schedule import estimated_seconds
from suite.run.supervise import Interrupted
from suite.settings import Preset, RunPlan, RunSettings, recorded_plan, setting_differences
from suite.worker.compile_cache import user_cache

NEWEST = "newest"
"""`--resume newest`: the newest run with the same request in the same environment, else a new one."""

MOST_DIFFERENCES = 8
"""Most differences that a message lists."""


@dataclass(frozen=True, slots=True)
class Request:
    """Hold the user's request. `given` holds the settings that were written on the command line, by field name."""

    preset: Preset
    given: Mapping[str, Any]
    command_line: Sequence[str]
    workloads: Sequence[str] = ()
    workload_set: str | None = None
    pattern: str | None = None
    modes: Sequence[str] | None = None
    resume: str | None = None
    retry_failed: bool = False
    budget_s: float | None = None
    timeout_s: float = 600.0
    out: Path | None = None
    tp: Sequence[int] | None = None
    starts: bool = True
    """True if anything is measured: what is only planned needs no GPU."""


def launch(request: Request, console: Console, worker_command: Sequence[str] = WORKER_COMMAND) -> RunOutcome:
    """Make or continue a run and measure what it misses. Progress and remarks go to the console.

    Raises:
        WrongUse: a name, an option or a combination is wrong, there is no GPU, or the run to resume does not fit.
        OSError: a file cannot be written.
        Interrupted: Ctrl-C; the console shows how to go on.
    """
    path, plan = _chosen(request, console)
    done: list[Cell] = []
    if path is None:
        path = _new_folder(request, plan)
        writer = RunWriter.create(path, _environment(path.resolve().name, request, plan))
    else:
        writer, recorded = RunWriter.reopen(path)
        done = _done(request, recorded)
    with writer:
        where = describe(writer.path)
        again = shlex.join(["encore", "run", "--resume", where])
        jobs = _jobs(plan, done)
        if not jobs:
            console.print(f"{where} has all of its {len(done)} cells already; nothing to run")
            outcome = RunOutcome(path, done)
        else:
            console.print(f"{where}: {len(jobs) * len(plan.modes)} cells to measure, {len(done)} are there")
            try:
                outcome = _runner(request, console, writer, plan, jobs, worker_command).run(jobs, done)
            except (Interrupted, EncoreError, OSError):
                console.print(f"interrupted; go on with: {again}")
                raise
    _say_result(console, outcome, again)
    return outcome


def _runner(
    request: Request,
    console: Console,
    writer: RunWriter,
    plan: RunPlan,
    jobs: Sequence[Job],
    worker_command: Sequence[str],
) -> Runner:
    estimates_s = _estimates_s(jobs, plan)
    bench = Bench(
        settings=plan.settings,
        logs=writer.path / "logs",
        timeout_s=request.timeout_s,
        worker_command=worker_command,
        say=partial(say_event, console),
    )
    return Runner(writer, bench, select_modes(plan.modes), estimates_s, user_cache() / "compiled", request.budget_s)


def say_event(console: Console, text: str) -> None:
    """Print an event on its own line, with the time of day."""
    console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)


def _chosen(request: Request, console: Console) -> tuple[Path | None, RunPlan]:
    """Return the run to go on with, None for a new one, and what it is to hold."""
    if request.resume not in (None, NEWEST):
        recorded = store.read_run(store.find_run(str(request.resume)))
        return recorded.path, _resumed_plan(request, recorded, console)
    plan = _new_plan(request, console)
    return _newest_that_fits(request, plan, console) if request.resume == NEWEST else None, plan


def _done(request: Request, recorded: RecordedRun) -> list[Cell]:
    """Return the rows of a run that are not measured again."""
    return [cell for cell in recorded.cells if cell.status is Status.PASS or not request.retry_failed]


def _jobs(plan: RunPlan, done: Sequence[Cell]) -> list[Job]:
    # A plan without a workload is not one of all workloads.
    chosen = select_workloads(plan.workloads, plan.variant, planned=True) if plan.workloads else ()
    return plan_jobs(chosen, select_modes(plan.modes), plan.size, done)


def _new_plan(request: Request, console: Console) -> RunPlan:
    settings = request.preset.settings.model_copy(update=dict(request.given)).checked()
    elsewhere = request.workload_set is not None or bool(request.tp) or request.pattern is not None
    names = request.workloads or (() if elsewhere else request.preset.workloads)
    _examine(request, names, settings, console)
    if request.tp:
        names = split_names(names, request.tp, request.workload_set)
    chosen = request.workload_set or (None if names else DEFAULT_SET)
    workloads = matching(select_workloads(names, settings.variant, chosen), request.pattern)
    modes = request.modes
    if modes is None and request.preset.modes is not None:
        modes = [name for name in request.preset.modes if settings.device == "cuda" or not MODES[name].needs_gpu]
    plan = RunPlan(
        **settings.model_dump(),
        workloads=[workload.acronym for workload, _ in workloads],
        modes=[mode.name for mode in select_modes_for(settings.device, modes)],
    )
    if request.starts:
        _require_device(plan)
    return plan


def _examine(request: Request, names: Sequence[str], settings: RunSettings, console: Console) -> None:
    """Register the programs of the user's own among these names; run them before anything of theirs is measured."""
    programs = [name for name in names if is_program(name)]
    name_programs(programs, "split" if request.tp else settings.variant, settings.size)  # --tp is no option of theirs
    if request.starts and programs:
        if settings.device == "cuda":
            find_gpu()
        examine_programs(programs, settings.device, settings.seed, lambda text: console.print(text, markup=False))


def planned_jobs(request: Request, console: Console) -> tuple[list[Job], list[str], dict[str, float]]:
    """Return the workloads that a start of this request would measure, the modes, and the seconds of each workload.

    Nothing is made or started.

    Raises:
        WrongUse: a name, an option or a combination is wrong, or the run to resume does not fit.
    """
    request = replace(request, starts=False)
    path, plan = _chosen(request, console)
    jobs = _jobs(plan, [] if path is None else _done(request, store.read_run(path)))
    return jobs, plan.modes, _estimates_s(jobs, plan)


def _estimates_s(jobs: Sequence[Job], plan: RunPlan) -> dict[str, float]:
    size, device, modes = plan.size, plan.device, len(plan.modes)
    return {
        workload.acronym: estimated_seconds(workload.acronym, workload.task, size=size, device=device, modes=modes)
        for workload, _ in jobs
    }


def _resumed_plan(request: Request, recorded: RecordedRun, console: Console) -> RunPlan:
    """Return the plan of a run to go on with, if this request and machine fit it."""
    if request.workloads or request.modes or any((request.workload_set, request.pattern, request.tp)):
        raise WrongUse("--resume RUN goes on with the run's own workloads and modes; name none, or start a new run")
    plan = recorded_plan(recorded.environment)
    if request.starts:
        _require_device(plan)
    here = _environment(recorded.environment.run_id, request, plan)
    found = setting_differences(plan, request.given) + environment.differences(recorded.environment, here)
    if found:
        raise WrongUse(
            f"{describe(recorded.path)} was made with other settings or in another environment, and its rows would not "
            f"compare: {_listed(found)}. Leave these options out or restore that environment, or start a new run."
        )
    _examine(request, plan.workloads, plan, console)
    return plan


def _newest_that_fits(request: Request, plan: RunPlan, console: Console) -> Path | None:
    """Return the newest run with this plan and environment, finished or not; report why a newer one is not used."""
    if request.out is not None:
        candidates = [request.out] if (request.out / store.ENVIRONMENT).exists() else []
    else:
        candidates = store.list_runs(store.RUNS)[::-1]
    here = _environment(NEWEST, request, plan)
    for number, path in enumerate(candidates):
        there = store.read_environment(path)
        try:
            found = setting_differences(recorded_plan(there), plan.model_dump())
        except WrongUse as error:
            found = [str(error)]
        found += environment.differences(there, here)
        if not found:
            console.print(f"going on with {describe(path)}")
            return path
        if number == 0:
            console.print(f"not going on with {describe(path)}: {_listed(found)}")
    return None


def _environment(run_id: str, request: Request, plan: RunPlan) -> Environment:
    return environment.collect(run_id, request.command_line, plan.model_dump())


def _require_device(plan: RunPlan) -> None:
    if plan.device != "cuda":
        return
    find_gpu()
    degrees = {name: find(name).tp or 1 for name in plan.workloads if TP_MARK in name.lower()}
    most = max(degrees.values(), default=1)
    if most > 1 and most > (there := len(visible_gpus())):
        lacking = ", ".join(name for name, degree in degrees.items() if degree > there)
        raise WrongUse(
            f"{lacking}: {there} GPUs can be used here; give --tp degrees up to {there}, or show more of them with "
            "CUDA_VISIBLE_DEVICES"
        )


def _new_folder(request: Request, plan: RunPlan) -> Path:
    """Return `--out`, or a new folder named by time and device."""
    if request.out is not None:
        return request.out
    device = find_gpu().info.name.removeprefix("NVIDIA ") if plan.device == "cuda" else "cpu"
    name = re.sub(r"\W+", "-", device).strip("-").lower()
    return store.new_folder(store.RUNS, f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}")


def _listed(found: Sequence[str]) -> str:
    more = f"; and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
    return "; ".join(found[:MOST_DIFFERENCES]) + more


def _say_result(console: Console, finished: RunOutcome, again: str) -> None:
    """Print the result of a run. `again`: the command that goes on."""
    where = describe(finished.path)
    count = len(finished.all_cells)
    console.print(f"{where}: {count - len(finished.failed)} of {count} cells passed")
    for cell in finished.failed:
        console.print(f"  {cell.workload} {cell.mode}: {cell.status}, see {where}/logs")
    if finished.failed:
        console.print(f"run the failed ones again with: {again} --retry-failed")
    if finished.not_started:
        names = ", ".join(finished.not_started)
        console.print(f"not started for lack of time: {names}; go on with: {again}")
