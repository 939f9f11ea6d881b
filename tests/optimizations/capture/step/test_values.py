"""Values of Python that a step reads, in all the places where programs keep them: a change is seen.

Each case gives a function that the step calls, and one that changes what it will give.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
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


CASES = case = Cases()


class Special:
    """Read by nothing but methods that Python calls by itself."""

    def __init__(self) -> None:
        self.weight = 2.0

    def __mul__(self, other: float) -> float:
        return other * self.weight

    def __getitem__(self, index: int) -> float:
        return self.weight

    def __enter__(self) -> float:
        return self.weight

    def __exit__(self, *error: object) -> None:
        pass


class Proxy:
    def __init__(self) -> None:
        self.__dict__["store"] = {"weight": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["store"][name]


class OfClass:
    settings: ClassVar = {"weight": 2.0}

    @classmethod
    def of_class(cls) -> float:
        return cls.settings["weight"]

    def __init__(self, scale: float) -> None:
        self.made = scale * self.settings["weight"]


@case
def an_operator_of_a_class() -> Case:
    special = Special()
    return lambda: special * 1.0, lambda: setattr(special, "weight", 3.0)


@case
def a_with_statement() -> Case:
    special = Special()

    def read() -> float:
        with special as weight:
            return weight

    return read, lambda: setattr(special, "weight", 3.0)


@case
def an_attribute_behind_getattr() -> Case:
    proxy = Proxy()
    return lambda: proxy.weight, lambda: proxy.store.update(weight=3.0)


@case
def an_attribute_that_may_be_missing() -> Case:
    held = types.SimpleNamespace()
    return lambda: getattr(held, "weight", 2.0), lambda: setattr(held, "weight", 3.0)


@case
def a_class_method() -> Case:
    OfClass.settings = {"weight": 2.0}
    return lambda: OfClass.of_class(), lambda: OfClass.settings.update(weight=3.0)


@case
def an_object_made_in_the_step() -> Case:
    OfClass.settings = {"weight": 2.0}
    return lambda: OfClass(1.0).made, lambda: OfClass.settings.update(weight=3.0)


@case
def a_set_of_the_same_size() -> Case:
    held = {"fast"}
    return lambda: 2.0 if "fast" in held else 3.0, lambda: (held.discard("fast"), held.add("slow"))


@case
def a_queue() -> Case:
    held = collections.deque([2.0, 3.0])
    return lambda: held[0], lambda: held.rotate()


@case
def a_module_that_is_imported_in_the_step() -> Case:
    settings: Any = types.ModuleType("settings_of_a_step")
    settings.weight = 2.0
    sys.modules["settings_of_a_step"] = settings

    def read() -> float:
        import settings_of_a_step  # type: ignore[import-not-found]

        return float(settings_of_a_step.weight)

    return read, lambda: setattr(settings, "weight", 3.0)


@case
def an_array_of_numpy() -> Case:
    held = numpy.array([2.0])
    return lambda: float(held[0]), lambda: held.fill(3.0)


@case
def a_cached_property() -> Case:
    settings = {"weight": 2.0}
    found = functools.cached_property(lambda self: settings["weight"])
    kind = type("Owner", (), {"__module__": __name__, "weight": found})
    found.__set_name__(kind, "weight")
    one = kind()

    def change() -> None:
        settings.update(weight=3.0)
        vars(one).pop("weight")

    return lambda: one.weight, change


class Terms:
    """`epoch` counts for itself."""

    def __init__(self) -> None:
        self.alpha, self.beta, self.epoch = 1.0, 2.0, 0
        self.names = ["alpha", "beta"]
        self.weights = {"beta": 1.0}

    def change(self) -> None:
        self.beta, self.epoch = 3.0, self.epoch + 1


@case
def attributes_whose_names_stand_in_a_list() -> Case:
    terms = Terms()
    return lambda: sum(getattr(terms, name) for name in terms.names), terms.change


@case
def all_values_of_a_namespace() -> Case:
    given = types.SimpleNamespace(alpha=1.0, beta=2.0)
    return lambda: sum(vars(given).values()), lambda: setattr(given, "beta", 3.0)


@pytest.fixture(autouse=True)
def without_a_module_of_settings() -> Iterator[None]:
    yield
    sys.modules.pop("settings_of_a_step", None)


UNCOMPARED = {
    "a_module_that_is_imported_in_the_step",
    "a_queue",
    "a_set_of_the_same_size",
    "all_values_of_a_namespace",
    "an_array_of_numpy",
    "attributes_whose_names_stand_in_a_list",
}
"""What the contract does not list as compared."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - UNCOMPARED))
def test_compared_value_is_noticed_when_it_changes(name: str) -> None:
    CASES.check(name, most_behind=6)


@pytest.mark.parametrize("name", sorted(UNCOMPARED))
def test_audit_notices_other_values(name: str) -> None:
    CASES.check_by_audit(name)
