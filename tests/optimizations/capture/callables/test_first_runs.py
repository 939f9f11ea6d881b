"""What a callable does in its first run only: warm-up must not do that in the place of the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step.observer import StepRefused


class Initialized(nn.Module):
    """Sets itself up in its first call."""

    mean: torch.Tensor
    set_up: Callable[[Initialized, torch.Tensor], None]

    def __init__(self, set_up: Callable[[Initialized, torch.Tensor], None]) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(3)), 0.5
        self.register_buffer("mean", torch.zeros(3))
        self.made: Any = torch.zeros(3)
        self.ready, self.set_up = False, set_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.set_up(self, x)
            self.ready = True
        made: torch.Tensor = self.made[0] if isinstance(self.made, tuple) else self.made
        return (x - self.bias - self.mean - made) * self.scale


def writes_a_parameter(module: Initialized, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.bias.copy_(x.mean(0))


def writes_a_buffer(module: Initialized, x: torch.Tensor) -> None:
    module.mean.fill_(2.0)


def keeps_a_tensor(module: Initialized, x: torch.Tensor) -> None:
    module.made = x.detach().mean(0) * 2


def keeps_a_tensor_in_a_tuple(module: Initialized, x: torch.Tensor) -> None:
    module.made = (torch.zeros(3).copy_(x.detach()[0]), 1)


def keeps_a_number(module: Initialized, x: torch.Tensor) -> None:
    module.scale = float(x.detach().abs().max())


@pytest.mark.parametrize(
    ("set_up", "name"),
    [
        (writes_a_parameter, "ready"),
        (writes_a_buffer, "ready"),
        (keeps_a_tensor, "made"),
        (keeps_a_tensor_in_a_tuple, "made"),
        (keeps_a_number, "scale"),
    ],
)
def test_first_call_products_of_the_batch_are_not_the_samples(set_up: Any, name: str) -> None:
    module, reference = Initialized(set_up), Initialized(set_up)
    with pytest.raises(StepRefused, match=r"sets itself up in its first call.*" + name):
        graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    assert not module.ready
    x = torch.randn(2, 3)
    assert torch.equal(module(x), reference(x))
    call = graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    x = torch.randn(2, 3)
    assert torch.equal(module(x), reference(x))
    assert call.calls_without_graph == 0
