"""Callables may draw random numbers on the host if the caller declares that the results are unused."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from callable_parts import gradients, graphed, same
from simulated_gpu.operators import CpuDeviceWithHost
from torch import nn

from optimizations.capture.step.observer import StepRefused


class Dropping(nn.Module):
    """LayerDrop at rate 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if drawn < 0 or random.random() < 0:
                continue
            x = layer(x).tanh()
        return x


def states() -> list[Any]:
    return [random.getstate(), numpy.random.get_state()[2], torch.random.get_rng_state().tolist()]


def test_callable_with_harmless_draws_equals_eager() -> None:
    model = Dropping()
    reference = copy.deepcopy(model)
    before = states()
    group = graphed(model, [(torch.ones(2, 4),)], device=CpuDeviceWithHost(), host_draws="unused")
    assert states() == before, "what the runs drew is put back"
    for x in torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(7)):
        before = states()
        model(x).square().sum().backward()
        assert states() == before, "launches draw nothing"
        reference(x).square().sum().backward()
        assert same(gradients(model), gradients(reference))
    assert group.calls_without_graph == 0 and [one.replays for one in group.report()] == [6, 6]


def test_host_draw_passed_to_the_gpu_is_refused() -> None:
    with pytest.raises(StepRefused, match="callable 1 differs in two calls with equal shapes: one ran mul"):
        samples = [(torch.ones(3, requires_grad=True),)]
        graphed(lambda x: x * random.random(), samples, device=CpuDeviceWithHost(), host_draws="unused")
