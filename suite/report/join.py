"""Several runs in one report.

Note [Alone]: workloads that are measured while others are, on other GPUs of the host, or while other programs are at
work there, have slower host times, those of `compile` most of all, and speed-ups over it look larger than they are. So
a newer run in which a workload was measured like that does not take the place of an older one in which it was alone,
unless a mode was not measured then, or passed in one of them only. Of other programs, rows say since 2026-11-26 what
they did meanwhile. Older rows count as alone where nothing is known against it.

Note [Interrupted]: rows of a workload that a run ended in (`suite.results.unfinished`) have fewer processes, so that
hardly a ratio has a verdict. They do not take the place of an older run that was through with the workload and where
all of these modes passed. Where it lacks one, the newer rows are all that there is of it. Where one has failed since,
nothing hides that.

Note [Captured iterations]: modes that capture a whole iteration or its module (`step`, `callables`) run where they are
named, and then next to a few others, as a rule. Such a run does not take the place of an older one that has modes which
it lacks: most tables are of those. It has a report of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optimizations.uncollected import uncollected
from suite.measure.modes import MODES
from suite.report.load import Run, Superseded, cell_label, cell_order, load_run
from suite.report.same_time import beside_others
from suite.results.errors import WrongUse
from suite.results.schema import Status
from suite.results.store import InvalidResults


def load_runs(folders: Sequence[Path]) -> Run:
    """The run of one folder, or those of several joined by `join_runs`.

    Raises:
        InvalidResults: see `load_run`.
        WrongUse: see `join_runs`.
    """
    with uncollected():  # behind each run there would be one over all runs before
        runs = [load_run(folder) for folder in folders]
    return join_runs(runs)


def load_recorded(folders: Sequence[Path]) -> Run | None:
    """Return all runs of these folders that can be read and fit to the newest, joined. The others are in `remarks`."""
    runs, remarks = [], []
    with uncollected():
        for folder in folders:
            try:
                runs.append(load_run(folder))
            except InvalidResults as error:
                remarks.append(f"left out: {error}")
    if not runs:
        return None
    newest = max(runs, key=_age)
    differ = {id(run): _differences(run, newest) for run in runs}
    remarks += [
        f"left out: run {_called(run)} differs from {_called(newest)} in {', '.join(differ[id(run)])}"
        for run in runs
        if differ[id(run)]
    ]
    joined = join_runs([run for run in runs if not differ[id(run)]])
    return replace(joined, remarks=(*joined.remarks, *remarks))


def join_runs(runs: Sequence[Run]) -> Run:
    """Several runs as one report shows them; a single run as it is.

    All rows of a workload are of one run, for ratios are of one run only: the newest that has any, or an older one as
    Note [Alone], Note [Interrupted] and Note [Captured iterations] say. Missing are the cells of workloads that no run
    has.

    Raises:
        WrongUse: a run is there twice, or the runs differ in GPU model, driver or PyTorch.
    """
    if len(runs) == 1:
        return runs[0]
    runs = sorted(runs, key=_age)
    _check_together(runs)
    taken = _taken(runs)
    parts = tuple(
        replace(run, cells=tuple(cell for cell in run.cells if taken[cell_label(cell)] == index))
        for index, run in enumerate(runs)
    )
    superseded = [
        *(each for run in runs for each in run.superseded),
        *(
            Superseded(cell, run.environment.run_id, runs[taken[cell_label(cell)]].environment.run_id)
            for index, run in enumerate(runs)
            for cell in run.failed
            if taken[cell_label(cell)] != index
        ),
    ]
    measured = {cell.workload for run in runs for cell in run.cells}
    missing = dict.fromkeys(pair for run in runs for pair in run.missing if pair[0] not in measured)
    cells = sorted((cell for part in parts for cell in part.cells), key=cell_order)
    remarks = tuple(remark for run in runs for remark in run.remarks)
    return Run(runs[-1].environment, tuple(cells), tuple(missing), parts, tuple(superseded), remarks)


def _taken(runs: Sequence[Run]) -> dict[str, int]:
    """Which of these runs, oldest first, each workload's rows are of."""
    beside = [set(beside_others(run)) for run in runs]
    have: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        for label in run.labels:
            have.setdefault(label, []).append(index)

    def best(label: str, *indices: int) -> int:
        *older, newest = indices
        if any(_captures_and_lacks(runs[newest], runs[index], label) for index in older):
            return best(label, *older)
        through = [index for index in older if not _is_unfinished(runs[index], label)]
        if _is_unfinished(runs[newest], label):
            enough = [index for index in through if _tells_as_much(runs[index], runs[newest], label)]
            return best(label, *enough) if enough else newest
        alone = (index for index in reversed(through) if label not in beside[index])
        if label in beside[newest]:
            return next((index for index in alone if _tells_as_much(runs[index], runs[newest], label)), newest)
        return newest

    return {label: best(label, *indices) for label, indices in have.items()}


def _is_unfinished(run: Run, label: str) -> bool:
    return any(cell.is_unfinished for cell in run.cells if cell_label(cell) == label)


def _captures_and_lacks(new: Run, old: Run, label: str) -> bool:
    """Whether the newer run captured iterations of it, which the older did not, and lacks modes of the older one."""
    ours, theirs = ({cell.mode for cell in run.cells if cell_label(cell) == label} for run in (new, old))
    captures = any(mode in MODES and MODES[mode].captures_more for mode in ours - theirs)
    return captures and not theirs <= ours


def _tells_as_much(old: Run, new: Run, label: str) -> bool:
    """Whether nothing is lost where the older run's rows stand for the newer one's: no mode, and no other outcome."""
    sides = [
        [(cell.mode, cell.status is Status.PASS) for cell in run.cells if cell_label(cell) == label]
        for run in (old, new)
    ]
    modes = [{mode for mode, _ in side} for side in sides]
    failed = [{mode for mode, passed in side if not passed} for side in sides]
    return modes[0] >= modes[1] and failed[0] & modes[1] == failed[1]


def _check_together(runs: Sequence[Run]) -> None:
    """Refuses runs whose rows may not stand in one table."""
    # Two shards may have been started in the same second; only all that is recorded of a run tells it from another.
    pairs = itertools.combinations(runs, 2)
    if again := next((new for old, new in pairs if old.environment == new.environment), None):
        raise WrongUse(f"run {_called(again)} is given twice; name each run once")
    first, *others = runs
    for other in others:
        if differ := _differences(first, other):
            raise WrongUse(
                f"runs {_called(first)} and {_called(other)} differ in {', '.join(differ)}, and their rows do not "
                "belong into one report; make one of each: `encore report RUN --out DIR`"
            )


def _differences(one: Run, other: Run) -> list[str]:
    """What keeps the rows of two runs out of one table: its name, with both values."""
    compared = (
        ("GPU", one.device, other.device),
        ("driver", one.environment.driver, other.environment.driver),
        ("PyTorch", _release(one), _release(other)),
    )
    return [f"{name} ({ours} and {theirs})" for name, ours, theirs in compared if ours != theirs]


def _release(run: Run) -> str:
    """PyTorch's version with the CUDA version it was built for, however the package spells that."""
    version, _, built = run.environment.torch.partition("+")
    cuda = run.environment.torch_cuda
    return f"{version} for CUDA {cuda}" if cuda else f"{version}+{built}" if built else version


def _called(run: Run) -> str:
    return f"{run.environment.run_id} of {run.environment.created_at[:19]}"


def _age(run: Run) -> tuple[str, str]:
    return run.environment.created_at, run.environment.run_id
