"""Measure all workloads of a run: choose the modes that are alive together, and write rows.

Note [Groups]: blocks of a workload's modes are interleaved, with all modes alive together. Then all are started again,
as often as the settings require, because processes of one program differ. If a mode runs out of memory before anything
is measured, the workload starts again in halves that both include the common baselines. The modes of a half that does
not fit are measured in pairs: each with its baseline. If a pair does not fit either, its modes are measured one after
another. A mode has one row, from the first group it was measured in; rows of a later group include the blocks that its
baselines had there. Rows are written when their workload is complete.

Note [Short of memory]: a mode that runs out of memory before it has a block is measured again in a smaller group. If a
later process does not fit, its mode gets no further processes, and the row is of those before it. Any other lack of
memory is the status `oom`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from models.registry import Workload
from suite.measure.modes import Mode
from suite.results.errors import EXIT_FINDING, EXIT_OK
from suite.results.run_writer import RunWriter
from suite.results.schema import Cell, Grouping, Status
from suite.run.blocks import measure_blocks
from suite.run.group import Bench, GroupSession, do_not_fit
from suite.run.member import Member, cell_of
from suite.run.schedule import halves
from suite.run.supervise import TemporaryFolder, kill_strays
from suite.settings import format_duration
from suite.worker.compile_cache import CompileCache

Job = tuple[Workload, str]
"""A workload that is measured in all modes of the run, with its variant."""


@dataclass(slots=True)
class RunOutcome:
    """Hold a run after a start of it: rows of earlier starts, new ones, and what the budget left for a later one."""

    path: Path
    done: Sequence[Cell] = ()
    cells: list[Cell] = field(default_factory=list)
    not_started: list[str] = field(default_factory=list)

    @property
    def all_cells(self) -> list[Cell]:
        return list({cell.key: cell for cell in (*self.done, *self.cells)}.values())

    @property
    def failed(self) -> list[Cell]:
        return [cell for cell in self.all_cells if cell.status is not Status.PASS]

    @property
    def exit_code(self) -> int:
        return EXIT_FINDING if self.failed else EXIT_OK


def plan_jobs(workloads: Iterable[Job], modes: Sequence[Mode], size: str, done: Collection[Cell]) -> list[Job]:
    """Return the workloads that miss a row in one of the modes, in the order given.

    All of their modes are measured: rows of earlier starts were not interleaved with the missing ones.
    """
    rows = {cell.key for cell in done}
    return [
        (workload, variant)
        for workload, variant in workloads
        if any((workload.acronym, variant, size, mode.name) not in rows for mode in modes)
    ]


@dataclass(frozen=True, slots=True)
class Runner:
    """Measure jobs and write their rows.

    `budget_s` is counted from `run`; `warm_cache` is where compiled kernels are shared with `--warm-cache`.
    """

    writer: RunWriter
    bench: Bench
    modes: Sequence[Mode]
    estimates_s: Mapping[str, float]
    warm_cache: Path
    budget_s: float | None = None
    clock: Callable[[], float] = time.monotonic

    def run(self, jobs: Sequence[Job], done: Sequence[Cell] = ()) -> RunOutcome:
        """Measure all jobs the budget allows. However it ends, rows of workloads that are through are on disk, and no
        worker lives.

        Raises:
            OSError: a file cannot be written.
        """
        outcome = RunOutcome(self.writer.path, done)
        begun = self.clock()
        try:
            with TemporaryFolder() as headers:
                self.bench.headers = Path(headers)
                for number, (workload, variant) in enumerate(jobs, start=1):
                    name, used_s = workload.acronym, self.clock() - begun
                    needs_s = self.estimates_s[name]
                    if self.budget_s is not None and used_s + needs_s > self.budget_s:
                        needs, left = format_duration(needs_s), format_duration(self.budget_s - used_s)
                        note = f"not started, it may need {needs} and {left} of the budget are left"
                        self.bench.say(f"{name}: {note}")
                        outcome.not_started.append(name)
                        continue
                    left = format_duration(sum(self.estimates_s[one.acronym] for one, _ in jobs[number - 1 :]))
                    modes = ", ".join(mode.name for mode in self.modes)
                    self.bench.say(f"{name} ({number} of {len(jobs)}, about {left} left): {modes}")
                    outcome.cells += self._measured(workload, variant)
        finally:
            kill_strays()
        return outcome

    def _measured(self, workload: Workload, variant: str) -> list[Cell]:
        """Measure a workload, write its rows, and return them."""
        with self._session(workload, variant) as session:
            rows = self._measure(session)
        cells = [rows[mode.name] for mode in self.modes]
        self.writer.append(*cells)
        for cell in cells:
            self.bench.say(outcome_line(cell))
        return cells

    @contextmanager
    def _session(self, workload: Workload, variant: str) -> Iterator[GroupSession]:
        """Yield what measures a workload's modes, with their compile cache. Nothing of it is left after the block."""
        self.bench.logs.mkdir(exist_ok=True)
        with ExitStack() as stack:
            folder = self.warm_cache / workload.acronym
            if not self.bench.settings.warm_cache:
                folder = Path(stack.enter_context(TemporaryFolder()))
            cache = CompileCache(folder, kept=self.bench.settings.warm_cache)
            yield GroupSession(self.bench, workload, variant, cache)

    def _measure(self, session: GroupSession) -> dict[str, Cell]:
        """Return the rows of a workload by mode: see Note [Groups]."""
        cells = measure_group(session, self.modes, Grouping.TOGETHER)
        if not cells:
            name = session.workload.acronym
            self.bench.say(f"{name}: the modes do not fit into memory together; measuring fewer at a time")
            for half in halves(self.modes):  # a mode in both has its row from the first that fits
                cells |= measure_group(session, half, Grouping.HALVES, have_rows=cells)
        measure_in_pairs(session, self.modes, cells)
        if self.bench.settings.cold_compile_times:
            add_cold_compile_times(session, self.modes, cells)
        return cells


def outcome_line(cell: Cell) -> str:
    """Return one line on how a cell ended."""
    words = f"{cell.workload} {cell.mode}: {cell.status} in {format_duration(cell.wall_s)}"
    if cell.status is not Status.PASS:
        words = f"{words}: {cell.first_error_line}"
    return words


def add_cold_compile_times(session: GroupSession, modes: Sequence[Mode], cells: dict[str, Cell]) -> None:
    """Replace compile times in rows by those of compiling each mode alone with an empty cache."""
    for mode in modes:
        cell = cells[mode.name]
        if mode.backend is not None and cell.status is Status.PASS:
            with TemporaryFolder() as folder:
                times = session.cold_compile_times(mode, CompileCache(Path(folder)))
            if times is not None:
                cells[mode.name] = cell.model_copy(update={"compile": times})


def measure_group(
    session: GroupSession, modes: Sequence[Mode], grouping: Grouping, have_rows: Collection[str] = ()
) -> dict[str, Cell]:
    """Return rows of modes that are alive together, each in several processes, with interleaved blocks.

    Modes in `have_rows` only provide blocks for the others. The result is empty if one of several modes runs out of
    memory before anything is measured. Modes that run out of memory later, without a block, are left out: see Note
    [Short of memory]. A single mode is a group too; its failures are final.
    """
    settings = session.bench.settings
    processes: dict[str, list[Member]] = {mode.name: [] for mode in modes}
    count = settings.processes or 1
    with session.later_processes():
        session.expect(modes, range(1, count))
        for process in range(count):
            going_on = [mode for mode in modes if not any(member.failure for member in processes[mode.name])]
            if all(mode.name in have_rows for mode in going_on):
                break
            with session.alive(going_on, process) as alive:
                if not do_not_fit(alive):
                    for member in alive:
                        processes[member.mode.name].append(member)
                    measure_blocks(session, alive)
                    session.collect(alive, whole=[m for m in alive if not process and m.mode.name not in have_rows])
            for member in alive:
                if member.is_left_out:
                    name = f"{session.workload.acronym} {member.mode.name}"
                    session.bench.say(f"{name}: process {process + 1} does not fit into memory, and is left out")
            if not process and len(modes) > 1 and lacked_memory(alive):
                return {}
    guests = [member for name, members in processes.items() if name in have_rows for member in members]
    return {
        name: cell_of(session.workload, session.variant, settings, members, grouping, list(processes), guests)
        for name, members in processes.items()
        if members and name not in have_rows and (len(modes) == 1 or not lacked_memory(members))
    }


def measure_in_pairs(session: GroupSession, modes: Sequence[Mode], cells: dict[str, Cell]) -> None:
    """Add the rows of modes without one: each is measured with the first of its baselines, the rest alone.

    A baseline without a row has it from its first pair. The rest: modes without a baseline, and those that do not fit
    together with it.
    """
    by_name = {mode.name: mode for mode in modes}
    missing = [mode for mode in modes if mode.name not in cells]
    for mode in missing:
        baseline = next((by_name[name] for name in mode.baselines if name in by_name), None)
        if baseline is not None:
            have_rows = (baseline.name,) if baseline.name in cells else ()
            cells |= measure_group(session, [baseline, mode], Grouping.PAIRS, have_rows)
    for mode in missing:
        if mode.name not in cells:
            cells |= measure_group(session, [mode], Grouping.SEQUENTIAL)


def lacked_memory(members: Sequence[Member]) -> bool:
    """Return whether one of these ran out of memory, and none has measured anything."""
    return any(member.out_of_memory for member in members) and not any(member.blocks for member in members)
