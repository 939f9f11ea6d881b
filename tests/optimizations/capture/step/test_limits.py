"""Limits of graph_step, and memory of recorded steps and callables: pools, freed recordings, streams."""

from __future__ import annotations

import contextlib
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from interrupts import interrupted_at
from simulated_gpu.operators import ELSEWHERE, CpuDevice, CpuGraph
from step_parts import Graph, assert_as_eager, batches, loss_of, network, sgd, training_step
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.step import call_recorder, kept_recordings
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.progress import MOST_SIGNATURES


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_ever_new_shapes_beyond_the_limit_are_not_observed() -> None:
    step = GraphedStep(sgd("cpu").step, device=CpuDevice(), limit=1)
    for rows in range(1, MOST_SIGNATURES + 6):
        for batch in batches("cpu", 3, rows=rows):
            step(*batch)
    assert step.report().refusals[-1].reason == f"more than {MOST_SIGNATURES} different calls were seen"


def decayed(per_rate: int) -> GraphedStep:
    """Ten learning rates of an optimizer that takes numbers only, a graph for each, and two may be alive."""
    made = [network("cpu"), network("cpu")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in made]
    eager, step = [training_step(*pair) for pair in zip(made, optimizers, strict=True)]
    graphed = GraphedStep(step, device=CpuDevice(), limit=2)
    (batch,) = batches("cpu", 1)
    for _ in range(10):
        for _ in range(per_rate):
            assert torch.equal(graphed(*batch), eager(*batch))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5
    return graphed


def test_unused_graph_is_replaced_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_recordings, "LONG_IN_USE", 6)
    report = decayed(12).report()
    assert (len(report.recordings), report.dropped_recordings, report.refusals) == (2, 8, ())
    assert report.replays == 10 * 12 - 3 - 9 * 2


@pytest.mark.filterwarnings("ignore:.*without a CUDA graph")
def test_recordings_in_use_are_not_freed_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_recordings, "LONG_IN_USE", 2)
    step = GraphedStep(lambda x: x * 2, device=CpuDevice(), limit=2)
    for index in range(26):
        step(torch.ones(index % 2 + 1 if index < 20 else 3))
    report = step.report()
    assert (len(report.recordings), report.dropped_recordings) == (2, 0)
    assert "has 2 graphs already" in report.refusals[0].reason


@pytest.mark.filterwarnings("ignore:.*without a CUDA graph")
def test_rarely_used_graphs_give_a_reason_with_a_remedy() -> None:
    report = decayed(12).report()
    assert len(report.recordings) == 2 and report.dropped_recordings == 0
    assert "pass numbers that change as tensors" in report.refusals[0].advice


def test_only_calls_that_change_python_run_uncaptured() -> None:
    """`train()` changes state only in the call after an evaluation; later changes are recorded."""
    model, scale = network("cpu"), [1.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model, batch) * scale[0]
        loss.backward()
        optimizer.step()
        return loss

    graphed = GraphedStep(step, device=CpuDevice())
    with pytest.warns(UserWarning, match=r"runs some of its calls without .* do it outside of the step, as `train"):
        for index, batch in enumerate(batches("cpu", 60)):
            if index % 6 == 5:
                model.eval()
            if index == 40:
                scale[0] = 0.5
            graphed(*batch)
    report = graphed.report()
    assert len(report.recordings) == 2
    assert report.replays == 60 - 3 - 2 - 10, "first calls, those that see the other scale, those behind an evaluation"


@pytest.mark.filterwarnings("ignore:.*without a CUDA graph")
def test_mostly_refused_calls_are_not_observed_repeatedly() -> None:
    """Every second call follows an evaluation."""
    model = network("cpu")

    def step(x: torch.Tensor) -> torch.Tensor:
        return model.train()(x).detach()

    graphed = GraphedStep(step, device=CpuDevice())
    with contextlib.ExitStack() as without_looks:
        for index in range(80):
            model.train(index < 10 or index % 2 == 0)
            if index == 60:
                without_looks.enter_context(mock.patch.object(call_recorder, "reach", side_effect=AssertionError))
            graphed(torch.ones(3, 8))
            assert model.training
    assert graphed.report().replays == 7 + 35


def test_interrupted_learning_rate_write_is_repeated() -> None:
    model = network("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    (group,) = optimizer.param_groups
    rates = LearningRates()
    assert not rates.changed([optimizer], numbers_only=False)
    group["lr"] = 0.25
    assert rates.changed([optimizer], numbers_only=False)
    ((_, _, standing),) = rates._groups()
    for number in itertools.count():
        group["lr"] /= 2
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number, "step/learning_rates.py") as where:
            rates.write()
        rates.write()
        assert standing.item() == group["lr"], where
        if not where:
            break
    assert number > 3


def test_assigned_tensor_rate_is_not_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it would wait for the GPU before each launch, and end a capture."""
    optimizer = torch.optim.AdamW(network("cpu").parameters(), lr=0.5, fused=True)
    (group,), rates = optimizer.param_groups, LearningRates()
    rates.changed([optimizer], numbers_only=False)
    group["lr"] = 0.25
    assert rates.changed([optimizer], numbers_only=False)
    ((_, _, standing),) = rates._groups()
    group["lr"] = assigned = torch.tensor([0.125])
    with monkeypatch.context() as patched:
        for reads in ("__float__", "item", "__eq__", "__ne__"):
            patched.setattr(torch.Tensor, reads, None)
        rates.write()
        assigned.fill_(0.75)
        rates.write()
    assert standing.item() == 0.75


@pytest.mark.parametrize("closes", [True, False])
def test_proxied_model_and_optimizer_are_released(closes: bool) -> None:
    held = types.SimpleNamespace(model=None, optimizer=None)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return training_step(held.model, held.optimizer)(batch)

    device = CpuDevice()
    graphed = GraphedStep(step, device=device)
    weights = []
    for _ in range(3):
        held.model = network("cpu")
        held.optimizer = torch.optim.AdamW(held.model.parameters(), lr=0.05, fused=True)
        weights.append(weakref.ref(held.model[0].weight))
        for batch in batches("cpu", 6):
            graphed(*batch)
            held.optimizer.param_groups[0]["lr"] *= 0.9
    assert graphed.report().replays
    if closes:
        held.model = held.optimizer = None
        graphed.close()
    device.graphs.clear()
    device._captured.clear()
    gc.collect()
    assert [weight() is not None for weight in weights] == [False, False, not closes]


# Memory of recorded steps and callables: which recordings share a pool, and what outlives the launches of others.


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


@pytest.mark.filterwarnings("ignore:.*without a CUDA graph")
def test_freed_models_are_the_reported_reason() -> None:
    step = GraphedStep(train, device=CpuDevice())
    for _ in range(40):
        compare(step, [two_models()[0]], [two_models()[0]], [0] * 5)
    (refusal,) = step.report().refusals
    assert refusal.reason == "was recorded again and again: its model or other objects are new after a few calls"


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


def plain_training(graph: Graph) -> Iterator[torch.Tensor]:
    model = network("cpu")
    step = graph(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    yield from (step(*batch) for batch in batches("cpu"))


def test_replaced_side_stream_observes_the_step_again() -> None:
    device = CpuDevice()
    device.not_ready = 2
    report = assert_as_eager(plain_training, device)
    assert (report.eager_calls, report.replays, report.refusals) == (5, 4, ())


def test_step_without_memory_for_workspaces_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> bool:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(CpuDevice, "ready", full)
    with pytest.warns(UserWarning, match="needs more memory for its capture than is free"):
        assert assert_as_eager(plain_training).replays == 0


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
            GraphedCallables(step, [(x,)], device=device)
    else:
        found = [graphed_step(x) for _ in range(6)]
        GraphedCallables(step, [(x,)], device=device).close()
    assert all(torch.equal(one, expected) for one in found)
    assert graphed_step.report().replays == (0 if multiplies else 3)


@pytest.mark.parametrize("often", [1, 9])
def test_workspaces_freed_during_a_capture_repeat_it(often: int) -> None:
    """A recording in another thread frees them: a workspace is in the graph's pool then."""

    class Freed(CpuDevice):
        @contextlib.contextmanager
        def capturing(self, graph: CpuGraph, pool: Any) -> Iterator[None]:
            with super().capturing(graph, pool):
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
    for number in (2, 3):  # after a capture, and after the last one
        changes_at = number
        with pytest.raises(StepRefused, match="workspaces were freed"):
            GraphedCallables(nn.Linear(3, 3), [(x,)], device=Changes())


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
