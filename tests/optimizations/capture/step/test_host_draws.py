"""Steps may draw random numbers on the host if the caller declares them unused: `host_draws="unused"`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDeviceWithHost
from step_parts import Graph, assert_as_eager, batches, network

import optimizations
from optimizations.capture.step.graphed_step import GraphedStep

Step = Callable[[dict[str, torch.Tensor]], Any]

DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "a tensor of rank 0": (lambda: torch.rand([]), "torch's CPU generator"),
    "Python": (lambda: random.random(), "random"),
    "NumPy": (lambda: numpy.random.rand(), "numpy.random"),
}


def seed(number: int = 3) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def layer_drop(draw: Callable[[], Any], rate: float = 0.0) -> tuple[Step, torch.nn.Module]:
    """Draw a number before each layer and branch on it, as Hugging Face's models do in training."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        x = batch["x"]
        for layer in model.children():
            if draw() < rate:
                x = x * 2
            x = layer(x)
        loss = torch.nn.functional.cross_entropy(x, batch["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def outcome(step: Step, model: torch.nn.Module) -> list[torch.Tensor]:
    seed()
    losses = [step(*batch) for batch in batches("cpu")]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("host_draws", ["unused", "refused"])
@pytest.mark.parametrize("name", sorted(DRAWS))
def test_harmless_host_draws_must_be_declared(name: str, host_draws: str) -> None:
    draw, generator = DRAWS[name]
    device = CpuDeviceWithHost()

    def program(graph: Graph) -> list[torch.Tensor]:
        step, model = layer_drop(draw)
        return outcome(graph(step), model)

    report = assert_as_eager(program, device, host_draws=host_draws)
    if host_draws == "unused":
        assert (report.refusals, report.replays, device.captures, device.broken) == ((), 9 - 3, 1, 0)
    else:
        assert f"draws random numbers on the host ({generator}" in report.refusals[0].reason.replace("layer_drop.", "")
        assert "say so with host_draws='unused'" in report.refusals[0].advice
        assert report.replays == 0


def test_launches_do_not_advance_host_generators() -> None:
    def draw() -> float:
        return torch.rand([]).item() + random.random() + float(numpy.random.rand())

    plain, _ = layer_drop(draw)
    step = GraphedStep(plain, device=CpuDeviceWithHost(), host_draws="unused")

    def states() -> list[Any]:
        return [random.getstate(), numpy.random.get_state()[2], torch.random.get_rng_state().tolist()]

    seed()
    found = []
    for batch in batches("cpu"):
        step(*batch)
        found.append(states())
    eager, _ = layer_drop(draw)
    seed()
    expected = []
    for batch in batches("cpu")[:4]:
        eager(*batch)
        expected.append(states())
    assert found[:4] == expected, "calls that run as they are, or are recorded, draw as in eager"
    assert all(one == found[3] for one in found[4:])


def scales_in_place(x: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand([])
    drawn.mul_(3)
    return x * drawn


RETURNS = "draws random numbers on the host, and returns a CPU tensor"
DIFFERS = "differs in two calls with equal shapes"
DECIDE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a number": (lambda x: x * random.random(), f"{DIFFERS}: one ran mul"),
    "a tensor": (lambda x: x * torch.rand([]), f"{DIFFERS}: one ran mul"),
    "what is computed of a tensor": (lambda x: x * (torch.rand([]) + 1).sqrt(), DIFFERS),
    "a tensor that is written": (scales_in_place, DIFFERS),
    "many values": (lambda x: x[torch.rand(40).argsort()[:3] % 3], "index reads a CPU tensor"),
    "a value that is read": (lambda x: x * torch.rand([]).item(), DIFFERS),
    "a number that is returned": (lambda x: (x * 2, random.random()), "returns something else than a tensor"),
    "a tensor that is returned": (lambda x: (x * 2, torch.rand([])), RETURNS),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(DECIDE))
def test_host_draw_that_is_used_is_refused(name: str) -> None:
    plain, words = DECIDE[name]
    device = CpuDeviceWithHost()

    def program(graph: Graph) -> list[str]:
        seed()
        step = graph(plain)
        return [repr(step(torch.full((3,), float(index)))) for index in range(8)]

    report = assert_as_eager(program, device, host_draws="unused")
    assert words in report.refusals[0].reason
    assert (report.replays, device.captures, report.eager_calls) == (0, 0, 8)


def test_host_draws_option_is_validated_and_copied() -> None:
    words = "host_draws='used' is unknown; allowed are 'refused', 'unused'"
    with pytest.raises(ValueError, match=words):
        optimizations.graph_step(layer_drop, host_draws="used")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        optimizations.graph_callables(torch.nn.Linear(2, 2), [], host_draws="used")  # type: ignore[arg-type]
    step = optimizations.graph_step(host_draws="unused")(SimpleNamespace)
    assert step._options.host_draws == "unused"
    assert copy.deepcopy(step)._options.host_draws == "unused"
