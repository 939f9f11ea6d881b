"""`optimizations.explain` predicts placement graph by graph, in records and as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placement_examples import WIDTH, TimedDenoiser
from simulated_gpu.placement import fake_cuda, on_cuda

import optimizations
from optimizations import torch_internals


def test_each_graph_is_explained_before_and_after() -> None:
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), mode:
        module = on_cuda(TimedDenoiser().eval(), mode)
        explanation = optimizations.explain(module, fake_cuda(torch.ones(2, WIDTH), mode), torch.tensor(3))
    (graph,) = explanation.graphs
    assert len(graph.cpu_nodes_before) > 8
    assert graph.cpu_nodes_after == ()
    text = str(explanation)
    assert f"{len(graph.cpu_nodes_before)} nodes before, 0 after" in text
    assert "2 (2 blocking) before, 1 (0 blocking) after" in text
    assert "staged cat (32 B)" in text
    assert "evaluated before the graph, on the CPU: " in text
    assert "placement_examples.py" in text


def test_graphs_after_a_break_are_explained_with_reasons() -> None:
    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x

    def program(x: torch.Tensor) -> torch.Tensor:
        return outside(x + (x.cpu() / 3).to(x.device)) * 2

    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        explanation = optimizations.explain(program, fake_cuda(torch.ones(3), mode))
    assert [graph.untouched for graph in explanation.graphs] == ["nothing could be moved", "nothing is on the CPU"]
    assert "left truediv (truediv): computes between GPU values" in str(explanation)
    assert "test_explanation.py" in explanation.graphs[0].left[0].source_line  # type: ignore[operator]


def test_explaining_twice_works_and_compiles_nothing() -> None:
    optimizations.reset()

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for _ in range(12):
        untouched = optimizations.explain(program, torch.ones(2)).graphs[0].untouched
        assert untouched is not None
        assert untouched.startswith("no tensor is on a GPU; without one, the suite's `encore explain module:callable`")
    assert optimizations.report() == ()


def test_explanation_does_not_change_the_next_compilation() -> None:
    """Traces count against Dynamo's limit, after which code runs uncompiled, and differing sizes become symbols."""
    seen: list[list[Any]] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append([list(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs])
        return graph_module.forward

    def program(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    for _ in range(torch_internals.dynamo_config.recompile_limit + 1):
        assert len(optimizations.explain(program, torch.ones(3)).graphs) == 1
    compiled = torch.compile(program, backend=backend)
    compiled(torch.ones(5))
    assert seen == [[[5]]]
    with torch_internals.dynamo_config.patch(error_on_recompile=True):
        assert len(optimizations.explain(program, torch.ones(7)).graphs) == 1
        compiled(torch.ones(5))
    assert seen == [[[5]]], "what was compiled before is kept"


def test_uncallable_target_is_named() -> None:
    with pytest.raises(TypeError, match=r"explain needs a module or function .* not Tensor$"):
        optimizations.explain(torch.ones(3))  # type: ignore[arg-type]
