"""Callables with work in their first run only are refused: a warm-up must not run it instead of the first call."""

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

    def __init__(self, set_up: Callable[[Initialized, torch.Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.made: Any = torch.zeros(3)
        self.scale, self.ready, self.set_up = 0.5, False, set_up

    def forward(self, x: torch.Tensor) -> Any:
        if not self.ready:
            self.set_up(self, x.detach())
            self.ready = True
        return (x - self.mean - self.made) * self.scale


@pytest.mark.parametrize(
    ("set_up", "name"),
    [
        (lambda module, x: module.mean.fill_(2.0), "ready"),
        (lambda module, x: setattr(module, "made", x.mean(0) * 2), "made"),
        (lambda module, x: setattr(module, "scale", float(x.abs().max())), "scale"),
    ],
)
def test_module_that_initializes_itself_with_samples_is_refused(set_up: Any, name: str) -> None:
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
