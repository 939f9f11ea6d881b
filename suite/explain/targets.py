"""Find the targets of `encore explain`: a workload by name, or a user's program as `module:callable`.

Programs have one of the forms of Note [Programs] in `models.own_program`, and may belong to a package called `models`
or `suite`. They run under fake tensors, so they may be of any size, and must not read values of random tensors.
`torch.cuda.is_available()` is False while they are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from models import registry
from models.registry import Size, is_program, is_sourced
from suite.explain.records import Explanation
from suite.results.schema import EXPLANATION_VERSION
from suite.run.matrix import require_program_name, require_whole, select_workloads


@dataclass(frozen=True, slots=True)
class Target:
    """Hold one thing to explain. `variant` is None for a program of the user's."""

    name: str
    variant: str | None
    size: Size = "full"

    @property
    def is_program(self) -> bool:
        return is_program(self.name)

    @property
    def label(self) -> str:
        return self.name if self.variant is None else f"{self.name} ({self.variant})"


def find_targets(
    names: Sequence[str], *, variant: str | None = None, size: Size = "full", workload_set: str | None = None
) -> list[Target]:
    """Find targets by name; without a name, every workload (of the set) in each of its variants, or in `variant` alone.

    Raises:
        WrongUse: a workload, set or variant is unknown, or a `module:callable` is none; the message says what is known.
    """
    if not names:
        return [
            Target(workload.acronym, each, size)
            for workload, default in select_workloads((), variant, workload_set)
            # Variants of a source outside of the suite differ in weights alone.
            for each in (workload.variants if variant is None and not is_sourced(workload.acronym) else (default,))
        ]
    targets: dict[Target, None] = {}
    for name in names:
        if is_program(name):
            require_program_name(name, variant, size)
            targets[Target(name, None, size)] = None
        else:
            (workload, chosen), *_ = select_workloads([name], variant)
            require_whole(workload)
            targets[Target(workload.acronym, chosen, size)] = None
    return list(targets)


def unexplained(target: Target, error: str | None) -> Explanation:
    """Return an empty explanation of `target`."""
    workload = None if target.is_program else registry.planned(target.name)
    return Explanation(
        schema_version=EXPLANATION_VERSION,
        target=target.name,
        variant=target.variant,
        size=target.size,
        task="inference" if workload is None else workload.task,
        batch=None if workload is None else workload.batch,
        torch=version("torch"),
        graphs=[],
        breaks=[],
        limits=[],
        error=error,
    )
