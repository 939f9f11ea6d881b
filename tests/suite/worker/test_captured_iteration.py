"""Modes `step`, `callables` and `by-hand` of the suite: checked and timed iterations are captured, or say why not."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice, CpuDeviceWithHost
from tiny_cells import cell
from tiny_workloads import WholeCell, instance_of, without_dropout

import optimizations
from models import registry
from models.instance import Instance, instantiate
from models.nests import map_tensors
from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.step.graphed_step import GraphedStep
from suite.measure import launches
from suite.measure.iteration import iteration
from suite.measure.metrics import PreparedCell
from suite.measure.metrics.floor import METRIC
from suite.measure.modes import MODES
from suite.results.schema import Copies, Status
from suite.worker.captured_iteration import captured_iteration
from suite.worker.main import failure
from suite.worker.protocol import Measure, Unsupported

__all__ = ["cell"]

CAPTURING = ("step", "callables")
ALL = (*CAPTURING, "by-hand")


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Reads(Mlp):
    """Decides by a value, which no graph repeats."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Captures are made of CPU operators; the graphs there are."""
    device = CpuDevice()
    monkeypatch.setattr(optimizations, "graph_step", functools.partial(GraphedStep, device=device))
    monkeypatch.setattr(optimizations, "graph_callables", functools.partial(GraphedCallables, device=device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", device.new_graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: device.capturing(graph, device.new_pool()))
    yield device.graphs


@pytest.fixture
def training_cell(cell: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the cell of a module that trains, in a mode whose module is not compiled."""

    def make(build: Any, mode: str, **fields: Any) -> WholeCell:
        monkeypatch.setitem(MODES, mode, replace(MODES[mode], backend=None))
        options = {"task": "training", "loss": loss, "optimizer": "sgd", **fields}
        made: WholeCell = cell(build, mode, spec={"with_optimizer": True, "warm_up": 2}, **options)
        return made

    return make


@pytest.mark.parametrize("mode", ALL)
def test_checked_and_timed_iterations_are_captured(
    mode: str, training_cell: Any, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = training_cell(Mlp, mode)
    prepared = live.prepare()
    assert prepared.correctness.passed
    assert prepared.correctness.compared_tensors == 1 + 1 + 4  # the output, the loss, the gradients
    of_iteration = 2 if mode == "callables" else 1
    assert all(graph.freed for graph in graphs[:-of_iteration])  # those that were checked
    before = sum(graph.replays for graph in graphs)
    weights = [parameter.detach().clone() for parameter in live._program.instance.module.parameters()]
    block = live.measure(Measure(index=0, turn=0, samples=4, lead_in=1))
    launched = sum(graph.replays for graph in graphs) - before
    assert launched == of_iteration * (4 + 1) and len(block.host_us) == 4
    assert not any(torch.equal(a, b) for a, b in zip(weights, live._program.instance.module.parameters(), strict=True))
    monkeypatch.setattr(live._compilation, "mode", replace(live._compilation.mode, backend="inductor"))
    # The batch, and for callables the gradient of the loss too.
    placeholders = {"callables": (4 * 8 * 4 + 4, 2)}.get(mode, (4 * 8 * 4, 1))
    assert live.once._placeholder_copies() == Copies(
        placeholder_bytes=placeholders[0], placeholder_tensors=placeholders[1], pointer_bytes=0
    )
    # No tree of CUDA graphs holds them.
    counted = live.once.take("metrics").graphs
    assert counted is not None and counted.cuda_graphs == sum(not graph.freed for graph in graphs) == of_iteration


@pytest.mark.parametrize("mode", CAPTURING)
def test_floor_of_a_captured_iteration_is_its_graphs_only(
    mode: str, training_cell: Any, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = training_cell(Mlp, mode)
    live.prepare()
    live.measure(Measure(index=0, turn=0, samples=8, lead_in=1))  # its launches are steady
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type(graphs[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(launches, "least_graph", lambda: lambda: None)
    device: Any = SimpleNamespace(type="cuda")
    others_s = 0.02  # of the iteration apart from its graphs, far above what they take

    def iterate(*arguments: Any) -> Any:
        time.sleep(others_s)
        return live._compilation.iterate_set(*arguments)

    found = METRIC.values(PreparedCell(iterate, device, MODES[mode]))
    assert found["graphs"] == (1 if mode == "step" else 2)
    floor_us, whole_us = found["floor_us"], found["whole_us"]
    assert floor_us is not None and whole_us is not None and 0 < floor_us < others_s * 1e6 <= whole_us


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("mode", ALL)
def test_uncapturable_program_is_unsupported_with_a_reason(mode: str, training_cell: Any, graphs: list[Any]) -> None:
    reason = "cannot be captured by hand" if mode == "by-hand" else "reads a value of the GPU on the host"
    with pytest.raises(Unsupported, match=reason) as raised:
        training_cell(Reads, mode).prepare()
    assert failure(raised.value, "warm-up").status is Status.UNSUPPORTED
    assert not any(graph.replays for graph in graphs)


class Draws(Mlp):
    """As LayerDrop does at rate 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if random.random() < 0 else 1)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("mode", CAPTURING)
def test_harmless_host_draws_are_captured_where_declared(mode: str, training_cell: Any, graphs: list[Any]) -> None:
    with pytest.raises(Unsupported, match="draws random numbers on the host"):
        training_cell(Draws, mode).prepare()
    assert not any(graph.replays for graph in graphs)
    assert training_cell(Draws, mode, host_draws_unused=True).prepare().correctness.passed
    assert any(graph.replays for graph in graphs)


def trained(kind: str, instance: Instance, outputs: bool) -> list[torch.Tensor]:
    """Return losses, outputs and trained parameters of six iterations: in a mode, or "plain"."""
    optimizer = instance.optimizer()
    run: Any = iteration(instance, instance.module, marks_steps=False, optimizer=optimizer)
    if kind != "plain":
        run = captured_iteration(MODES[kind], instance, instance.module, optimizer=optimizer, outputs=outputs)
    outcomes = [map_tensors(run(instance.inputs(index)), torch.clone) for index in range(6)]
    if kind != "plain":
        run.require_replays()
        assert kind == "by-hand" or outputs or all(outcome.output is None for outcome in outcomes)
    kept = [outcome.loss for outcome in outcomes] + [outcome.output for outcome in outcomes if outputs]
    return [tensor.detach() for tensor in [*kept, *instance.module.parameters()]]


@pytest.mark.parametrize("acronym", ["BSCG", "STCLM"])
def test_layer_drop_models_train_in_graphs_as_in_eager(acronym: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kind in ("plain", *CAPTURING):
        device = CpuDeviceWithHost()
        monkeypatch.setattr(optimizations, "graph_step", functools.partial(GraphedStep, device=device))
        monkeypatch.setattr(optimizations, "graph_callables", functools.partial(GraphedCallables, device=device))
        instance = instantiate(registry.find(acronym), variant="published", size="tiny", device="cpu", seed=0)
        without_dropout(instance.module)
        found.append(trained(kind, instance, outputs=False))
    for captured in found[1:]:
        assert all(torch.equal(*both) for both in zip(captured, found[0], strict=True))


@pytest.mark.parametrize("outputs", [True, False])
def test_capturing_modes_train_as_the_plain_iteration(outputs: bool, graphs: list[Any]) -> None:
    plain, *found = (
        trained(kind, instance_of(Mlp, task="training", loss=loss, optimizer="sgd"), outputs)
        for kind in ("plain", *ALL)
    )
    for captured in found:
        assert all(map(torch.equal, captured, plain))


@pytest.mark.parametrize("mode", ALL)
def test_captured_iteration_refuses_inference(mode: str) -> None:
    instance = instance_of(Mlp)
    with pytest.raises(Unsupported, match="this workload is for inference"):
        captured_iteration(MODES[mode], instance, instance.module)


class Cached:
    """As a cache of keys and values: an object that holds tensors."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = [keys]


class Decoder(Mlp):
    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": super().forward(x), "cache": Cached(x * 2), "length": 3}


@pytest.mark.parametrize("mode", CAPTURING)
def test_outputs_may_contain_objects_and_belong_to_their_call(mode: str, graphs: list[Any]) -> None:
    instance = instance_of(Decoder, task="training", loss=lambda output: output["logits"].square().mean())
    run = captured_iteration(MODES[mode], instance, instance.module)
    outcomes = [run(instance.inputs(index)) for index in range(6)]
    run.require_replays()
    for index, outcome in enumerate(outcomes):
        (x,) = instance.inputs(index).args
        assert torch.equal(outcome.output["cache"].keys[0], x * 2)
        assert torch.equal(outcome.output["logits"], instance.module(x)["logits"])
        assert outcome.output["length"] == 3
