"""Numbers of Python that decide what a step does: calls with each of their values get a graph of their own."""

from __future__ import annotations

import array
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
    assert suspects.found() == (flag,) and suspects.differed == {frozenset({flag, count})}


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


def in_a_list(flags: Flags) -> tuple[Callable[[int], None], Callable[..., Any]]:
    loop, settings = Loop(), [1.0, False]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loop.model(x).square().mean() * settings[0]
        loss.backward()
        if settings[1]:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loss.detach()

    def between(index: int) -> None:
        settings[1] = flags(index)

    return between, step


def in_a_set(flags: Flags) -> tuple[Callable[[int], None], Callable[..., Any]]:
    loop, settings = Loop(), {"first"}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loop.model(x).square().mean()
        loss.backward()
        if "last" in settings:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loss.detach()

    def between(index: int) -> None:
        (settings.add if flags(index) else settings.discard)("last")

    return between, step


@pytest.mark.parametrize("made", [closure, of_the_module, in_settings, in_a_list, in_a_set])
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


class Several(Loop):
    """Flags that decide at different times."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled: Any = False

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return super().step(x * 2 if self.doubled else x)


@pytest.mark.parametrize("doubled", [2, 4, 5])
def test_several_flags_tell_calls_apart(doubled: int) -> None:
    """Of those, none may have changed whenever calls differed; or one, and then others within each of its values."""

    def calls(loop: Several, step: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[float]:
        generator = torch.Generator().manual_seed(3)
        for index in range(90):
            loop.last, loop.doubled = index % 3 == 2, index % doubled == 1
            yield step(torch.randn(4, 8, generator=generator)).item()

    plain, loop = Several(), Several()
    expected = list(calls(plain, plain.step))
    graphed = GraphedStep(loop.step, device=CpuDevice())
    assert list(calls(loop, graphed)) == expected
    assert graphed.report().refusals == ()
    assert graphed.report().replays >= 40, graphed.report()


def test_as_few_numbers_as_can_be_tell_calls_apart() -> None:
    """Where none changed each time that calls differed, it takes several; one of which no value comes is none."""
    suspects = Suspects()
    for index, (one, other) in enumerate([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 0)]):
        numbers = {(1, "one"): ("one", one), (1, "other"): ("other", other), (1, "count"): ("count", index)}
        suspects.note(numbers, agrees=False if index in (1, 2, 3, 4) else None)
    assert set(suspects.found()) == {(1, "one"), (1, "other")}
    suspects.note({}, agrees=None)
    suspects.note({}, agrees=False)
    assert suspects.found() == (), "calls differed, and no number changed"


def test_what_stands_in_another_container_each_time_tells_none_apart() -> None:
    """Two of them may lie at the same addresses in turns."""
    suspects = Suspects()
    for index in range(8):
        suspects.note({(index % 2, "last"): ("settings.last", index % 3 == 2)}, agrees=False if index else None)
    assert suspects.differed and suspects.found() == ()


@pytest.mark.parametrize("first", [True, False], ids=["the first", "the last"])
@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_a_flag_by_which_calls_cannot_be_captured_leaves_the_others_their_graph(
    every: int, first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that is printed now and then, say."""
    loop, reference = Loop(), Loop()

    def step(loop: Loop, x: torch.Tensor) -> torch.Tensor:
        loss = loop.model(x).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if loop.last:
            print(f"{loss.item():.3f}")
        return loss.detach()

    graphed = GraphedStep(lambda x: step(loop, x), device=CpuDevice())
    with pytest.warns(UserWarning, match="on the host"):
        for index in range(60):
            loop.last = reference.last = index % every == (0 if first else every - 1)
            x = torch.randn(4, 8)
            assert torch.equal(graphed(x), step(reference, x)), index
    printed = capsys.readouterr().out.split()
    assert printed[::2] == printed[1::2] and len(printed) == 2 * 60 // every
    report = graphed.report()
    assert report.replays >= 60 - 60 // every - 12, report
    assert len(report.refusals) == 1


def test_a_flag_that_has_nothing_to_do_with_it_does_not_keep_a_refusal_away() -> None:
    loop = Loop()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loop.model(x * (2 if loop.last else 1)).square().mean()
        return loss.detach() * loss.item()

    graphed = GraphedStep(step, device=CpuDevice())
    with pytest.warns(UserWarning, match="on the host"):
        for index in range(CALLS):
            loop.last = index % 3 == 2
            graphed(torch.randn(4, 8))
            assert (graphed.report().refusals != ()) == (index >= 2), index
    assert len(graphed.report().refusals) == 1 and graphed.report().replays == 0


def test_numbers_are_kept_of_few_calls() -> None:
    suspects = Suspects()
    for index in range(1000):
        suspects.note({(1, index): ("rate", index)}, agrees=False)
    assert len(suspects.calls) < 50 and len(suspects.differed) < 50


def test_numbers_of_calls_are_let_go_of_with_a_recording() -> None:
    loop = Loop()
    graphed = GraphedStep(loop.step, device=CpuDevice())
    list(run(loop, graphed, lambda index: False))
    assert graphed.report().replays > 0
    assert all(not progress.suspects.calls for progress in graphed._plan.by_key.values())


def test_calls_that_still_differ_once_they_are_told_apart_are_refused_once() -> None:
    loop, total = Loop(), 0

    def step(x: torch.Tensor) -> torch.Tensor:
        return loop.step(x) * total

    graphed = GraphedStep(step, device=CpuDevice())
    with pytest.warns(UserWarning, match="which is another value"):
        for index in range(CALLS):
            loop.last, total = index % 3 == 2, index
            graphed(torch.randn(4, 8))
    assert len(graphed.report().refusals) == 1 and graphed.report().replays == 0


def test_a_gradient_that_is_stopped_elsewhere_tells_calls_apart() -> None:
    """Where no number of Python shows it: a detach that decides where gradients go is compared."""
    one, other = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(8))
    hidden = array.array("i", [0])  # what no watch sees

    def step(x: torch.Tensor) -> torch.Tensor:
        one.grad = other.grad = None
        both = one.detach() + other if hidden[0] else one + other.detach()
        (both * x).sum().backward()
        return x.sum()

    graphed = GraphedStep(step, device=CpuDevice())
    with pytest.warns(UserWarning, match="gave detach"):
        for index in range(CALLS):
            hidden[0] = index % 3 == 2
            x = torch.randn(4, 8)
            graphed(x)
            stopped, followed = (one, other) if hidden[0] else (other, one)
            assert stopped.grad is None and followed.grad is not None, index
            assert torch.equal(followed.grad, x.sum(0)), index


class Unhashable(int):
    """Equal to any number of its value, and so without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(self) == int(other)


class Words(str):
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Unhashable, lambda last: Words("last" if last else "")], ids=["int", "str"])
def test_flags_need_no_hash(kind: Callable[[bool], Any]) -> None:
    plain, loop = Loop(), Loop()
    expected = list(run(plain, plain.step, lambda index: kind(index % 3 == 2)))
    graphed = GraphedStep(loop.step, device=CpuDevice())
    assert list(run(loop, graphed, lambda index: kind(index % 3 == 2))) == expected
    assert graphed.report().replays >= 10, graphed.report()
