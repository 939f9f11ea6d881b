"""What stands on every table and figure: where the numbers are from, and whether they mean anything for performance."""

from __future__ import annotations

from dataclasses import dataclass

from suite.explain.records import Explanation
from suite.report.load import FULL_SIZE, Run


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a table or figure.

    Attributes:
        run_id: the run, or "offline analysis".
        device: GPU name, or the CPU's model for a run without one, or the target of an offline analysis.
        commit: short git commit, "+ changes" where the tree was dirty; None where it was not recorded.
        torch: PyTorch version.
        warning: set on smoke runs (on a CPU, or in tiny size): their numbers say nothing about performance; and on
            analyses of tiny models.
    """

    run_id: str
    device: str
    commit: str | None
    torch: str
    warning: str | None

    @property
    def caption(self) -> str:
        """One line without the warning."""
        parts = [self.device, f"PyTorch {self.torch}", self.run_id]
        if self.commit:
            parts.append(f"commit {self.commit}")
        return ", ".join(parts)


def of_run(run: Run) -> Provenance:
    """Provenance of a recorded run."""
    environment = run.environment
    commit = _short(environment.git_commit, environment.git_dirty)
    device = environment.gpu.name if environment.gpu and not _only_on_cpu(run) else f"CPU {environment.cpu.model}"
    return Provenance(f"run {environment.run_id}", device, commit, environment.torch, _smoke_warning(run))


def of_explanations(explanations: tuple[Explanation, ...]) -> Provenance:
    """Provenance of results of `encore explain`: counts found without a GPU, no times."""
    targets = {lowering.target for item in explanations for graph in item.graphs for lowering in graph.lowerings}
    device = f"lowered for {', '.join(sorted(targets))}" if targets else "FX graphs on fake CUDA tensors"
    versions = ", ".join(sorted({explanation.torch for explanation in explanations}))
    tiny = any(explanation.size != FULL_SIZE for explanation in explanations)
    warning = "TINY MODELS: these counts say nothing about the published sizes" if tiny else None
    commits = {_short(explanation.commit, explanation.dirty) or "unknown" for explanation in explanations}
    commit = None if commits == {"unknown"} else ", ".join(sorted(commits))
    return Provenance("offline analysis without a GPU: counts, no times", device, commit, versions, warning)


def _short(commit: str | None, dirty: bool | None) -> str | None:
    return None if commit is None else commit[:10] + (" + changes" if dirty else "")


def _only_on_cpu(run: Run) -> bool:
    return bool(run.cells) and all(cell.device == "cpu" for cell in run.cells)


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
