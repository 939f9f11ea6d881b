"""Memory of recorded steps and callables: which recordings share a pool, and what outlives the launches of others.

A launch of the simulated device writes garbage over what later captures of its pool made.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.operators import ELSEWHERE, CpuDevice, CpuGraph
from step_parts import batches, network, training_step
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import StepRefused
from tests.optimizations.capture.callables.test_differentiation import graphed


def two_models() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)) for width in (32, 16)]


def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss


def compare(
    step: Callable[..., Any], models: list[nn.Sequential], others: list[nn.Sequential], order: list[int]
) -> None:
    """Both must leave the same gradients in all models after each call."""
    for index, which in enumerate(order):
        x = torch.randn(4, models[which][0].in_features, generator=torch.Generator().manual_seed(index))
        loss = step(models[which], x)
        assert torch.equal(loss, train(others[which], x))
        for mine, theirs in zip(nn.ModuleList(models).parameters(), nn.ModuleList(others).parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), index
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), index


ORDER = [0] * 6 + [1] * 6 + [0, 1] * 6


@pytest.mark.parametrize("first", [0, 1])
def test_recordings_of_other_parameters_keep_gradients(first: int) -> None:
    device = CpuDevice()
    step = GraphedStep(train, device=device)
    compare(step, two_models(), two_models(), [which ^ first for which in ORDER])
    report = step.report()
    assert len(report.recordings) == 2 and report.replays >= 15
    assert len(device.pools) == 2


def test_recordings_for_models_that_are_gone_are_freed() -> None:
    """A loop over folds makes one model for each, and stays replayed."""
    device, left = CpuDevice(), []
    step = GraphedStep(train, device=device)
    for fold in range(40):
        model, other = two_models()[0], two_models()[0]
        compare(step, [model], [other], [0] * 10)
        left.append([weakref.ref(one) for one in (model, *model.parameters())])
        assert step.report().replays >= (fold + 1) * 6
        del model, other
        gc.collect()  # or it depends on when Python collects whether the next fold finds the model gone
        assert sum(not graph.freed for graph in device.graphs) <= 2
    assert all(reference() is None for references in left[:-1] for reference in references)
    assert step.report().refusals == ()


@pytest.mark.filterwarnings("ignore:.*without a CUDA graph")
def test_freed_models_are_the_reported_reason() -> None:
    step = GraphedStep(train, device=CpuDevice())
    for _ in range(40):
        compare(step, [two_models()[0]], [two_models()[0]], [0] * 5)
    (refusal,) = step.report().refusals
    assert refusal.reason == "was recorded again and again: its model or other objects are new after a few calls"


def test_recordings_for_the_same_parameters_share_their_memory() -> None:
    model, device = network("cpu"), CpuDevice()
    step = GraphedStep(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), device=device)
    for rows in (6, 3, 6, 3):
        for batch in batches("cpu", 5, rows=rows):
            step(*batch)
    assert len(step.report().recordings) == 2 and len(device.pools) == 1


def test_pool_of_a_failed_capture_is_not_reused() -> None:
    model, device = network("cpu"), CpuDevice()
    step = GraphedStep(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), device=device)
    for batch in batches("cpu", 4):
        step(*batch)
    given = batches("cpu", 5, rows=3)
    for batch in given[:2]:
        step(*batch)
    device.fail_with = RuntimeError("for some reason")
    with pytest.warns(UserWarning, match="for some reason"):
        step(*given[2])
    for batch in batches("cpu", 5, rows=4):
        step(*batch)
    assert len(step.report().recordings) == 2
    assert len(device.pools) == 2


def test_gradient_set_after_the_recording_is_accumulated() -> None:
    """One parameter's gradient is thrown away by the step, the other's is not, and was None in the recording."""

    def outcome(step_of: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            one.zero_grad()
            loss = other(one(x)).square().sum()
            loss.backward()
            return loss

        called, found = step_of(step), []
        for index in range(14):
            found.append(called(torch.randn(2, 3, generator=torch.Generator().manual_seed(index))).detach().clone())
            found += [p.grad.clone() for p in (one.weight, other.weight) if p.grad is not None]
            if index < 7 or index == 10:
                other.weight.grad = None
        return found

    expected = outcome(lambda step: step)
    found = outcome(lambda step: GraphedStep(step, device=CpuDevice()))
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_replaced_side_stream_observes_the_step_again() -> None:
    model, reference, device = network("cpu"), network("cpu"), CpuDevice()
    step = GraphedStep(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), device=device)
    eager = training_step(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    device.not_ready = 2
    for batch, other in zip(batches("cpu"), batches("cpu"), strict=True):
        assert torch.equal(step(*batch), eager(*other))
    report = step.report()
    assert (report.eager_calls, report.replays, report.refusals) == (5, 4, ())


def test_step_without_memory_for_workspaces_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> bool:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(CpuDevice, "ready", full)
    model, reference = network("cpu"), network("cpu")
    step = GraphedStep(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), device=CpuDevice())
    eager = training_step(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="needs more memory for its capture than is free"):
        for batch, other in zip(batches("cpu"), batches("cpu"), strict=True):
            assert torch.equal(step(*batch), eager(*other))
    assert step.report().replays == 0


@pytest.mark.parametrize("multiplies", [True, False])
def test_matrix_products_on_other_streams_are_refused(multiplies: bool) -> None:
    device, weight = CpuDevice(), torch.randn(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        ELSEWHERE.set(True)
        made = x @ weight if multiplies else x + weight
        ELSEWHERE.set(False)
        return (made @ weight).sum()

    graphed_step, x = GraphedStep(step, device=device), torch.randn(3, 3)
    expected = step(x)
    if multiplies:
        with pytest.warns(UserWarning, match="multiplies matrices on a stream or in a thread of its own"):
            found = [graphed_step(x) for _ in range(6)]
        with pytest.raises(StepRefused, match="multiplies matrices on a stream"):
            GraphedCallables(step, [(x,)], device=device, order=[1])
    else:
        found = [graphed_step(x) for _ in range(6)]
        GraphedCallables(step, [(x,)], device=device, order=[1]).close()
    assert all(torch.equal(one, expected) for one in found)
    assert graphed_step.report().replays == (0 if multiplies else 3)


@pytest.mark.parametrize("often", [1, 9])
def test_workspaces_freed_during_a_capture_repeat_it(often: int) -> None:
    """A recording in another thread frees them: a workspace is in the graph's pool then."""

    class Freed(CpuDevice):
        @contextlib.contextmanager
        def capturing(self, graph: CpuGraph, pool: Any, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
            with super().capturing(graph, pool, generators):
                yield
            self.not_ready = int(self.captures <= often)

    weight, device = torch.randn(3, 3), Freed()
    step = GraphedStep(lambda x: x @ weight, device=device)
    for _ in range(12):
        x = torch.randn(3, 3)
        assert torch.equal(step(x), x @ weight)
    assert [graph.freed for graph in device.graphs] == [True, often > 1]
    assert bool(step.report().replays) == (often == 1)
    assert ["workspaces were freed" in one.reason for one in step.report().refusals] == [True] * (often > 1)


def test_callables_are_refused_where_their_stream_changes() -> None:
    class Changes(CpuDevice):
        asked = 0

        def ready(self) -> bool:
            self.asked += 1
            return self.asked != changes_at

    x = torch.randn(2, 3, requires_grad=True)
    changes_at = 1  # nothing is captured yet
    assert len(GraphedCallables(nn.Linear(3, 3), [(x,)], device=Changes()).report()) == 2
    for number in (2, 3):  # after a capture, and behind the last one
        changes_at = number
        with pytest.raises(StepRefused, match="workspaces were freed"):
            GraphedCallables(nn.Linear(3, 3), [(x,)], device=Changes())


@pytest.mark.parametrize("order", [[1, -1, 2, -2], [1, 2, -2, -1, 1, 2, -2, -1], [1, -1, 1, -1]], ids=str)
def test_callables_of_one_pool_are_correct_in_any_order(order: list[int]) -> None:
    torch.manual_seed(1)
    modules = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.GELU())][: max(order)]
    torch.manual_seed(1)
    others = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.GELU())][: max(order)]
    call = graphed(modules, [(torch.randn(2, 3, requires_grad=True),) for _ in modules], order=order)
    for iteration in range(3):
        for functions in (call, others):
            waiting: dict[int, list[torch.Tensor]] = {}
            for place, event in enumerate(order):
                if event > 0:
                    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * iteration + place))
                    x.requires_grad_()
                    waiting.setdefault(event, []).append(functions[event - 1](x).square().sum())
                else:
                    waiting[-event].pop(0).backward()
        for mine, theirs in zip(nn.ModuleList(modules).parameters(), nn.ModuleList(others).parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)
    assert call.calls_without_graph == 0


def test_launches_on_several_streams_are_in_order() -> None:
    """They share what their inputs are copied to, what they compute in, and what large results are copied from."""
    device = CpuDevice()
    step = GraphedStep(lambda x: x.sin() * 2, device=device)
    for index, stream in enumerate([0] * 6 + [7, 7, 0, 9]):
        device.stream = stream
        x = torch.full((3,), float(index))
        assert torch.equal(step(x), x.sin() * 2)
    assert device.waits == [(7, 0), (0, 7), (9, 0)]
    assert step.report().replays == 7


def test_step_in_a_capture_of_the_program_runs_uncaptured() -> None:
    device = CpuDevice()
    graphed = GraphedStep(lambda x: x * 2, device=device)
    for _ in range(6):
        graphed(torch.ones(3))
    replays = graphed.report().replays
    graph, x = device.new_graph(), torch.ones(3)
    with device.capturing(graph, device.new_pool()):
        doubled = graphed(x)
    x.fill_(4)
    graph.replay()
    assert torch.equal(doubled, x * 2) and graphed.report().replays == replays


def test_memory_of_the_previous_stream_is_freed() -> None:
    """Observed calls run on their own stream, and calls after a refusal on the program's."""
    device, model = CpuDevice(), network("cpu")
    train_once = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses: list[float] = []

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train_once(batch)
        losses.append(loss.item())
        return loss

    graphed_step = GraphedStep(step, device=device)
    found = []
    with pytest.warns(UserWarning, match="runs without a CUDA graph"):
        for batch in batches("cpu", 12):
            graphed_step(*batch)
            found.append(device.given_back)
    assert graphed_step.report().replays == 0
    assert found[0] == 1, "before the first call that is observed"
    assert found[-1] == 2, "and before the first that is not"


def test_warm_up_memory_of_callables_is_freed() -> None:
    device = CpuDevice()
    GraphedCallables(nn.Linear(8, 4), [(torch.randn(3, 8),)], device=device)
    assert device.given_back == 1
    with pytest.raises(StepRefused):
        GraphedCallables(lambda x: x * x.sum().item(), [(torch.randn(3, 8),)], device=device)
    assert device.given_back == 2, "also where they are refused"
