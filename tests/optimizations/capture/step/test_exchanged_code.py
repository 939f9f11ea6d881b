"""Functions whose code or defaults are exchanged in place between calls, as an editor's reloading does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # not in a call that is observed, which would not count then
from graphs_on_cpu import CpuDevice, settings
from step_parts import CALLS, batches, network, training_step
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step.graphed_step import GraphedStep

__all__ = ["settings"]
pytestmark = pytest.mark.usefixtures("settings")

Change = Callable[[Any], None]


def doubled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


def named(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    return x * by


class Scale:
    def __call__(self, x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * by


def tripled(x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
    return x * 3


def tripled_named(x: torch.Tensor, *, by: float = 3.0) -> torch.Tensor:
    return x * 3


class Tripling:
    def __call__(self, x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
        return x * 3


def code(function: Any) -> None:
    others = {doubled: tripled, named: tripled_named, Scale.__call__: Tripling.__call__}
    function.__code__ = others[function].__code__


def defaults(function: Any) -> None:
    if function.__kwdefaults__:
        function.__kwdefaults__ = {"by": 3.0}
    else:
        function.__defaults__ = (3.0,)


def as_it_was(function: Any) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


@pytest.fixture(params=["function", "named default", "method"])
def exchanged(request: pytest.FixtureRequest) -> Any:
    """What is called, and the function whose parts are exchanged, which are put back."""
    scale = Scale()
    called, function = {
        "function": (doubled, doubled),
        "named default": (named, named),
        "method": (scale, Scale.__call__),
    }[request.param]
    before = as_it_was(function)
    yield called, function
    function.__code__, function.__defaults__, function.__kwdefaults__ = before


def trained(
    work: Callable[[torch.Tensor], torch.Tensor], at: int, change: Callable[[], None]
) -> tuple[GraphedStep, list[float]]:
    """A step that trains and does this work, called with a change before the call `at`; and what the work gave."""
    model = network("cpu")
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return work(torch.ones_like(train(batch).detach()))

    graphed = GraphedStep(step, device=CpuDevice())
    found = []
    for index, (batch,) in enumerate(batches("cpu", 2 * CALLS)):
        if index == at:
            change()
        found.append(float(graphed(batch)))
    return graphed, found


@pytest.mark.parametrize("at", [4, 9])
@pytest.mark.parametrize("change", [code, defaults])
def test_a_step_runs_what_stands_there_now(exchanged: Any, change: Change, at: int) -> None:
    called, function = exchanged
    graphed, found = trained(called, at, lambda: change(function))
    assert found == [2.0] * at + [3.0] * (2 * CALLS - at)
    report = graphed.report()
    assert len(report.recordings) + report.dropped_recordings == 2 and not report.refusals
    assert report.replays >= 2 * CALLS - 6


@pytest.mark.parametrize("change", [code, defaults])
def test_a_callable_runs_what_stands_there_now(exchanged: Any, change: Change) -> None:
    called, function = exchanged
    weight = torch.nn.Parameter(torch.ones(3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return called(x * weight)  # type: ignore[no-any-return]

    (graphed,) = graph_callables([forward], [(torch.ones(3),)], device=CpuDevice())
    assert graphed(torch.ones(3)).tolist() == [2.0] * 3
    change(function)
    with pytest.warns(UserWarning, match="__code__|efaults__"):
        assert graphed(torch.ones(3)).tolist() == [3.0] * 3


def test_a_step_whose_own_code_is_exchanged_is_another_one() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    graphed = GraphedStep(step, device=CpuDevice())
    assert [float(graphed(torch.ones(()))) for _ in range(6)] == [2.0] * 6
    step.__code__ = other.__code__
    assert [float(graphed(torch.ones(()))) for _ in range(6)] == [3.0] * 6
    assert graphed.report().replays > 3


class Doubling:
    def go(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class TriplingToo(Doubling):
    def go(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class DoublingModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class TriplingModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class TriplingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


def linear() -> nn.Module:
    made = nn.Linear(1, 1, bias=False)
    made.requires_grad_(False)
    made.weight.fill_(2.0)
    return made


CLASSES: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], torch.Tensor], type]] = {
    "object": (Doubling, lambda made, x: made.go(x), TriplingToo),
    "module": (DoublingModule, lambda made, x: made(x), TriplingModule),
    "module of a library": (linear, lambda made, x: made(x.view(1)).view(()), TriplingLinear),
}


@pytest.mark.parametrize("at", [4, 9])
@pytest.mark.parametrize("kind", CLASSES)
def test_an_object_of_another_class_does_what_that_does(kind: str, at: int) -> None:
    """An editor that reloads a file gives existing objects the new class."""
    make, use, other = CLASSES[kind]
    made = make()
    graphed, found = trained(lambda x: use(made, x), at, lambda: setattr(made, "__class__", other))
    assert found == [2.0] * at + [3.0] * (2 * CALLS - at)
    assert graphed.report().replays >= 2 * CALLS - 6 and not graphed.report().refusals


class Secret:
    """Says that it is of another class."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return Doubling

    def go(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_an_object_that_answers_for_its_class_is_used_as_it_is() -> None:
    secret = Secret()
    graphed = GraphedStep(lambda x: secret.go(x), device=CpuDevice())
    assert [float(graphed(torch.ones(()))) for _ in range(6)] == [2.0] * 6
    assert graphed.report().replays > 2
