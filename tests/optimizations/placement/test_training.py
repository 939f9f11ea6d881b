"""Placement under autograd: gradients, forwards with pending backwards, and AOTAutograd's static inputs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.placement import bits, fake_cuda, feeds_on_cpu, graphs_of, on_cuda, retargeted
from torch import nn

import optimizations
from optimizations import compiled_graph, torch_internals
from optimizations.placement import Feeds, Placement, place


class Scored(nn.Module):
    """A CPU mask, a NumPy scalar, weights per call from the CPU, and a score given back there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask = torch.tensor([[0.5, 1.0, 2.0]])
        self.temperature = numpy.float64(1.5)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.linear(x) * self.mask.to(x.device) / self.temperature
        scores = scores * weights.exp().to(x.device)
        return scores, (scores**2).mean().cpu()


def _inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, generator=generator), torch.randn(3, generator=generator)


def _traced() -> tuple[torch.fx.GraphModule, list[Any], Placement]:
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    x, weights = _inputs(0)
    ((graph_module, inputs),) = graphs_of(on_cuda(Scored(), mode), fake_cuda(x, mode), weights, mode=mode)
    return graph_module, inputs, place(graph_module, inputs)


def _arguments(module: nn.Module, seed: int) -> list[torch.Tensor]:
    ((_, arguments),) = graphs_of(module, *_inputs(seed))
    return arguments


def test_attributes_that_require_gradients_are_not_moved() -> None:
    class Trained(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.mask.requires_grad_()

    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    x, weights = _inputs(0)
    ((graph_module, inputs),) = graphs_of(on_cuda(Trained(), mode), fake_cuda(x, mode), weights, mode=mode)
    report = place(graph_module, inputs).report
    (left,) = report.left
    assert "self.mask requires a gradient" in left.reason
    assert "mask.to(x.device)" in (left.source_line or "")


@pytest.mark.parametrize("grad", [True, False])
def test_fixed_addresses_reach_autograd_and_inductor(grad: bool) -> None:
    """Stock code up to Inductor, on the CPU: static inputs, gradients and results are correct."""
    with torch.set_grad_enabled(grad):
        graph_module, inputs, placement = _traced()
        assert placement.feeds is not None
        told: list[list[str]] = []

        def compile_inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            if not settings.get("is_backward"):
                told.append([names[index] for index in settings["static_input_idxs"]])
            return _boxed(graph)

        torch.manual_seed(1)
        module = Scored()
        arguments = _arguments(module, 1)
        on_cpu = feeds_on_cpu(graph_module, placement.feeds, inputs)
        example_inputs = Placement(placement.graph_module, on_cpu, placement.report).example_inputs(arguments)
        compiled = torch_internals.compile_fx.compile_fx(
            retargeted(placement.graph_module), example_inputs, inner_compile=compile_inner
        )
        feeds = Feeds(on_cpu)
        for seed in (1, 2):
            arguments = _arguments(module, seed)
            expected = module(*_inputs(seed))
            found = feeds.call(compiled, tuple(arguments))
            assert bits([*found]) == bits([*expected])
            if grad:
                parameters = list(module.parameters())
                of_expected = torch.autograd.grad(expected[1], parameters)
                of_found = torch.autograd.grad(found[1], parameters)
                torch.testing.assert_close(of_found, of_expected)
    (static,) = told
    # Parameters and buffers are static by Dynamo's marks; kept values always, staged ones without a backward.
    assert len(static) == 2 + 2 + (0 if grad else 1)


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("hooks", ["none", "save on the CPU", "save on the CPU, pinned", "kept by Python"])
def test_backwards_read_the_values_of_their_forwards(hooks: str) -> None:
    """Two forwards before their backwards, attributes that change in between, and each backward twice."""
    graph_module, inputs, placement = _traced()
    assert placement.feeds is not None

    def saving() -> Any:
        return {
            "none": contextlib.nullcontext,
            "save on the CPU": torch.autograd.graph.save_on_cpu,
            "save on the CPU, pinned": lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
            "kept by Python": lambda: torch.autograd.graph.saved_tensors_hooks(_unpacked, _unpacked),
        }[hooks]()

    def compile_inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        return _boxed(graph)

    torch.manual_seed(1)
    module = Scored()
    eager = copy.deepcopy(module)
    on_cpu = feeds_on_cpu(graph_module, placement.feeds, inputs)
    examples = Placement(placement.graph_module, on_cpu, placement.report).example_inputs(_arguments(module, 1))
    compiled = torch_internals.compile_fx.compile_fx(
        retargeted(placement.graph_module), examples, inner_compile=compile_inner
    )
    feeds = Feeds(on_cpu)
    for _ in range(2):
        losses, expected = [], []
        for seed in (1, 2):
            arguments = tuple(_arguments(module, seed))
            with saving():
                losses.append(feeds.call(compiled, arguments)[1])
                expected.append(eager(*_inputs(seed))[1])
            module.mask.numpy()[0, seed] += 0.5  # no version counter sees this
            eager.mask = module.mask.clone()  # on a GPU, eager would have saved a copy
            for one in (module, eager):
                one.temperature = one.temperature + 1
        for loss, wanted in zip(losses, expected, strict=True):
            assert torch.equal(loss, wanted)
            for retain in (True, False):
                loss.backward(retain_graph=retain)
                wanted.backward(retain_graph=retain)
        for one, other in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_placement_works_through_dynamo_and_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile(backend="encore")` of a training step, placed as for a GPU, with the CPU as the device."""
    graph_module, inputs, for_gpu = _traced()
    assert for_gpu.feeds is not None
    feeds = feeds_on_cpu(graph_module, for_gpu.feeds, inputs)
    placement = Placement(retargeted(for_gpu.graph_module), feeds, for_gpu.report)
    monkeypatch.setattr(compiled_graph, "place", lambda *arguments, **settings: placement)
    torch.manual_seed(1)
    module = Scored()
    eager = copy.deepcopy(module)
    torch_internals.reset_dynamo()
    optimizations.reset()
    compiled = torch.compile(module, backend="encore", fullgraph=True)
    for seed in range(6):
        if seed == 3:
            for one in (module, eager):
                one.mask.add_(1.0)
                one.temperature = numpy.float64(0.5)
        inputs = _inputs(seed)
        (scores, loss), (expected_scores, expected) = compiled(*inputs), eager(*inputs)
        torch.testing.assert_close((scores, loss), (expected_scores, expected))
        loss.backward()
        expected.backward()
    for one, other in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    (report,) = optimizations.report()
    assert sorted(piece.direction for piece in report.compiled) == ["backward", "forward"]
    optimizations.reset()
    torch_internals.reset_dynamo()


def _boxed(graph: torch.fx.GraphModule) -> Any:
    def run(arguments: list[Any]) -> Any:
        results = graph(*arguments)
        arguments.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
