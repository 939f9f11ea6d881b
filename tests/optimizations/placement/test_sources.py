"""Which inputs stay between calls, as Dynamo's own sources tell, and how a change of each can be noticed."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.placement import graphs_of
from torch import nn

from optimizations.options import Attributes
from optimizations.placement.sources import VALUE_GUARD_LIMIT_BYTES, Guard, InputSource, SourceKind, input_sources

HELD = torch.ones(3)
with torch.inference_mode():
    INFERENCE = torch.ones(3)


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


def _source(program: Any, *args: Any, attributes: Attributes = "hoist") -> InputSource:
    """The source of the only input."""
    ((graph_module, inputs),) = graphs_of(program, *args)
    (source,) = input_sources(graph_module, inputs, attributes).values()
    return source


@pytest.mark.parametrize(
    ("attribute", "guard", "trusted"),
    [
        ("tensor", Guard.VALUE, Guard.VERSION),
        ("parameter", Guard.VALUE, Guard.VERSION),
        ("buffer", Guard.VALUE, Guard.VERSION),
        ("large_tensor", None, Guard.VERSION),
        ("gaps", None, Guard.VERSION),
        ("zero_rank", Guard.VALUE, Guard.VALUE),
        ("scalar", Guard.VALUE, Guard.VALUE),
        ("array", Guard.VALUE, Guard.VALUE),
        ("strided", None, None),
        ("large", None, None),
    ],
)
def test_attributes_of_modules(attribute: str, guard: Guard | None, trusted: Guard | None) -> None:
    class Reader(Holder):
        def forward(self) -> Any:
            return torch.as_tensor(getattr(self, attribute)) * 2

    assert _source(Reader(), attributes="trust").guard is trusted
    assert _source(Reader(), attributes="stage").guard is (
        Guard.VALUE if "scalar" in attribute or "zero" in attribute else None
    )
    source = _source(Reader())
    assert source.kind is SourceKind.ATTRIBUTE
    assert source.guard is guard
    assert source.text == f"self.{attribute}"


def test_tensors_in_containers_of_modules() -> None:
    class Reader(Holder):
        def forward(self) -> Any:
            return self.listed[0] * 2

    assert _source(Reader()) == InputSource(SourceKind.ATTRIBUTE, "self.listed[0]", Guard.VALUE)


def test_globals_and_closures_are_attributes() -> None:
    closed = torch.ones(3)
    assert _source(lambda: HELD * 2).kind is SourceKind.ATTRIBUTE
    assert _source(lambda: closed * 2).kind is SourceKind.ATTRIBUTE


def test_tensors_without_version_counter_are_compared() -> None:
    assert _source(lambda: INFERENCE * 2, attributes="trust").guard is Guard.VALUE


def test_arguments_are_arguments_however_deep() -> None:
    for program, argument in (
        (lambda x: x * 2, torch.ones(3)),
        (lambda x: x["key"][0] * 2, {"key": [torch.ones(3)]}),
        (lambda x: torch.as_tensor(x) * 2, numpy.ones(3)),
    ):
        source = _source(program, argument)
        assert (source.kind, source.guard) == (SourceKind.ARGUMENT, None)


def test_graphs_not_made_by_dynamo_have_arguments_only() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    sources = input_sources(torch.fx.GraphModule(nn.Module(), graph), [torch.ones(3)])
    assert sources == {"x": InputSource(SourceKind.ARGUMENT, "x", None)}
