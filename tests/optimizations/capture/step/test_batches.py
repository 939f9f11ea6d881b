"""Batches of the program's own classes: state in their methods and classes is compared."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from simulated_gpu.operators import CpuDevice

from optimizations.capture.step.graphed_step import GraphedStep

CALLS, CHANGED = 14, 6
settings = {"weight": 2.0}


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    of_class = 2.0

    def __post_init__(self) -> None:
        assert time.time() > 0  # a clock, which no step may read; but this is no part of one

    def weighed(self) -> torch.Tensor:
        return self.x * settings["weight"]

    @property
    def doubled(self) -> torch.Tensor:
        return self.x * settings["weight"]


class Named(NamedTuple):
    x: torch.Tensor

    def weighed(self) -> torch.Tensor:
        return self.x * settings["weight"]


class Keyed(dict):
    def weighed(self) -> Any:
        return self["x"] * settings["weight"]


class Wrapped(collections.UserDict):
    def weighed(self) -> Any:
        return self["x"] * settings["weight"]


class Listed(list):
    def weighed(self) -> Any:
        return self[0] * settings["weight"]


BATCHES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "a dataclass": (Fields, lambda batch: batch.weighed()),
    "a property": (Fields, lambda batch: batch.doubled),
    "data of a class": (Fields, lambda batch: batch.x * batch.of_class),
    "a named tuple": (Named, lambda batch: batch.weighed()),
    "a dict": (lambda x: Keyed(x=x), lambda batch: batch.weighed()),
    "a mapping": (lambda x: Wrapped(x=x), lambda batch: batch.weighed()),
    "a list": (lambda x: Listed([x]), lambda batch: batch.weighed()),
    "inside of others": (lambda x: {"inner": [Fields(x)]}, lambda batch: batch["inner"][0].weighed()),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_class_attributes_of_a_batch_are_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read = BATCHES[name]
    step = GraphedStep(lambda batch: read(batch), device=CpuDevice())
    for index in range(CALLS):
        if index == CHANGED:
            monkeypatch.setitem(settings, "weight", 3.0)
            monkeypatch.setattr(Fields, "of_class", 3.0)
        x = torch.randn(3)
        assert torch.equal(step(make(x)), x * (2.0 if index < CHANGED else 3.0))
    report = step.report()
    assert report.refusals == ()
    assert 3 + 4 <= report.replays <= 3 + 6


@pytest.mark.parametrize("kind", [lambda members: members[1], list, tuple])
@pytest.mark.parametrize("name", ["a dict", "a mapping", "a list"])
def test_attributes_of_a_container_are_compared(name: str, kind: Callable[[Any], Any]) -> None:
    make, read = BATCHES[name]

    def run(batch: Any) -> Any:
        return read(batch) * (batch.scale if isinstance(batch.scale, float) else batch.scale[1])

    step = GraphedStep(run, device=CpuDevice())
    for index in range(CALLS):
        batch = make(torch.randn(3))
        batch.scale = kind((1.0, 2.0 if index < CHANGED else 3.0))
        assert torch.equal(step(batch), run(batch))
    assert step.report().refusals == () and step.report().replays > CHANGED - 3


class Tasks:
    """Numbers of several tasks, by name."""

    def __init__(self) -> None:
        self.first, self.second = 2.0, 3.0


@dataclasses.dataclass
class OfTask:
    x: torch.Tensor
    task: str


BY_NAME: dict[str, tuple[Callable[[torch.Tensor, str], Any], Callable[[Any, Any], torch.Tensor]]] = {
    "a dict": (lambda x, name: {"x": x, "task": name}, lambda tasks, b: b["x"] * getattr(tasks, b["task"])),
    "a list in a dict": (lambda x, name: {"x": x, "o": [name]}, lambda tasks, b: b["x"] * getattr(tasks, b["o"][0])),
    "a dataclass": (OfTask, lambda tasks, b: b.x * getattr(tasks, b.task)),
    "a tuple": (lambda x, name: (x, name), lambda tasks, b: b[0] * vars(tasks)[b[1]]),
    "a key": (lambda x, name: {"x": x, name: 1}, lambda tasks, b: b["x"] * getattr(tasks, [*b][1])),
}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_attribute_named_by_the_batch_is_compared(name: str) -> None:
    make, read = BY_NAME[name]
    tasks = Tasks()
    step = GraphedStep(lambda batch: read(tasks, batch), device=CpuDevice())
    for index in range(4 * CALLS):
        if index == 2 * CALLS:
            tasks.first, tasks.second = 7.0, 9.0
        batch = make(torch.randn(3), "first" if index % 2 else "second")
        assert torch.equal(step(batch), read(tasks, batch))
    assert step.report().replays >= CALLS
