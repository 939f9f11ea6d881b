"""Programs around graphed callables: settings that change, transforms, hooks, strange weights, schedules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callable_parts import batches, gradients, graphed, same
from callable_programs import differences, drawn, outcome
from simulated_gpu.operators import CpuDevice
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from optimizations.capture.callables.graph_callables import GraphedCallables

RANDOM_PROGRAMS = 30


def plain(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, module.weight, module.bias)


def forward_mode(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, direction: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda function, x: torch.vmap(function)(x.expand(4, 2, 3)),
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).square().sum())(x),
    "forward mode": lambda function, x: forward_mode(function, x, x + 1),
}


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_transforms_use_the_function_and_not_its_graphs(name: str) -> None:
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1))
    x = torch.randn(2, 3)
    expected = TRANSFORMS[name](functools.partial(plain, module), x)
    assert torch.allclose(TRANSFORMS[name](module, x), expected)
    module(x).sum().backward()
    assert [one.replays for one in call.report()] == [1, 1]


def test_dispatch_modes_observe_operators() -> None:
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1))
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 3)).sum().backward()
    assert counter.get_total_flops() > 0
    module(torch.randn(2, 3)).sum().backward()
    assert [one.replays for one in call.report()] == [1, 1]


@pytest.mark.parametrize(
    "hooks", [functools.partial(saved_tensors_hooks, torch.clone, lambda one: one * 2), save_on_cpu], ids=["own", "cpu"]
)
def test_saved_tensor_hooks_run(hooks: Callable[[], Any]) -> None:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(layer.state_dict())
    call = graphed(layer, [torch.ones(2, 4)])
    for module in (layer, other):
        with hooks():
            loss = module(torch.full((2, 4), 2.0)).square().sum()
        loss.backward()
    assert same(gradients(layer), gradients(other))
    assert not any(one.replays for one in call.report())


def test_code_compiled_around_graphed_layers_compiles_them() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    reference = copy.deepcopy(model)
    call = graphed(nn.ModuleList(model), batches(1, requires_grad=True))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for x in batches(3):
        compiled(x).square().sum().backward()
        reference(x).square().sum().backward()
    assert same(gradients(model), gradients(reference))
    assert not any(one.replays for one in call.report())


@pytest.mark.parametrize("concurrency", ["off", "auto"])
def test_compiled_code_in_a_callable_is_not_compiled_anew(concurrency: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend="aot_eager")
    call = graphed(lambda x: compiled(x), batches(1, requires_grad=True), concurrency=concurrency)
    for x in batches(3, requires_grad=True):
        call[0](x).sum().backward()
    assert [one.replays for one in call.report()] == [3, 3]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("within", [False, True])
def test_trace_of_a_graphed_module_contains_the_module(within: bool) -> None:
    module = nn.Linear(3, 3)
    model = nn.Sequential(module, nn.ReLU()) if within else module
    call = graphed(module, batches(1))
    module(*batches(1)).sum().backward()
    traced = torch.jit.trace(model, tuple(batches(1)))
    for x in batches(3):
        assert torch.equal(traced(x), plain(module, x).relu() if within else plain(module, x))
    assert [one.replays for one in call.report()] == [1, 1]


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
def test_random_programs_equal_uncaptured_runs() -> None:
    replays = without = 0
    for seed in range(RANDOM_PROGRAMS):
        expected, _ = outcome(seed, "cpu", None)
        found, group = outcome(seed, "cpu", functools.partial(GraphedCallables, device=CpuDevice()))
        assert not list(differences(found, expected)), (seed, drawn(seed))
        replays += sum(one.replays for one in group.report())
        without += group.calls_without_graph
    assert replays > 10 * RANDOM_PROGRAMS
    assert without < replays
