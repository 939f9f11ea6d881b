"""Published constructs with CPU values: none of these stays there, and the results are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from placement_examples import WIDTH, DetectionScalars, MaskedBlocks, TimedDenoiser
from simulated_gpu.placement import bits, fake_cuda, graphs_of, on_cuda, placed_runner, runner
from torch import nn

from models.registry import find
from optimizations import torch_internals
from optimizations.placement import Placement, place
from optimizations.report import PlacementReport


def _text(seed: int) -> list[torch.Tensor]:
    return [torch.randint(0, 16, (3, 6), generator=torch.Generator().manual_seed(seed))]


def _image(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(1, 3, 5, 7, generator=generator), 9 * torch.rand(4, 4, generator=generator)]


def _step(seed: int) -> list[torch.Tensor]:
    return [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)), torch.tensor(7 * seed)]


@dataclass(frozen=True)
class Example:
    """A module, inputs by seed, which of these the caller passes on the CPU, and what a caller may change between
    calls: attributes that are not in the state dict."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], list[torch.Tensor]]
    on_cpu: tuple[int, ...]
    change: Callable[[Any], None]


def _change_mask(module: Any) -> None:
    module.mask[0, 2] = 0.0


def _replace_scalar(module: Any) -> None:
    module.scale = type(module.scale)(5.0)


def _replace_table(module: Any) -> None:
    module.alphas = torch.linspace(0.9, 0.2, 50)


EXAMPLES = {
    "mask": Example(MaskedBlocks, _text, (), _change_mask),
    "scalars": Example(DetectionScalars, _image, (), _replace_scalar),
    "timestep": Example(TimedDenoiser, _step, (1,), _replace_table),
}


@dataclass(frozen=True)
class Traced:
    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    placement: Placement


def _traced(example: Example) -> Traced:
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    arguments = [
        value if position in example.on_cpu else fake_cuda(value, mode)
        for position, value in enumerate(example.inputs(1))
    ]
    with torch.no_grad():
        ((graph_module, inputs),) = graphs_of(on_cuda(example.make().eval(), mode), *arguments, mode=mode)
        return Traced(graph_module, inputs, place(graph_module, inputs))


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_stays_on_the_cpu_and_nothing_blocks(name: str) -> None:
    placement = _traced(EXAMPLES[name]).placement
    report = placement.report
    assert report.untouched is None
    assert len(report.copies_before) >= 2
    assert report.cpu_nodes_after == ()
    assert report.left == ()
    assert not any(transfer.blocking for transfer in report.copies_after)
    assert len(report.copies_after) == (1 if report.staged else 0)
    values = (node.meta.get("example_value") for node in placement.graph_module.graph.nodes)
    assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"cuda"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_equal_the_module_after_attribute_changes(name: str) -> None:
    example = EXAMPLES[name]
    traced = _traced(example)
    original = runner(traced.graph_module, traced.inputs)
    placed = placed_runner(traced.graph_module, traced.placement, traced.inputs)
    torch.manual_seed(3)
    module = example.make().eval()
    results = []
    for seed in (1, 2, 3, 4):
        if seed == 3:
            example.change(module)
        inputs = example.inputs(seed)
        with torch.no_grad():
            ((_, arguments),) = graphs_of(module, *inputs)
            results.append((module(*inputs), original(*arguments), placed(*arguments)))
    for eager, before, after in results:
        eager = eager if isinstance(eager, tuple) else (eager,)
        assert bits(list(before)) == bits(list(eager))
        assert bits(list(after)) == bits(list(eager))


def _reports(acronym: str) -> list[PlacementReport]:
    """Placement of all FX graphs of a workload of the suite, in its small size, as published."""
    from suite.explain.build import build_workload

    program = build_workload(find(acronym), variant="published", size="tiny")
    found: list[PlacementReport] = []

    def collect(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(place(graph_module, inputs).report)
        return graph_module.forward

    torch_internals.reset_dynamo()
    with torch.no_grad(), program.mode, program.surroundings():
        torch.compile(program.module, backend=collect)(*program.args, **program.kwargs)
    return found


@pytest.mark.parametrize(("acronym", "hoisted"), [("ST", {"kept"}), ("MMC", {"kept"}), ("XLNET-I", {"kept"})])
def test_published_workloads_have_no_cpu_value_left(acronym: str, hoisted: set[str]) -> None:
    reports = _reports(acronym)
    assert sum(len(report.cpu_nodes_before) for report in reports) >= 2
    for report in reports:
        assert report.cpu_nodes_after == ()
        assert report.copies_after == ()
        assert report.left == ()
    assert {value.form for report in reports for value in report.hoisted} == hoisted


def test_every_reason_and_value_names_a_program_line() -> None:
    report = _traced(EXAMPLES["timestep"]).placement.report
    for entry in (*report.cpu_nodes_before, *report.copies_before, *report.hoisted, *report.staged):
        assert entry.source_line is not None
        assert "placement_examples.py:" in entry.source_line
        assert " in forward: " in entry.source_line
