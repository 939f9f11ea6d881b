"""Numbers of Python that decide what a step does: calls with each of their values get a graph of their own."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import network

from optimizations.capture.step.deciding_values import MOST_KINDS, Suspects
from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 40
Flags = Callable[[int], Any]
LAST = False

FLAGS: dict[str, Flags] = {
    "every second": lambda index: index % 2 == 1,
    "every third": lambda index: index % 3 == 2,
    "every fourth": lambda index: index % 4 == 3,
    "the first of three": lambda index: index % 3 == 0,
    "in turns of three": lambda index: index // 3 % 2 == 1,
    "one of three numbers": lambda index: index % 3,
}


class Loop:
    """A step that accumulates gradients, and whose optimizer works where it is told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = network("cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.last: Any = False
        self.calls = 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean() * (1 + self.calls * 0)
        loss.backward()
        if self.last:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def run(loop: Loop, step: Callable[[torch.Tensor], torch.Tensor], flags: Flags) -> Iterator[float]:
    generator = torch.Generator().manual_seed(3)
    for index in range(CALLS):
        loop.last = flags(index)
        yield step(torch.randn(4, 8, generator=generator)).item()


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_a_flag_that_comes_again_tells_calls_apart(name: str) -> None:
    plain, loop = Loop(), Loop()
    expected = list(run(plain, plain.step, FLAGS[name]))
    graphed = GraphedStep(loop.step, device=CpuDevice())
    assert list(run(loop, graphed, FLAGS[name])) == expected
    report = graphed.report()
    assert report.refusals == ()
    assert report.replays >= 10, report
    assert all(map(torch.equal, loop.model.parameters(), plain.model.parameters()))


def test_a_flag_is_told_from_a_count_that_changes_as_well() -> None:
    """The count is read, and decides nothing: it changed between calls that did the same, too."""
    suspects = Suspects()
    flag, count = (1, "last"), (1, "calls")
    calls = [{flag: ("last", index % 3 == 2), count: ("calls", index)} for index in range(4)]
    suspects.note(calls[0], agrees=None)
    for before, now in itertools.pairwise(calls):
        suspects.note(now, agrees=before[flag] == now[flag])
    assert suspects.found() == (flag,) and suspects.differed == {flag, count}


def test_what_is_another_in_each_call_tells_none_apart() -> None:
    suspects = Suspects()
    for index in range(5):
        suspects.note({(1, "rate"): ("rate", 0.1 * index)}, agrees=False if index else None)
        assert suspects.found() == ()
    suspects.note({(1, "rate"): ("rate", 0.1)}, agrees=False)
    assert suspects.found() == ((1, "rate"),), "it came again"


def test_numbers_of_optimizers_tell_none_apart() -> None:
    """They are refused with what to change: a cycle of betas would get a graph for each of its values."""
    suspects = Suspects()
    for index in range(6):
        named = {(1, "betas"): ("optimizer.param_groups[0].betas", (0.9 if index % 2 else 0.8, 0.99))}
        suspects.note(named, agrees=False if index else None)
    assert suspects.differed and suspects.found() == ()


def closure(flags: Flags) -> tuple[Callable[[int], None], Callable[..., Any]]:
    loop, last = Loop(), False

    def step(x: torch.Tensor) -> torch.Tensor:
        loop.last = False
        loss = loop.model(x).square().mean()
        loss.backward()
        if last:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loss.detach()

    def between(index: int) -> None:
        nonlocal last
        last = flags(index)

    return between, step


def of_the_module(flags: Flags) -> tuple[Callable[[int], None], Callable[..., Any]]:
    loop = Loop()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loop.model(x).square().mean()
        loss.backward()
        if LAST:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loss.detach()

    def between(index: int) -> None:
        global LAST
        LAST = flags(index)

    return between, step


def in_settings(flags: Flags) -> tuple[Callable[[int], None], Callable[..., Any]]:
    loop, settings = Loop(), types.SimpleNamespace(last=False, name="one")

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loop.model(x).square().mean()
        loss.backward()
        if settings.last:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loss.detach()

    def between(index: int) -> None:
        settings.last = flags(index)

    return between, step


@pytest.mark.parametrize("made", [closure, of_the_module, in_settings])
def test_flags_may_stand_anywhere(made: Callable[[Flags], Any]) -> None:
    def loop(graphed: bool) -> tuple[list[float], Any]:
        between, step = made(FLAGS["every third"])
        step = GraphedStep(step, device=CpuDevice()) if graphed else step
        generator, found = torch.Generator().manual_seed(3), []
        for index in range(CALLS):
            between(index)
            found.append(step(torch.randn(4, 8, generator=generator)).item())
        return found, step

    expected, _ = loop(False)
    found, step = loop(True)
    assert found == expected
    assert step.report().refusals == () and step.report().replays >= 10


def test_what_has_too_many_values_is_refused_by_its_name() -> None:
    loop = Loop()

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(loop.calls):
            x = x * 2
        return loop.model(x).square().mean().detach()

    graphed = GraphedStep(step, device=CpuDevice())
    expected, found = [], []
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        for index in range(CALLS):
            loop.calls = index % 3 if index < 12 else index  # at first they come again, in the end they do not
            x = torch.full((4, 8), 0.001)
            expected.append(step(x).item())
            found.append(graphed(x).item())
    assert found == expected
    (refusal,) = graphed.report().refusals
    assert "loop.calls" in refusal.reason and "another value" in refusal.reason
    assert graphed.report().eager_calls <= CALLS and MOST_KINDS < CALLS
