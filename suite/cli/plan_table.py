"""Show what a run would measure (`encore run --dry-run`), and how long each workload may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from rich.console import Console
from rich.table import Table

from suite.run.launch import Request, planned_jobs
from suite.run.runner import Job
from suite.settings import format_duration


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the workloads that miss a mode, and the seconds each may take, by its acronym."""

    jobs: Sequence[Job]
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def table(self) -> Table:
        """Return a row per workload, and the sum."""
        table = Table("workload", "variant", "modes", "about", box=None, pad_edge=False)
        for job in self.jobs:
            modes = ", ".join(mode.name for mode in job.missing)
            table.add_row(job.workload.acronym, job.variant, modes, format_duration(self.seconds[job.workload.acronym]))
        table.add_row("all", "", "", format_duration(self.total_s))
        return table

    def as_json(self) -> dict[str, JsonValue]:
        """Return the same for programs."""
        return {
            "workloads": [
                {
                    "workload": job.workload.acronym,
                    "variant": job.variant,
                    "modes": [mode.name for mode in job.missing],
                    "expected_s": self.seconds[job.workload.acronym],
                }
                for job in self.jobs
            ],
            "expected_s": self.total_s,
        }


def plan(request: Request, console: Console) -> Plan:
    """Return what a start of this request would measure.

    Raises:
        WrongUse: a name, an option or a combination is wrong, or the run to resume does not fit.
    """
    jobs, seconds = planned_jobs(request, console)
    return Plan(jobs, seconds)
