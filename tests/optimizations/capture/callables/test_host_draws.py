"""Callables that draw random numbers on the host which, by the caller's word, decide nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDeviceWithHost
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step.observer import StepRefused

OWN = random.Random(5)
OWN_TORCH = torch.Generator()


class Dropping(nn.Module):
    """LayerDrop at rate 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if drawn < 0 or random.random() < 0 or OWN.random() < 0 or torch.rand([], generator=OWN_TORCH) < 0:
                continue
            x = layer(x).tanh() + ((drawn < 2) + 1)
        return x


def states() -> list[Any]:
    return [
        *(random.getstate(), OWN.getstate(), numpy.random.get_state()[2]),
        *(torch.random.get_rng_state().tolist(), OWN_TORCH.get_state().tolist()),
    ]


def trained(graphed: bool) -> list[torch.Tensor]:
    model = Dropping()
    inputs = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(7))
    call: Any = model
    if graphed:
        before = states()
        group = graph_callables(model, [(inputs[0],)], device=CpuDeviceWithHost(), host_draws="unused")
        assert states() == before, "what the runs drew is put back"
        assert group.drawn_on_the_host == ("OWN", "OWN_TORCH", "random", "torch's CPU generator")
        call = group[0]
    found = []
    for x in inputs:
        for parameter in model.parameters():
            parameter.grad = None
        result = call(x)
        result.square().sum().backward()
        found += [result.detach().clone(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    if graphed:
        assert states() == before, "launches draw nothing"
        assert group.calls_without_graph == 0 and [one.replays for one in group.report()] == [6, 6]
    return found


def test_callable_with_harmless_draws_equals_eager() -> None:
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(trained(True), trained(False), strict=True))


def test_without_the_callers_word_it_is_refused_and_told_of_it() -> None:
    with pytest.raises(StepRefused, match=r"draws random numbers on the host .* before the call .*host_draws='unused'"):
        graph_callables(Dropping(), [(torch.ones(2, 4),)], device=CpuDeviceWithHost())


class Returning(nn.Module):
    """Keeps what it drew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn = torch.rand([])
        return x * 2

    drawn: torch.Tensor | None = None


SAYS = "that seem to decide something, other than host_draws='unused' says: it "
DECIDE: dict[str, tuple[Callable[..., Any], str]] = {
    "a number": (
        lambda x: x * random.random(),
        f"callable 1 draws random numbers on the host .random. {SAYS}differs in two calls",
    ),
    "a tensor": (lambda x: x * torch.rand([]), rf"\(torch's CPU generator\) {SAYS}differs in two calls"),
    "a tensor that is returned": (lambda x: (x * 2, torch.rand([])), f"{SAYS}returns, or keeps"),
    "a tensor that is kept": (Returning(), f"{SAYS}returns, or keeps|is bound to another tensor"),
}


@pytest.mark.parametrize("name", sorted(DECIDE))
def test_a_draw_whose_value_goes_on_is_refused(name: str) -> None:
    call, words = DECIDE[name]
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(StepRefused, match=words):
        graph_callables(call, [(x,)], device=CpuDeviceWithHost(), host_draws="unused")


class Choosing(nn.Module):
    """Goes on with one of two, by what it draws: nothing else is another."""

    def __init__(self, choose: Callable[[Any, torch.Tensor, bool], Any]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3), torch.ones(3)])
        self.choose = choose

    def forward(self, x: torch.Tensor) -> Any:
        return self.choose(self, x, random.random() < 0.5)


CHOICES: dict[str, Callable[[Any, torch.Tensor, bool], Any]] = {
    "a parameter": lambda self, x, first: x * (self.weights[0] if first else self.weights[1]),
    "what it computed": lambda self, x, first: (x + 1, x + 2)[first] * 2,
    "a result": lambda self, x, first: (x + 1, x + 2)[first],
}


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_choice_among_tensors_of_one_shape_is_seen(name: str) -> None:
    """In its runs before, or while it is captured."""
    refused, x = [], torch.ones(3)
    for number in range(8):
        random.seed(number)
        draws = [random.random() < 0.5 for _ in range(6)]
        random.seed(number)
        try:
            group = graph_callables(Choosing(CHOICES[name]), [(x,)], device=CpuDeviceWithHost(), host_draws="unused")
        except StepRefused as error:
            assert SAYS in str(error)
            refused.append(number)
        else:
            assert draws[1] == draws[2], "of its last two runs"
            assert group.drawn_on_the_host == ("random",)
    assert refused
