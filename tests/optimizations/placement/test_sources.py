"""Dynamo's sources show which inputs persist between calls, and how changes of each are noticed."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.placement import graphs_of
from torch import nn

from optimizations.placement.sources import VALUE_GUARD_LIMIT_BYTES, InputSource, input_sources


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.ones(3)
        self.scalar = numpy.float64(2.0)
        self.array = numpy.ones(3)
        self.strided = numpy.ones(6)[::2]
        self.large = numpy.ones(VALUE_GUARD_LIMIT_BYTES // 8 + 1)
        self.listed = [torch.ones(3)]
        self.large_tensor = torch.ones(VALUE_GUARD_LIMIT_BYTES // 4 + 1)
        self.gaps = torch.ones(VALUE_GUARD_LIMIT_BYTES // 4, 2)[::2, :1]
        self.zero_rank = torch.tensor(1.0)
        self.parameter = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))


def _source(program: Any, *args: Any) -> InputSource:
    """The source of the only input."""
    ((graph_module, inputs),) = graphs_of(program, *args)
    (source,) = input_sources(graph_module, inputs).values()
    return source


@pytest.mark.parametrize(
    ("attribute", "is_compared"),
    [
        ("tensor", True),
        ("parameter", True),
        ("buffer", True),
        ("large_tensor", False),
        ("gaps", False),
        ("zero_rank", True),
        ("scalar", True),
        ("array", True),
        ("strided", False),
        ("large", False),
    ],
)
def test_attributes_of_modules(attribute: str, is_compared: bool) -> None:
    class Reader(Holder):
        def forward(self) -> Any:
            return torch.as_tensor(getattr(self, attribute)) * 2

    assert _source(Reader()) == InputSource(f"self.{attribute}", is_attribute=True, is_compared=is_compared)
