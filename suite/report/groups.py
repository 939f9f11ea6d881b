"""Rows of a run by what they are: means and figures are of one group, never of several."""

from __future__ import annotations

from dataclasses import dataclass

from models.registry import TP_MARK
from suite.report.load import Run
from suite.report.published import Published


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that belong into one figure. `suffix` ends the names of its figures, `title` its sentences."""

    suffix: str
    title: str
    labels: tuple[str, ...]

    @property
    def has_means(self) -> bool:
        """Whether a row stands for a workload: over several GPUs there is one for each number of ranks."""
        return self.suffix != "_gpus"


def row_groups(run: Run, published: Published) -> tuple[RowGroup, ...]:
    """The groups that the run has rows of: GraCE's workloads, others, with the optimizer, over several GPUs."""
    of_grace = published.workloads["grace"]
    found: dict[str, list[str]] = {"": [], "_others": [], "_optimizer": [], "_gpus": []}
    optimizer = {label for label in run.labels if label.endswith("with optimizer)")}
    for label in run.labels:
        split = "_gpus" if TP_MARK in label else "_optimizer" if label in optimizer else ""
        found[split or ("" if label in of_grace else "_others")].append(label)
    titles = {
        "": f"GraCE's {len(of_grace)} workloads",
        "_others": "other workloads",
        "_optimizer": "training with the optimizer",
        "_gpus": "several GPUs",
    }
    return tuple(RowGroup(name, titles[name], tuple(labels)) for name, labels in found.items() if labels)
