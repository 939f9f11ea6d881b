"""Steps that use tensors without data: they compute shapes, export models or count operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from optimizations.capture.step.graphed_step import GraphedStep

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Counted = Callable[[nn.Module, torch.Tensor], int]


def made_in_a_mode(model: nn.Module, x: torch.Tensor) -> int:
    with FakeTensorMode():
        return (torch.empty(3, 4) + 1).repeat(2, 1).shape[0]


def made_of_the_batch(model: nn.Module, x: torch.Tensor) -> int:
    mode = FakeTensorMode()
    with mode:
        return torch.cat([mode.from_tensor(x)] * 2).shape[0]


def exported(model: nn.Module, x: torch.Tensor) -> int:
    return len(torch.export.export(model, (x,)).graph_signature.parameters)


def floating_point_operations(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counted:
        model(x)
    return int(counted.get_total_flops())


def on_meta(model: nn.Module, x: torch.Tensor) -> int:
    with torch.device("meta"):
        return nn.Linear(4, 4)(torch.empty(2, 4)).shape[0]


@pytest.mark.parametrize("count", [made_in_a_mode, made_of_the_batch, exported, floating_point_operations, on_meta])
def test_step_that_reads_shapes_is_replayed(count: Counted) -> None:
    def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            number = count(model, x)
            optimizer.zero_grad()
            loss = model(x).square().mean() * number
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.load_state_dict(first.state_dict())
    step, expected = GraphedStep(step_of(first), device=CpuDevice()), step_of(second)
    for _ in range(7):
        x = torch.randn(3, 4)
        assert torch.equal(step(x), expected(x))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert step.report().refusals == () and step.report().replays >= 3
