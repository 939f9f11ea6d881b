"""What a report is made of, read strictly: runs (by `suite.results.store`) and the results of `encore explain`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from suite.explain.records import Explanation
from suite.measure.modes import MODES
from suite.report.published import PUBLISHED_VARIANT
from suite.results.errors import WrongUse
from suite.results.schema import EXPLANATION_VERSION, Cell, Environment, Status
from suite.results.store import InvalidResults, RecordedRun, describe, read_retried, read_run
from suite.run.schedule import missing_shards

FULL_SIZE = "full"


@dataclass(frozen=True, slots=True)
class Superseded:
    """A failed cell whose row is not in the report, because the workload was measured again: later in the same run
    (`by` is None), or in the run `by`.
    """

    cell: Cell
    run_id: str
    by: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the report shows it, or several joined (`suite.report.join`): cells by workload, in the order of modes.

    `missing` are the (workload, mode) pairs the run set out to measure and has not; `superseded` failures that newer
    rows stand for. `remarks` say what is wrong with its files. `parts` are the runs that were joined, oldest first,
    each with the cells taken from it; `environment` is then that of the newest.
    """

    environment: Environment
    cells: tuple[Cell, ...]
    missing: tuple[tuple[str, str], ...] = ()
    parts: tuple[Run, ...] = ()
    superseded: tuple[Superseded, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """What it was measured on: the GPU's name, or the CPU's model for a run without one."""
        gpu, only_cpu = self.environment.gpu, bool(self.cells) and all(cell.device == "cpu" for cell in self.cells)
        return gpu.name if gpu and not only_cpu else f"CPU {self.environment.cpu.model}"

    @property
    def failed(self) -> tuple[Cell, ...]:
        """Cells that did not pass."""
        return tuple(cell for cell in self.cells if cell.status is not Status.PASS)

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes that occur, in the order of `MODES`."""
        return tuple(sorted({cell.mode for cell in self.cells}, key=mode_order))

    @property
    def labels(self) -> tuple[str, ...]:
        """What the rows are called, each once, in the order of the cells."""
        return tuple(dict.fromkeys(cell_label(cell) for cell in self.cells))

    def find(self, row: str, mode: str) -> Cell | None:
        """The cell of the row with this label in this mode."""
        return next((cell for cell in self.cells if cell.mode == mode and cell_label(cell) == row), None)


def mode_order(mode: str) -> tuple[int, str]:
    """Sort key of a mode: its place in `MODES`; modes this version does not know come last."""
    names = list(MODES)
    return (names.index(mode) if mode in names else len(names), mode)


def row_label(workload: str, *remarks: str | None) -> str:
    """What a row is called: the acronym, and in brackets what sets it apart from the published program in full size."""
    remarkable = [remark for remark in remarks if remark not in (None, PUBLISHED_VARIANT, FULL_SIZE)]
    return f"{workload} ({', '.join(map(str, remarkable))})" if remarkable else workload


def cell_label(cell: Cell) -> str:
    """What the row of a cell is called."""
    return row_label(cell.workload, cell.variant, cell.size, "with optimizer" if cell.with_optimizer else None)


def cell_order(cell: Cell) -> tuple[str, tuple[int, str]]:
    """Sort key: by what the row is called, then in the order of modes."""
    return cell_label(cell), mode_order(cell.mode)


def is_as_published(cell: Cell) -> bool:
    """Whether published numbers may stand next to this cell: the published program in full size, nothing added."""
    return cell.variant == PUBLISHED_VARIANT and cell.size == FULL_SIZE and not cell.with_optimizer


def load_run(folder: Path) -> Run:
    """A run from its folder.

    Raises:
        InvalidResults: a file is missing or has wrong fields; the message has the file and the line.
    """
    return run_of(read_run(folder))


def run_of(recorded: RecordedRun) -> Run:
    """A run that was read, with what its folder has besides.

    Raises:
        InvalidResults: a file is damaged; the message has the file and the line.
    """
    run_id = recorded.environment.run_id
    retried = (Superseded(cell, run_id, None) for cell in read_retried(recorded.path))
    where = describe(recorded.path)
    cut = (
        f"the last line of run {run_id} was cut short, and that cell is left out; "
        f"`encore run --resume {where}` measures it again"
    )
    begun = ", ".join(dict.fromkeys(map(cell_label, recorded.unfinished)))
    unfinished = (
        f"run {run_id} ended before {begun} was through, and has what was measured until then; "
        f"`encore run --resume {where}` measures it again"
    )
    empty = f"run {run_id} has no row: nothing is measured yet; `encore run --resume {where}` goes on with it"
    parts = recorded.environment.settings.get("parts")
    without = missing_shards(map(str, parts)) if isinstance(parts, list) else []
    incomplete = f"run {run_id} was joined without shard {', '.join(without)}, and what that has is missing"
    return Run(
        recorded.environment,
        tuple(sorted((*recorded.cells, *recorded.unfinished), key=cell_order)),
        tuple(recorded.missing()),
        superseded=tuple(retried),
        remarks=tuple(
            remark
            for remark, holds in (
                (empty, not (recorded.cells or recorded.unfinished) and recorded.cut_line is None),
                (unfinished, bool(recorded.unfinished)),
                (cut, recorded.cut_line is not None),
                (incomplete, bool(without)),
            )
            if holds
        ),
    )


def load_explanations(folder: Path) -> tuple[Explanation, ...]:
    """Explanations from a folder of `<name>.json` files, by target and variant.

    Raises:
        WrongUse: there is no such folder, or no explanation in it.
        InvalidResults: a file has wrong fields, or two are of the same target and variant.
    """
    if folder.is_file():
        raise WrongUse(f"--explanations {folder} is a file; give the folder that `encore explain --out DIR` wrote")
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise WrongUse(f"{describe(folder)} holds no explanations; `encore explain --all --out {folder}` makes them")
    found: dict[tuple[str, str, str], Explanation] = {}
    for path in files:
        explanation = _read_explanation(path)
        key = (explanation.target, explanation.variant or "", explanation.size)
        if key in found:
            twice = row_label(explanation.target, explanation.variant, explanation.size)
            raise InvalidResults(f"{describe(path)}: {twice} is explained in another file of this folder too")
        found[key] = explanation
    return tuple(explanation for _, explanation in sorted(found.items()))


def _read_explanation(path: Path) -> Explanation:
    try:
        explanation = Explanation.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidResults(
            f"{describe(path)}: {f'field {where!r}: ' if where else ''}{first['msg']}; this is not an explanation of "
            f"schema version {EXPLANATION_VERSION}. Make it again with `encore explain`."
        ) from error
    if explanation.schema_version != EXPLANATION_VERSION:
        raise InvalidResults(
            f"{describe(path)}: schema version {explanation.schema_version}, this Encore reads {EXPLANATION_VERSION}; "
            "make it again with `encore explain`"
        )
    return explanation
