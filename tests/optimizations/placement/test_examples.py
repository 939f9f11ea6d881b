"""Whole programs with CPU values, in inference and training: none of these stays there, and the results are equal."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from placement_examples import WIDTH, DetectionScalars, MaskedBlocks, TimedDenoiser
from simulated_gpu.placement import Traced, bits, graphs_of, retargeted, runner, traced
from threads import in_threads
from torch import nn

import optimizations
from optimizations import compiled_graph, torch_internals
from optimizations.placement import Feeds, Placement


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


@torch.no_grad()
def _traced(example: Example) -> Traced:
    return traced(example.make().eval(), *example.inputs(1), on_cpu=example.on_cpu)


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
    found = _traced(example)
    original, placed = found.original(), found.placed()
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


def test_every_reason_and_value_names_a_program_line() -> None:
    report = _traced(EXAMPLES["timestep"]).placement.report
    for entry in (*report.cpu_nodes_before, *report.copies_before, *report.hoisted, *report.staged):
        assert entry.source_line is not None
        assert "placement_examples.py:" in entry.source_line
        assert " in forward: " in entry.source_line


# Programs whose CPU values depend on more than their operands: surrounding memory, statistics, threads.


CALLS = 4


class Program(nn.Module):
    """`forward` takes `x` on the GPU and `given` on the CPU; `change` writes memory from outside between calls."""

    def given(self, call: int) -> tuple[torch.Tensor, ...]:
        return ()

    def change(self, call: int) -> None:
        pass


class Window(Program):
    """A window of a longer tensor, read around the window; outside of it there are other values in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.arange(40.0)
        self.window = self.whole[5:17].view(4, 3)

    def change(self, call: int) -> None:
        self.whole.numpy()[[1, 4, 20, 25]] += call


class Around(Window):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.window.as_strided((4, 3), (3, 1), 20).to(x.device) + self.window.to(x.device)


class Statistics(Program):
    """Batch norm on the CPU writes its running mean, which the program sent before and sends again after."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = torch.zeros(3), torch.ones(3)

    def given(self, call: int) -> tuple[torch.Tensor, ...]:
        return (torch.arange(12.0).view(4, 3) * (call + 1),)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x + self.mean.to(x.device)
        normalized = F.batch_norm(t, self.mean, self.variance, training=True)
        return before, x + normalized.to(x.device), x + self.mean.to(x.device)


class FixedStatistics(Statistics):
    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normalized = F.batch_norm(t, self.mean, self.variance, training=False)
        return (x + normalized.to(x.device),)


@torch.no_grad()
def program_of(program: Program) -> Traced:
    return traced(program, torch.ones(4, 3), *program.given(0), on_cpu=(1,))


def results(kind: Callable[[], Program], run: Callable[..., Any]) -> list[Any]:
    """Return the results of each call by `run`, with the attributes afterwards."""
    program = kind()
    found = []
    for call in range(CALLS):
        if call:
            program.change(call)
        with torch.no_grad():
            ((_, arguments),) = graphs_of(program, torch.full((4, 3), call + 1.0), *program.given(call))
            found.append(bits([*run(*arguments), *(v for v in vars(program).values() if torch.is_tensor(v))]))
    return found


@pytest.mark.parametrize(
    ("kind", "hoisted"),
    [(Around, 1), (Statistics, 0), (FixedStatistics, 0)],
)
def test_undeclared_reads_and_writes_are_found(kind: Callable[[], Program], hoisted: int) -> None:
    found = program_of(kind())
    assert len(found.placement.report.hoisted) == hoisted
    assert results(kind, found.placed()) == results(kind, found.original())


def test_as_strided_stays_in_the_graph_with_a_reason() -> None:
    assert any("counts places in memory" in left.reason for left in program_of(Around()).placement.report.left)


def test_batch_norm_with_fixed_statistics_runs_before_the_graph() -> None:
    assert "normalized" in program_of(FixedStatistics()).placement.report.before


class Padded(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame = F.pad(torch.ones(2, 1, dtype=torch.bfloat16), (1, 1, 1, 1), value=0.1)
        return x * frame.to(x.device)


class Negative(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.copysign(x, torch.tensor(float("nan")).neg())


@pytest.mark.parametrize("kind", [Padded, Negative])
def test_numbers_that_generated_code_would_change_are_kept(kind: Callable[[], Program]) -> None:
    assert [value.form for value in program_of(kind()).placement.report.hoisted] == ["kept"]


class Scaled(Program):
    def given(self, call: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((4, 3), float(call)),)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * t.to(x.device)


def test_threads_do_not_overwrite_what_another_graph_reads() -> None:
    program = Scaled()
    found = program_of(program)
    assert found.placement.report.staged
    run = runner(found.placement.graph_module, found.placement.example_inputs(found.inputs))
    feeds = Feeds(found.feeds())
    wrong: list[float] = []

    def launched_late(*arguments: Any) -> tuple[Any, ...]:
        time.sleep(0.001)
        return run(*arguments)

    def work(number: int) -> None:
        arguments = tuple(found.arguments(x=torch.ones(4, 3), t=program.given(number)[0]))
        for _ in range(10):
            (result,) = feeds.call(launched_late, arguments)
            wrong.extend({float(value) for value in result.unique()} - {float(number)})

    in_threads(*(functools.partial(work, number) for number in (2, 3, 5)))
    assert wrong == []


# Placement under autograd: gradients, forwards with pending backwards, and AOTAutograd's static inputs.


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


def _arguments(module: nn.Module, seed: int) -> list[torch.Tensor]:
    ((_, arguments),) = graphs_of(module, *_inputs(seed))
    return arguments


def test_attributes_that_require_gradients_are_not_moved() -> None:
    module = Scored()
    module.mask.requires_grad_()
    (left,) = traced(module, *_inputs(0), on_cpu=(1,)).placement.report.left
    assert "self.mask requires a gradient" in left.reason
    assert "mask.to(x.device)" in (left.source_line or "")


@pytest.mark.parametrize("grad", [True, False])
def test_fixed_addresses_reach_autograd_and_inductor(grad: bool) -> None:
    """Stock code up to Inductor, on the CPU: static inputs, gradients and results are correct."""
    with torch.set_grad_enabled(grad):
        scored = traced(Scored(), *_inputs(0), on_cpu=(1,))
        told: list[list[str]] = []

        def compile_inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            if not settings.get("is_backward"):
                told.append([names[index] for index in settings["static_input_idxs"]])
            return _boxed(graph)

        torch.manual_seed(1)
        module = Scored()
        arguments = _arguments(module, 1)
        on_cpu = dataclasses.replace(scored.placement, feeds=scored.feeds())
        compiled = torch_internals.compile_fx.compile_fx(
            retargeted(on_cpu.graph_module), on_cpu.example_inputs(arguments), inner_compile=compile_inner
        )
        feeds = Feeds(scored.feeds())
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


def test_placement_works_through_dynamo_and_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile(backend="encore")` of a training step, placed as for a GPU, with the CPU as the device."""
    scored = traced(Scored(), *_inputs(0), on_cpu=(1,))
    placement = Placement(retargeted(scored.placement.graph_module), scored.feeds(), scored.placement.report)
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
