"""Averages of weights after and in a step: PyTorch's, whose first call differs from later ones, and handwritten
ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, network, state_of, training_step
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 14
Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]

AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "equal": AveragedModel,
    "exponential": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "exponential, of buffers too": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
    "of the program's own": lambda model: AveragedModel(
        model, avg_fn=lambda one, new, count: one + (new - one) / count
    ),
}


def run(
    make: Callable[[nn.Module], AveragedModel], *, inside: bool, graphed: bool, on_the_host: bool = False
) -> tuple[list[torch.Tensor], Any]:
    """The count is put to zero after the tenth call, so that the next one copies the weights again."""
    model = network("cpu", norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, averaged, device = training_step(model, optimizer), make(model), CpuDevice()
    if on_the_host:
        device.host.add(averaged.n_averaged.untyped_storage().data_ptr())

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch).detach()
        if inside:
            averaged.update_parameters(model)
        return loss

    called: Any = GraphedStep(step, device=device) if graphed else step
    found = []
    for index, batch in enumerate(batches("cpu", CALLS)):
        found.append(called(*batch).clone())
        if not inside:
            averaged.update_parameters(model)
        if index == 9:
            averaged.n_averaged.zero_()
        found += [tensor.detach().clone() for tensor in state_of(averaged)]
    assert type(averaged.n_averaged) is torch.Tensor
    return [*found, *state_of(model, optimizer)], called.report() if graphed else None


@pytest.mark.parametrize("name", sorted(AVERAGES))
def test_average_after_the_step_equals_eager(name: str) -> None:
    expected, _ = run(AVERAGES[name], inside=False, graphed=False)
    found, report = run(AVERAGES[name], inside=False, graphed=True)
    assert all(map(torch.equal, found, expected))
    assert (report.refusals, report.replays, len(report.recordings)) == ((), CALLS - 3, 1)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("on_the_host", [False, True])
def test_average_in_the_step_is_refused(on_the_host: bool) -> None:
    """A count on the host decides whether the weights are copied."""
    expected, _ = run(AVERAGES["exponential"], inside=True, graphed=False)
    found, report = run(AVERAGES["exponential"], inside=True, graphed=True, on_the_host=on_the_host)
    assert all(map(torch.equal, found, expected))
    assert report.recordings == () and "after the step" in report.refusals[0].advice
    assert "test_averages.py:" in report.refusals[0].source_line


def lerp(averages: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, 0.1)


def copy_what_is_computed(averages: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(0.9 * average + 0.1 * weight)


@pytest.mark.parametrize("update", [lerp, copy_what_is_computed])
def test_handwritten_averages_equal_eager(
    update: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
) -> None:
    found = []
    for graphed in (False, True):
        model = network("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = training_step(model, optimizer)
        weights = [parameter.detach() for parameter in model.parameters()]
        averages = [weight.clone() for weight in weights]

        def step(
            batch: dict[str, torch.Tensor], train: Step = train, averages: Any = averages, weights: Any = weights
        ) -> torch.Tensor:
            loss = train(batch)
            update(averages, weights)
            return loss.detach()

        called: Any = GraphedStep(step, device=CpuDevice()) if graphed else step
        found.append([called(*batch).clone() for batch in batches("cpu", CALLS)] + averages)
    assert all(map(torch.equal, *found))
    assert (called.report().refusals, called.report().replays) == ((), CALLS - 3)
