"""Describe the provenance of a table or figure, and whether its numbers are meaningful for performance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from optimizations.byte_units import format_bytes
from suite.measure.checkout import shown_code
from suite.report.runs import FULL_SIZE, Run
from suite.results.schema import Environment


@dataclass(frozen=True, slots=True)
class Provenance:
    """Hold the origin of a table or figure, or of one of its rows.

    Attributes:
        run_id: the run or runs.
        device: GPU name, or the CPU's model for a run without one.
        commit: short git commit, "+ changes" where the tree was dirty, and the code's id where there is one; None where
            no commit was recorded.
        torch: PyTorch version.
        warning: set for smoke runs (on a CPU, or in tiny size), whose numbers have no meaning for performance; and for
            analyses of tiny models.
        driver: the GPU's driver, if all runs have the same.
        runs: for several runs, the origin of each with the labels of its rows.
        count: number of runs of the rows; 0 where nothing was measured.
    """

    run_id: str
    device: str
    commit: str | None
    torch: str
    warning: str | None
    driver: str | None = None
    runs: tuple[tuple[Provenance, tuple[str, ...]], ...] = ()
    count: int = 1

    @property
    def setting(self) -> str:
        """Return the setting for the title of a figure: device, PyTorch, and number of runs."""
        runs = {0: "", 1: ", 1 run"}.get(self.count, f", {self.count} runs")
        return f"{self.device}, PyTorch {self.torch}{runs}"

    def among(self, labels: Iterable[str]) -> Provenance:
        """Return the origin of only these rows, for a figure or table that has no others."""
        wanted = set(labels)
        kept = tuple((run, own) for run, rows in self.runs if (own := tuple(row for row in rows if row in wanted)))
        return _spanning(self, kept) if kept else self

    @property
    def caption(self) -> str:
        """Return one line without the warning."""
        parts = [self.device, f"PyTorch {self.torch}"]
        if self.runs:
            parts += [f"driver {self.driver}"] if self.driver else []
            parts += [run._run_and_commit for run, labels in self.runs if labels]
        else:
            parts += [self.run_id, *([f"commit {self.commit}"] if self.commit else ())]
        return ", ".join(parts)

    @property
    def rows_by_run(self) -> tuple[str, ...]:
        """Write for each of several runs the labels of its rows. One line names runs without any."""
        lines = [f"Of {run._run_and_commit}: {', '.join(labels)}." for run, labels in self.runs if labels]
        replaced = [run._run_and_commit for run, labels in self.runs if not labels]
        if replaced:
            lines.append(f"No row is of {', '.join(replaced)}: other runs have the workloads.")
        return tuple(lines)

    @property
    def _run_and_commit(self) -> str:
        return f"{self.run_id} (commit {self.commit or 'unknown'})"

    def of_row(self, label: object) -> Provenance:
        """Return the origin of the row with this label; for a row of several runs or of none, the common origin."""
        return next((run for run, labels in self.runs if label in labels), self)


def of_run(run: Run) -> Provenance:
    """Return the provenance of a recorded run, or of several joined."""
    environment = run.environment
    if not run.parts:
        commit = short_commit(environment)
        return Provenance(f"run {environment.run_id}", run.device, commit, environment.torch, _smoke_warning(run))
    names = run_names(run)
    origins = [replace(of_run(part), run_id=f"run {name}") for part, name in zip(run.parts, names, strict=True)]
    whole = Provenance("", run.device, None, environment.torch, _smoke_warning(run), environment.driver)
    return _spanning(whole, tuple((origin, part.labels) for origin, part in zip(origins, run.parts, strict=True)))


def _spanning(whole: Provenance, runs: tuple[tuple[Provenance, tuple[str, ...]], ...]) -> Provenance:
    """Return `whole` restricted to the rows of these runs; runs without rows are named and not counted."""
    spanned = [origin for origin, labels in runs if labels]
    return replace(
        whole,
        run_id=f"spans runs {', '.join(origin.run_id.removeprefix('run ') for origin in spanned)}",
        commit=", ".join(dict.fromkeys(origin.commit or "unknown" for origin in spanned)),
        runs=runs,
        count=len(spanned),
    )


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
        "GPU": gpu
        and f"{count}{gpu.name}, compute capability {gpu.compute_capability}, {gpu.multiprocessors} multiprocessors",
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
    commit = _short(environment.git_commit, environment.git_dirty)
    code = shown_code(environment.code)
    return commit if commit is None or code is None else f"{commit} with code {code}"


def _short(commit: str | None, dirty: bool | None) -> str | None:
    return None if commit is None else commit[:10] + (" + changes" if dirty else "")


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
    commit = short_commit(environment) or "unknown"
    warning = f"SMOKE RUN {smoke}: these numbers say nothing about performance" if smoke else None
    return Provenance(
        f"run {environment.run_id}", environment.device, commit, environment.torch, warning, environment.driver
    )
