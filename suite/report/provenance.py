"""Describe the provenance of a table or figure, and whether its numbers are meaningful for performance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from optimizations.byte_units import format_bytes
from suite.measure.environment import shown_code
from suite.report.runs import FULL_SIZE, Run
from suite.results.schema import Environment


@dataclass(frozen=True, slots=True)
class RunRows:
    """Hold one run that rows are of.

    Attributes:
        commit: short git commit, "+ changes" where the tree was dirty, and the code's id where there is one.
        labels: its rows; None for results that have no rows of workloads.
        warning: set for a smoke run.
    """

    name: str
    commit: str | None
    labels: tuple[str, ...] | None
    warning: str | None

    def __str__(self) -> str:
        return f"run {self.name} (commit {self.commit or 'unknown'})"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Hold the origin of a table or figure, or of one of its rows.

    Attributes:
        device: GPU name, or the CPU's model for a run without one.
        torch: PyTorch version.
        runs: the runs; those without a row are named, and not counted.
        warning: set for smoke runs (on a CPU, or in tiny size), whose numbers have no meaning for performance.
        driver: the GPU's driver.
    """

    device: str
    torch: str
    runs: tuple[RunRows, ...] = ()
    warning: str | None = None
    driver: str | None = None

    @property
    def spanned(self) -> tuple[RunRows, ...]:
        """Return the runs that have rows."""
        return tuple(run for run in self.runs if run.labels != ())

    @property
    def run_id(self) -> str:
        """Name the runs."""
        names = ", ".join(run.name for run in self.spanned)
        return f"spans runs {names}" if len(self.spanned) > 1 else f"run {names or 'none'}"

    @property
    def commit(self) -> str:
        """Return the commits of the runs."""
        return ", ".join(dict.fromkeys(run.commit or "unknown" for run in self.spanned))

    @property
    def setting(self) -> str:
        """Return the setting for the title of a figure: device, PyTorch, and number of runs."""
        runs = {0: "", 1: ", 1 run"}.get(len(self.spanned), f", {len(self.spanned)} runs")
        return f"{self.device}, PyTorch {self.torch}{runs}"

    def among(self, labels: Iterable[str]) -> Provenance:
        """Return the origin of only these rows, for a figure or table that has no others."""
        wanted = set(labels)
        own = (replace(run, labels=tuple(row for row in run.labels or () if row in wanted)) for run in self.runs)
        kept = tuple(run for run in own if run.labels)
        return replace(self, runs=kept) if kept else self

    @property
    def caption(self) -> str:
        """Return one line without the warning."""
        driver = [f"driver {self.driver}"] if self.driver else []
        return ", ".join([self.device, f"PyTorch {self.torch}", *driver, *map(str, self.spanned)])

    @property
    def rows_by_run(self) -> tuple[str, ...]:
        """Write for each of several runs the labels of its rows. One line names runs without any."""
        if len(self.runs) < 2:
            return ()
        lines = [f"Of run {run.name}: {', '.join(run.labels)}." for run in self.runs if run.labels]
        replaced = [str(run) for run in self.runs if run.labels == ()]
        return (*lines, *([f"No row is of {', '.join(replaced)}: other runs have the workloads."] if replaced else ()))

    def of_row(self, label: object) -> Provenance:
        """Return the origin of the row with this label; for a row of several runs or of none, the common origin."""
        runs = (replace(self, runs=(run,), warning=run.warning) for run in self.runs if label in (run.labels or ()))
        return next(runs, self)


def of_run(run: Run) -> Provenance:
    """Return the provenance of a recorded run, or of several joined."""
    parts = zip(run_names(run), run.parts or (run,), strict=True)
    runs = (RunRows(name, short_commit(one.environment), one.labels, _smoke_warning(one)) for name, one in parts)
    return Provenance(run.device, run.environment.torch, tuple(runs), _smoke_warning(run), run.environment.driver)


def run_names(run: Run) -> tuple[str, ...]:
    """Return the names of a run or of joined runs: the id, with the time where another run has the same id."""
    environments = [part.environment for part in run.parts or (run,)]
    ids = [environment.run_id for environment in environments]
    return tuple(
        run_id if ids.count(run_id) == 1 else f"{run_id} of {environment.created_at[:19]}"
        for run_id, environment in zip(ids, environments, strict=True)
    )


def facts(environment: Environment) -> dict[str, str]:
    """Describe the machine and software of a run, by name, without packages."""
    gpu, cpu = environment.gpu, environment.cpu
    count = f"{environment.gpu_count} x " if environment.gpu_count > 1 else ""
    switch = {None: None, True: "on", False: "off"}
    known: dict[str, object] = {
        "GPU": gpu and f"{count}{gpu.name}, compute capability {gpu.compute_capability}",
        "GPU memory": gpu and format_bytes(gpu.memory_bytes),
        "driver": environment.driver,
        "PyTorch": environment.torch,
        "CUDA of PyTorch": environment.torch_cuda,
        "cuDNN": environment.cudnn,
        "Python": environment.python,
        "commit": environment.git_commit
        and environment.git_commit + (", with uncommitted changes" if environment.git_dirty else ""),
        "code": shown_code(environment.code),
        "CPU": f"{cpu.model}, {cpu.physical_cores or '?'} cores, {cpu.logical_cores} logical",
        "governor": cpu.governor,
        "SMT": switch[cpu.smt],
        "NUMA nodes": cpu.numa_nodes,
        "host memory": format_bytes(cpu.memory_bytes),
        "operating system": environment.platform,
    }
    return {name: "unknown" if value is None else str(value) for name, value in known.items()}


def short_commit(environment: Environment) -> str | None:
    """Write the short commit of a run, with its code's id: "0123456789 + changes with code 0123456789ab"."""
    if environment.git_commit is None:
        return None
    commit, code = environment.git_commit[:10] + " + changes" * bool(environment.git_dirty), environment.code
    return commit if shown_code(code) is None else f"{commit} with code {shown_code(code)}"


def _smoke_warning(run: Run) -> str | None:
    reasons = [
        reason
        for reason, holds in (
            ("on the CPU", any(cell.device == "cpu" for cell in run.cells)),
            ("in tiny size", any(cell.size != FULL_SIZE for cell in run.cells)),
        )
        if holds
    ]
    if not reasons:
        return None
    return f"SMOKE RUN {' and '.join(reasons)}: these numbers say nothing about performance"


def of_environment(environment: Environment, smoke: str | None = None) -> Provenance:
    """Return the provenance of results of other tools; `smoke`: the reason why they do not measure performance."""
    warning = f"SMOKE RUN {smoke}: these numbers say nothing about performance" if smoke else None
    run = RunRows(environment.run_id, short_commit(environment), None, warning)
    return Provenance(environment.device, environment.torch, (run,), warning, environment.driver)
