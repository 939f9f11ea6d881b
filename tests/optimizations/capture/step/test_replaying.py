"""Replays of a step: how little Python they run, and what they leave."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice, CpuGraph
from step_parts import batches, training_step
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep


def deep_network(layers: int) -> nn.Module:
    torch.manual_seed(5)
    inner = [module for _ in range(layers) for module in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(nn.Linear(8, 16), *inner, nn.Linear(16, 4))


def recorded(step: Callable[..., Any], given: list[tuple[Any, ...]]) -> tuple[GraphedStep, Any]:
    """Return a step that replays these calls, and its recording."""
    graphed = GraphedStep(step, device=CpuDevice())
    for one in given:
        graphed(*one)
    (recording,) = graphed._recorder.recordings.tried
    return graphed, recording


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the names of the functions that are called in the block, in Python and in C."""
    names: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001, fused=True),
}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_replay_compares_many_modules_in_as_few_calls(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are compared and put one by one; all else in bulk."""
    monkeypatch.setattr(CpuGraph, "replay", lambda graph: None)
    given, found = batches("cpu", 9), []
    for layers in (1, 30):
        model = deep_network(layers)
        graphed, recording = recorded(training_step(model, OPTIMIZERS[optimizer](model.parameters())), given)
        tensors = list(given[0][0].values())
        with counted() as names:
            assert recording.arguments.tensors_of(given[0], {}) is not None and recording.watch.unchanged()
        assert len(tensors) == 2 and graphed.report().replays > 0
        found.append(names)
    assert len(found[1]) <= len(found[0]) + 1, "states of many parameters are compared in turn, which is one call more"


def test_tensor_passed_twice_is_not_replayed() -> None:
    given = [(torch.ones(3) * index, torch.ones(3)) for index in range(6)]
    graphed, recording = recorded(lambda x, y: (x + 2 * y).sum(), given)
    replays = recording.replays
    assert graphed(given[1][0], given[1][0]).item() == 9 and recording.replays == replays


def test_interrupted_call_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, interrupts = CpuGraph.replay, [False]

    def replay(graph: CpuGraph) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt
        stock(graph)

    monkeypatch.setattr(CpuGraph, "replay", replay)
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, _ = recorded(lambda x: x.sum(), given)
    for index in (5, 2, 5):
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            graphed(*given[index])
        interrupts[0] = False
        for other in (3, 5, index, index):
            assert graphed(*given[other]).item() == 3 * other


def test_step_without_references_is_freed_at_once() -> None:
    graphed, recording = recorded(lambda x: x.sum(), [(torch.ones(3) * index,) for index in range(6)])
    graph = weakref.ref(recording.graph)
    gc.collect()
    gc.disable()
    try:
        del graphed, recording
        assert graph() is None
    finally:
        gc.enable()


def test_equal_number_in_another_object_is_no_change() -> None:
    held = {"scale": float("2.5")}
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: (x * held["scale"]).sum(), given)
    replays = recording.replays
    for _ in range(3):
        held["scale"] = float("2.5")
        assert graphed(*given[1]).item() == 7.5
    assert recording.replays == replays + 3
    held["scale"] = 3.0
    assert graphed(*given[1]).item() == 9


class Masked(nn.Module):
    """Layers that each keep the mask of the last call, as BERT's do."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        for layer in self.layers:
            layer.mask = mask
            x = layer(x * layer.mask)
        return x.sum()


MASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda mask: mask[:1],
    "dtype": lambda mask: mask.float(),
    "nothing": lambda mask: None,
    "no tensor": lambda mask: "mask",
}


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("name", MASKS)
def test_attribute_bound_to_a_result_is_compared_by_kind(name: str, index: int) -> None:
    torch.manual_seed(3)
    model = Masked(5)
    given = [(torch.randn(3, 4),) for _ in range(8)]
    graphed, recording = recorded(lambda x: model(x).detach(), given)
    layer = model.layers[index]
    layer.mask = layer.mask.clone()  # another one of its kind
    replays = recording.replays
    graphed(*given[0])
    assert recording.replays == replays + 1
    layer.mask = MASKS[name](layer.mask)
    expected = Masked(5)
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(graphed(*given[1]), expected(*given[1]).detach())
    assert recording.replays == replays + 1
    assert all(torch.equal(layer.mask, given[1][0] > 0) for layer in model.layers)
