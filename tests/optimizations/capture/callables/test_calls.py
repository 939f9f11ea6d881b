"""What a forward of a callable runs around its launch: as few functions for many parameters as for few."""

from __future__ import annotations

import sys
from typing import Any

import torch
from simulated_gpu.operators import CpuDevice, CpuGraph
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables


def functions_called(layers: int) -> list[str]:
    """In Python and in C, by a forward of a network that was captured."""
    torch.manual_seed(5)
    model = nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(8, 8), nn.GELU())])
    given = torch.randn(6, 8)
    expected = model(given).detach()
    (graphed,) = graph_callables([model], [(given,)], device=CpuDevice())
    for _ in range(3):
        graphed(given).sum().backward()
    names: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    replay = CpuGraph.replay.__code__
    sys.setprofile(note)
    try:
        result = graphed(given)
    finally:
        sys.setprofile(None)
    assert torch.equal(result, expected)
    first = names.index(replay.co_name)
    return names[:first]


def test_forward_calls_equally_few_functions_for_many_parameters() -> None:
    """Of each gradient that it holds, it asks for the memory alone."""
    few, many = functions_called(1), functions_called(12)
    asked = "untyped_storage"
    assert [name for name in many if name != asked] == [name for name in few if name != asked]
    assert many.count(asked) - few.count(asked) <= 2 * 11, "one for each further weight and bias"
