"""Methods as steps: which one an object has is as Python says, and what a step reads through another one is noticed."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network

from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 12
Decorate = Callable[[Any], Any]


def as_it_is(function: Any) -> Any:
    return function


def graphed(function: Any) -> Any:
    return GraphedStep(function, device=CpuDevice())


class Base:
    def __init__(self) -> None:
        self.model = network("cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.weight = 1.0

    def train(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch) * self.weight
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def overrides(decorate: Decorate) -> Any:
    class Plain(Base):
        train = decorate(Base.train)

    class Doubled(Plain):
        def train(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().train(batch) * 2

    return Doubled()


def overrides_with_a_step(decorate: Decorate) -> Any:
    class Plain(Base):
        train = decorate(Base.train)

    class Doubled(Plain):
        @decorate
        def train(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().train(batch) * 2

    return Doubled()


@pytest.mark.parametrize("make", [overrides, overrides_with_a_step])
def test_derived_class_may_override_and_call_a_step(make: Callable[[Decorate], Any]) -> None:
    theirs, ours = make(as_it_is), make(graphed)
    for index, batch in enumerate(batches("cpu", CALLS)):
        assert torch.equal(ours.train(*batch), theirs.train(*batch)), index
        if index == 7:
            theirs.weight = ours.weight = 0.5
    last = type(ours).train if make is overrides_with_a_step else super(type(ours), ours).train
    step = last.__get__(ours) if make is overrides_with_a_step else last
    assert step.report().replays == CALLS - 5


def test_copied_object_has_its_own_recordings() -> None:
    class Trainer(Base):
        train = graphed(Base.train)

    one, reference = Trainer(), Base()
    for batch in batches("cpu", 5):
        assert torch.equal(one.train(*batch), reference.train(*batch))
    other = copy.copy(one)
    other.model, other.weight = network("cpu"), 0.5
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
    expected = Base()
    expected.weight = 0.5
    for batch in batches("cpu", CALLS):
        assert torch.equal(other.train(*batch), expected.train(*batch))
        assert torch.equal(one.train(*batch), reference.train(*batch))
    report = one.train.report()
    assert len(report.recordings) == 2 and report.replays == 2 * CALLS + 5 - 6


class Called:
    def __init__(self, reference: Base) -> None:
        self.reference = reference

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.reference.train(batch)


@pytest.mark.parametrize(
    "make",
    [
        Called,
        lambda one: one.train,
        lambda one: staticmethod(one.train),
        lambda one: functools.partial(Base.train, one),
        lambda one: graphed(one.train),
    ],
    ids=["object", "method of another", "static", "partial", "a step"],
)
def test_step_that_is_no_method_does_not_receive_the_object(make: Callable[[Base], Any]) -> None:
    theirs = Base()

    class Trainer:
        train = graphed(make(Base()))

    one = Trainer()
    for batch in batches("cpu", CALLS):
        assert torch.equal(one.train(*batch), theirs.train(*batch))


def test_state_read_through_another_step_is_compared() -> None:
    theirs, ours = Base(), Base()
    inner = graphed(lambda batch: ours.train(batch))
    step = graphed(lambda batch: inner(batch) * 2)
    for index, batch in enumerate(batches("cpu", 16)):
        assert torch.equal(step(*batch), theirs.train(*batch) * 2), index
        if index == 6:
            theirs.weight = ours.weight = 0.5
    assert step.report().replays >= 5


@GraphedStep
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Doubling:
    def __init__(self) -> None:
        self.factor = 2

    def _twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    twice = GraphedStep(_twice)


def saved_and_loaded(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 (it was made here)


def test_step_is_pickled_as_its_function_or_method() -> None:
    """As functions and methods are: by name, and with their object."""
    assert saved_and_loaded(doubled) is copy.copy(doubled) is copy.deepcopy(doubled) is doubled
    one, x = Doubling(), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no GPU
        one.twice(x)
        for other in (saved_and_loaded(one), saved_and_loaded(one.twice).__self__, copy.deepcopy(one)):
            assert other is not one and other.twice != one.twice
            assert torch.equal(other.twice(x), 2 * x)
