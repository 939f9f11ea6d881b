"""Read runs strictly, join several runs into one report, and sort their rows into groups.

Note [Alone]: host times are longer if other workloads are measured on other GPUs of the host at the same time, or other
programs run there. This affects `compile` most, so that speed-ups over it are overestimated. So such rows do not
replace those of an older run in which the workload was alone, unless the older one lacks a mode, or a mode passed in
only one of them. Rows since 2026-11-26 have the load of other programs. Older rows count as alone unless the recorded
times show otherwise.

Note [Captured iterations]: modes that capture a whole iteration or its module (`step`, `callables`) run only if they
are named, usually together with few others. Such a run does not replace an older one with modes that it lacks, because
most tables show those modes. It has a separate report.

Note [At the same time]: workloads on one host disturb each other's host times, most of all those of mode `compile`,
which uses the host most. Runs of one report may be on the GPUs of one host. Rows do not record the host, so runs on
several hosts are named as well. Rows since 2026-11-26 also have the load of other programs
(`suite.results.schema.HostUse`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from models.registry import TP_MARK
from optimizations.uncollected import uncollected
from suite.measure.modes import MODES
from suite.report.published import PUBLISHED_VARIANT, Published
from suite.results.errors import WrongUse
from suite.results.schema import Cell, Environment, Status
from suite.results.store import InvalidResults, RecordedRun, describe, read_run

FULL_SIZE = "full"


@dataclass(frozen=True, slots=True)
class Run:
    """Hold a run as the report shows it, or several joined (`suite.report.runs`): cells by workload, in order of modes.

    `missing` are the planned (workload, mode) pairs without a row. `remarks` are errors in its files. `parts` are the
    joined runs, oldest first, each with its cells; `environment` is then that of the newest. `of_variants` are the
    published programs' cells of those runs from which the rows of their variants are.
    """

    environment: Environment
    cells: tuple[Cell, ...]
    missing: tuple[tuple[str, str], ...] = ()
    parts: tuple[Run, ...] = ()
    remarks: tuple[str, ...] = ()
    of_variants: tuple[Cell, ...] = ()

    @property
    def device(self) -> str:
        """Return the device of the run: the GPU's name, or the CPU's model for a run without one."""
        gpu, only_cpu = self.environment.gpu, bool(self.cells) and all(cell.device == "cpu" for cell in self.cells)
        return gpu.name if gpu and not only_cpu else f"CPU {self.environment.cpu.model}"

    @property
    def failed(self) -> tuple[Cell, ...]:
        """Return cells that did not pass."""
        return tuple(cell for cell in self.cells if cell.status is not Status.PASS)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the rows, each once, in the order of the cells."""
        return tuple(dict.fromkeys(cell_label(cell) for cell in self.cells))


def mode_order(mode: str) -> tuple[int, str]:
    """Return the sort key of a mode: its index in `MODES`; unknown modes are last."""
    names = list(MODES)
    return (names.index(mode) if mode in names else len(names), mode)


def row_label(workload: str, *remarks: str | None) -> str:
    """Return the label of a row: the acronym, and in brackets differences from the published program in full size."""
    remarkable = [remark for remark in remarks if remark not in (None, PUBLISHED_VARIANT, FULL_SIZE)]
    return f"{workload} ({', '.join(map(str, remarkable))})" if remarkable else workload


def cell_label(cell: Cell) -> str:
    """Return the label of a cell's row."""
    return row_label(cell.workload, cell.variant, cell.size, "with optimizer" if cell.with_optimizer else None)


def cell_order(cell: Cell) -> tuple[str, tuple[int, str]]:
    """Return the sort key of a cell: by the label of its row, then in the order of modes."""
    return cell_label(cell), mode_order(cell.mode)


def load_run(folder: Path) -> Run:
    """Return a run from its folder.

    Raises:
        InvalidResults: a file is missing or has wrong fields; the message has the file and the line.
    """
    return run_of(read_run(folder))


def run_of(recorded: RecordedRun) -> Run:
    """Return a run that was read, in the report's order, with remarks on its files."""
    run_id, where = recorded.environment.run_id, describe(recorded.path)
    remark = f"run {run_id} has no row: nothing is measured yet; `encore run --resume {where}` goes on with it"
    return Run(
        recorded.environment,
        tuple(sorted(recorded.cells, key=cell_order)),
        tuple(recorded.missing()),
        remarks=() if recorded.cells else (remark,),
    )


ROUNDING = timedelta(seconds=1)
"""Rounding of the start time of a row. Workloads of one process of the suite overlap by less."""


DISTURBING_CORES = 1.0
"""Number of cores that count as load of other programs. An idle host itself uses some tenths of a core."""


def next_to_programs(run: Run) -> tuple[str, ...]:
    """Return the labels of rows with a mode that recorded load of other programs."""
    found = {
        cell_label(cell)
        for cell in run.cells
        if (others := cell.others) is not None
        and ((others.cpu_cores or 0.0) >= DISTURBING_CORES or bool(others.gpus_at_work))
    }
    return tuple(label for label in run.labels if label in found)


def at_the_same_time(run: Run) -> tuple[str, ...]:
    """Return the labels of rows that were measured at the same time as rows of another part, in the order of cells.

    Parts are the runs of a report. For a run that versions before 0.2.0 joined from shards, it is only known that no
    workload is in two of them.
    """
    spans = []
    for number, part in enumerate(run.parts or (run,)):
        for cell in part.cells:
            begin = datetime.fromisoformat(cell.started_at)
            own = cell_label(cell) if part.environment.command_line[1:2] == ["merge"] else ""
            spans.append(((number, own), cell_label(cell), begin + ROUNDING, begin + timedelta(seconds=cell.wall_s)))
    found = {
        label
        for part, label, begin, end in spans
        if any(part != other and begin < until and start < end for other, _, start, until in spans)
    }
    return tuple(label for label in run.labels if label in found)


def load_notes(run: Run) -> Iterator[str]:
    """Yield sentences on rows that other workloads or programs may have disturbed."""
    if count := len(at_the_same_time(run)):
        yield (
            f"{count} workloads were measured at the same time as others: if that was on one host, they disturbed each "
            "other's host times, those of mode compile most."
        )
    if count := len(next_to_programs(run)):
        yield (
            f"{count} workloads were measured while other programs kept a core or another GPU of the host busy, which "
            "makes host times longer, those of mode compile most."
        )


def load_runs(folders: Sequence[Path], *, leave_out: bool = False) -> Run:
    """Return the run of one folder, or those of several joined by `join_runs`.

    Args:
        leave_out: leave out runs that cannot be read or combined with the newest; `remarks` name them.

    Raises:
        InvalidResults: see `load_run`.
        WrongUse: see `join_runs`; with `leave_out`, no run can be read.
    """
    runs, remarks = [], []
    with uncollected():  # otherwise each run would trigger a collection over all earlier ones
        for folder in folders:
            try:
                runs.append(load_run(folder))
            except (InvalidResults, OSError) as error:
                if not leave_out:
                    raise
                remarks.append(f"left out: {error}")
    if not runs:
        raise WrongUse(f"no run can be read; {'; '.join(remarks)}")
    if leave_out:
        newest = max(runs, key=_age)
        for run in list(runs):
            if differ := _differences(run, newest):
                remarks.append(f"left out: run {_called(run)} differs from {_called(newest)} in {', '.join(differ)}")
                runs.remove(run)
    joined = join_runs(runs)
    return replace(joined, remarks=(*joined.remarks, *remarks))


def join_runs(runs: Sequence[Run]) -> Run:
    """Join several runs for one report; a single run is unchanged.

    All rows of a workload are of one run, because ratios are computed within a run: the newest that has any, or an
    older one by Note [Alone] and Note [Captured iterations]. `missing` has the cells of workloads that no run has.

    Raises:
        WrongUse: a run is given twice, or the runs differ in GPU model, driver or PyTorch.
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
    measured = {cell.workload for run in runs for cell in run.cells}
    missing = dict.fromkeys(pair for run in runs for pair in run.missing if pair[0] not in measured)
    cells = sorted((cell for part in parts for cell in part.cells), key=cell_order)
    remarks = tuple(remark for run in runs for remark in run.remarks)
    rewritten = [{cell.workload for cell in part.cells if cell.variant != PUBLISHED_VARIANT} for part in parts]
    of_variants = tuple(
        cell
        for run, workloads in zip(runs, rewritten, strict=True)
        for cell in run.cells
        if cell.variant == PUBLISHED_VARIANT and cell.workload in workloads
    )
    return Run(runs[-1].environment, tuple(cells), tuple(missing), parts, remarks, of_variants)


def _taken(runs: Sequence[Run]) -> dict[str, int]:
    """Return the run of each workload's rows, from these runs, oldest first."""
    others = [{*at_the_same_time(run), *next_to_programs(run)} for run in runs]
    have: dict[str, dict[int, dict[str, bool]]] = {}
    for index, run in enumerate(runs):
        for cell in run.cells:
            have.setdefault(cell_label(cell), {}).setdefault(index, {})[cell.mode] = cell.status is Status.PASS

    def best(label: str, passed: dict[int, dict[str, bool]]) -> int:
        *older, newest = passed
        new = passed[newest]
        if any(_captures_and_lacks(new.keys(), passed[index].keys()) for index in older):
            return best(label, {index: passed[index] for index in older})
        alone = [index for index in reversed(older) if label not in others[index]] if label in others[newest] else []
        return next((index for index in alone if new.items() <= passed[index].items()), newest)

    return {label: best(label, passed) for label, passed in have.items()}


def _captures_and_lacks(new: Set[str], old: Set[str]) -> bool:
    """Return whether only the newer run captured iterations of the workload, and it lacks modes of the older one."""
    return any(mode in MODES and MODES[mode].captures_more for mode in new - old) and not old <= new


def _check_together(runs: Sequence[Run]) -> None:
    """Refuse runs whose rows may not be in one table."""
    # Two runs may have started in the same second, so runs are equal only if their whole records are.
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
    """Return the first difference that prevents a common table of two runs: its name, with both values."""
    compared = (
        ("GPU", one.device, other.device),
        ("driver", one.environment.driver, other.environment.driver),
        ("PyTorch", _release(one), _release(other)),
    )
    return [f"{name} ({ours} and {theirs})" for name, ours, theirs in compared if ours != theirs]


def _release(run: Run) -> str:
    """Return PyTorch's version with its CUDA version in a uniform notation."""
    version, _, built = run.environment.torch.partition("+")
    cuda = run.environment.torch_cuda
    return f"{version} for CUDA {cuda}" if cuda else f"{version}+{built}" if built else version


def _called(run: Run) -> str:
    return f"{run.environment.run_id} of {run.environment.created_at[:19]}"


def _age(run: Run) -> tuple[str, str]:
    return run.environment.created_at, run.environment.run_id


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Hold the rows of one figure. `suffix` is appended to the names of its figures, `title` to its sentences."""

    suffix: str
    title: str
    labels: tuple[str, ...]

    @property
    def has_means(self) -> bool:
        """Return whether a row is of this workload: over several GPUs there is one for each number of ranks."""
        return self.suffix != "_gpus"


def row_groups(labels: Iterable[str], published: Published) -> tuple[RowGroup, ...]:
    """Return the groups that have rows: GraCE's workloads, others, with the optimizer, over several GPUs."""
    of_grace = published.workloads["grace"]
    found: dict[str, list[str]] = {"": [], "_others": [], "_optimizer": [], "_gpus": []}
    for label in labels:
        split = "_gpus" if TP_MARK in label else "_optimizer" if label.endswith("with optimizer)") else ""
        found[split or ("" if label in of_grace else "_others")].append(label)
    titles = {
        "": f"GraCE's {len(of_grace)} workloads",
        "_others": "other workloads",
        "_optimizer": "training with the optimizer",
        "_gpus": "several GPUs",
    }
    return tuple(RowGroup(name, titles[name], tuple(rows)) for name, rows in found.items() if rows)
