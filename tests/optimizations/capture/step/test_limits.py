"""Limits, budgets and learning rates of `graph_step`, and compiled modules' graphs, which are disabled inside it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import types
import weakref
from unittest import mock

import pytest
import torch
from interrupts import interrupted_at
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network, sgd, training_step
from step_programs import PROGRAMS

from optimizations import torch_internals
from optimizations.capture.step import call_recorder, kept_recordings
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.learning_rates import LearningRates
from optimizations.trees import hook
from optimizations.trees.manager import EncoreManager


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_shapes_beyond_the_limit_run_uncaptured() -> None:
    made = sgd("cpu")
    step = GraphedStep(made.step, device=CpuDevice(), limit=1)
    for rows in (6, 3):
        for batch in batches("cpu", 6, rows=rows):
            step(*batch)
    report = step.report()
    assert len(report.recordings) == 1 and report.recordings[0].signature.startswith("[6, 8] float32")
    assert report.replays == 3
    assert "which is the limit" in report.refusals[0].reason


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
    with pytest.warns(UserWarning, match=r"runs some of its calls without .* call train\(\) and eval\(\) outside"):
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


def test_changed_learning_rate_reaches_the_recorded_graph() -> None:
    """The recording was made with a number: it is dropped, and the next one has a tensor."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    step = training_step(model, optimizer)
    graphed = GraphedStep(step, device=CpuDevice())
    for index, batch in enumerate(batches("cpu", 12)):
        if index == 5:
            optimizer.param_groups[0]["lr"] = 0.0
        before = [parameter.detach().clone() for parameter in model.parameters()]
        graphed(*batch)
        moved = not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (index < 5)
    report = graphed.report()
    assert report.dropped_recordings == 1 and report.patched_learning_rates == 1 and report.replays > 5


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


def test_constant_tensor_is_read_in_place() -> None:
    made = PROGRAMS["inputs_that_are_the_same_tensors"]("cpu")
    step = GraphedStep(made.step, device=CpuDevice())
    seen = []
    for index, batch in enumerate(made.batches):
        step(*batch)
        made.between(index)
        seen.append([(one.tensors_in_place, one.copied_tensors) for one in step.report().recordings])
    assert seen[2] == [] and seen[3] == seen[6] == [(2, 2)]
    assert seen[7] == seen[11] == [(1, 3)]  # the factor is copied since it is another tensor
    report = step.report()
    assert report.dropped_recordings == 1 and report.refusals == ()
    assert report.recordings[0].copied_bytes == 6 * 8 * 4 + 6 * 8 + 4


def test_compiled_modules_graphs_are_disabled_temporarily() -> None:
    manager = torch_internals.cudagraph_trees.CUDAGraphTreeManager
    stock, outer = manager._run, manager.run

    class Function:
        model = staticmethod(lambda inputs: [value + 1 for value in inputs])

    class Manager:
        ids_to_funcs = {7: Function}  # noqa: RUF012

    with hook.at_rest():
        assert hook.resting()
        assert manager._run(Manager(), [1, 2], 7) == [2, 3]
        assert manager.run is outer  # functions that are compiled meanwhile keep a reference to it
        assert EncoreManager.run(Manager(), [1, 2], 7) == [2, 3]  # before any of its own bookkeeping
    assert manager._run is stock
    assert not hook.resting()


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_attribute_of_compiled_code_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled code bypasses the dispatcher, so the captured graph itself is inspected."""
    made = PROGRAMS["activations_kept_in_attributes"]("cpu")
    device = CpuDevice()
    monkeypatch.setattr(device, "mentions", lambda graph, memory, but=(): bool(memory))
    step = GraphedStep(made.step, device=device)
    for batch in made.batches[:5]:
        step(*batch)
    (refusal,) = step.report().refusals
    assert "is bound to another tensor" in refusal.reason and step.report().replays == 0
