"""Cases of one value of Python that a step reads, and that changes between its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.report.steps import StepChanged

Case = tuple[Callable[[], float], Callable[[], Any]]
"""A function that the step calls, and one that changes what it will give."""

CALLS, CHANGED = 14, 6
BEFORE = 3
"""Replays between the recording and the change."""


class Cases(dict[str, Callable[[], Case]]):
    """What makes each case, by name. It is also a decorator."""

    def __call__(self, make: Callable[[], Case]) -> Callable[[], Case]:
        self[make.__name__] = make
        return make

    def check(self, name: str, most_behind: int) -> None:
        """Results are eager's. At least 4 calls behind the change are replayed, and no more than `most_behind`: some
        are looked at."""
        expected, _ = _losses(self[name], graphed=False)
        found, step = _losses(self[name], graphed=True)
        assert all(map(torch.equal, found, expected))
        report = step.report()
        assert report.refusals == ()
        assert BEFORE + 4 <= report.replays <= BEFORE + most_behind

    def check_by_audit(self, name: str) -> None:
        """An audit of every call finds the change."""
        with pytest.raises(StepChanged):
            _losses(self[name], graphed=True, check_every=1)


class AuditedDevice(CpuDevice):
    """One with memory for audits."""

    free = None


def _losses(make: Callable[[], Case], graphed: bool, **options: Any) -> tuple[list[torch.Tensor], Any]:
    read, change = make()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["x"].sum() * read()

    call: Any = GraphedStep(step, device=AuditedDevice(), **{"check_every": None, **options}) if graphed else step
    found = []
    for index, batch in enumerate(batches("cpu", CALLS)):
        if index == CHANGED:
            change()
        found.append(call(*batch))
    return found, call
