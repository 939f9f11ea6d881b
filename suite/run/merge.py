"""Join runs of one environment, such as shards, into one run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.measure import environment
from suite.results import store
from suite.results.errors import WrongUse
from suite.results.run_writer import RunWriter
from suite.results.schema import Cell, Environment
from suite.results.store import RecordedRun, describe
from suite.run.schedule import missing_shards, shard_rule
from suite.settings import RunPlan, RunSettings, recorded_plan, setting_differences


@dataclass(frozen=True, slots=True)
class Merged:
    """Hold what was joined: the number of cells, and which shards no run is of, where some are shards ("3/3")."""

    cells: int
    missing_shards: tuple[str, ...]


def merge_runs(names: Sequence[str], out: Path, command_line: Sequence[str]) -> Merged:
    """Join runs into a new one in the folder `out`.

    A cell that several runs have must be the same row in each: two measurements of one cell are not joined. Rows of
    failed cells that were run again are kept, too.

    Raises:
        WrongUse: a run is unknown, the runs differ in settings or environment, two of them measured the same cell,
            a run is given twice, or `out` is not empty.
        InvalidResults: a run's file has wrong fields.
    """
    if len(names) < 2:
        raise WrongUse("encore merge needs at least two runs")
    runs = [store.read_run(store.find_run(name)) for name in names]
    _check_each_once(runs)
    for run in runs:
        if run.cut_line is not None:
            where = describe(run.path)
            raise WrongUse(f"{where}: its last line was cut short; repair it by `encore run --resume {where}`")
    _check_one_environment(runs)
    if (out / store.ENVIRONMENT).exists():
        raise WrongUse(f"{describe(out)} is a run already; give --out another folder")
    cells = _joined((run.path, run.cells) for run in runs)
    retried = [cell for run in runs for cell in store.read_retried(run.path)]
    with RunWriter.create(out, _environment(runs, out.resolve().name, command_line)) as writer:
        if retried:
            store.write_atomically(writer.path / store.RETRIED, store.lines_of(retried))
        store.write_atomically(writer.path / store.CELLS, store.lines_of(cells))
    return Merged(len(cells), tuple(missing_shards(recorded_plan(store.read_environment(out)).shards)))


def _check_each_once(runs: Sequence[RecordedRun]) -> None:
    """Refuse a run that is given twice, by another name, by a link or as a copy."""
    for index, run in enumerate(runs):
        for other in runs[:index]:
            same_folder = run.path.resolve() == other.path.resolve()
            if same_folder or (run.environment, run.cells) == (other.environment, other.cells):
                what = "is given twice" if same_folder else f"is a copy of {describe(other.path)}"
                raise WrongUse(f"{describe(run.path)} {what}; name each run once")


def _check_one_environment(runs: Sequence[RecordedRun]) -> None:
    # Every two: a run without an id of its code fits several that were changed in different ways.
    for first, other in itertools.combinations(runs, 2):
        plan, other_plan = recorded_plan(first.environment), recorded_plan(other.environment)
        found = setting_differences(plan, other_plan.settings.model_dump())
        if len({shard_rule(shard) for each in (plan, other_plan) for shard in each.shards}) > 1:
            there, here = (", ".join(each.shards) for each in (plan, other_plan))
            found.append(f"--shard: {there} there, {here} here")
        found += environment.differences(first.environment, other.environment)
        if found:
            raise WrongUse(
                f"{describe(first.path)} and {describe(other.path)} are not of one environment, and their rows do not "
                f"compare (the first is 'there', the second 'here'): {'; '.join(found)}"
            )


def _joined(of_runs: Iterable[tuple[Path, Sequence[Cell]]]) -> list[Cell]:
    rows: dict[tuple[str, str, str, str], tuple[Cell, Path]] = {}
    for here, cells in of_runs:
        for cell in cells:
            known, path = rows.setdefault(cell.key, (cell, here))
            if known.model_dump_json() != cell.model_dump_json():
                raise WrongUse(
                    f"{'/'.join(cell.key)} was measured in both {describe(path)} and {describe(here)}; a run holds "
                    "each cell once. Merge runs made with --shard, or leave one of these out."
                )
    return [cell for cell, _ in rows.values()]


def _environment(runs: Sequence[RecordedRun], run_id: str, command_line: Sequence[str]) -> Environment:
    plans = [recorded_plan(run.environment) for run in runs]
    plan = RunPlan(
        **{name: getattr(plans[0], name) for name in RunSettings.model_fields},
        workloads=_union(plan.workloads for plan in plans),
        modes=_union(plan.modes for plan in plans),
        parts=_union(plan.shards for plan in plans),
    )
    # The same code may have been measured before it was committed: the run is said to be of the commit.
    committed = (run.environment for run in runs if run.environment.git_dirty is False)
    codes = {run.environment.code for run in runs}
    return next(committed, runs[0].environment).model_copy(
        update={
            "run_id": run_id,
            "code": codes.pop() if len(codes) == 1 else None,
            "created_at": min(run.environment.created_at for run in runs),
            "command_line": [environment.without_folder(argument) for argument in command_line],
            "settings": plan.model_dump(),
        }
    )


def _union(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))
