"""Programs around graphed callables: settings that change, transforms, hooks, strange weights, schedules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from callable_programs import differences, drawn, outcome
from simulated_gpu.operators import CpuDevice
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step.observer import StepRefused
from tests.optimizations.capture.callables.test_differentiation import batches, gradients, graphed, same

RANDOM_PROGRAMS = 30


class Holder:
    """An object that is none of the kinds that arguments are taken apart into."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale


SETTINGS: dict[str, tuple[Callable[[Any, Any], Any], Any, Callable[[Any], Any]]] = {
    "a number in an object": (lambda x, o: x * o.scale, Holder(2.0), lambda o: setattr(o, "scale", 5.0)),
    "a tensor in an object": (
        lambda x, o: x * o.scale,
        Holder(torch.ones(3)),
        lambda o: setattr(o, "scale", torch.full((3,), 5.0)),
    ),
}


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_tensors_inside_argument_objects_are_compared(name: str) -> None:
    function, held, change = SETTINGS[name]
    held = copy.deepcopy(held)
    call = graphed(function, [(torch.randn(3, requires_grad=True), held)])
    for index in range(4):
        if index == 2:
            change(held)
        x = torch.randn(3, requires_grad=True)
        found = call[0](x, held)
        assert torch.equal(found, function(x, held))
        found.sum().backward()
    assert call.calls_without_graph == 2


def plain(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, module.weight, module.bias)


def forward_mode(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, direction: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda function, x: torch.vmap(function)(x.expand(4, 2, 3)),
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).square().sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x + 1,))[1],
    "jacrev": lambda function, x: torch.func.jacrev(function)(x),
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


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_weights_passed_by_functional_call_are_used() -> None:
    module = nn.Linear(3, 3)
    graphed(module, batches(1))
    weights = {name: torch.ones_like(weight) for name, weight in module.named_parameters()}
    x = torch.randn(2, 3)
    found = torch.func.functional_call(module, weights, (x,))
    assert torch.equal(found, functional.linear(x, weights["weight"], weights["bias"]))


def test_dispatch_modes_observe_operators() -> None:
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1))
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 3)).sum().backward()
    assert counter.get_total_flops() > 0
    module(torch.randn(2, 3)).sum().backward()
    assert [one.replays for one in call.report()] == [1, 1]


def test_saved_tensor_hooks_run_unless_they_offload_to_the_cpu() -> None:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(layer.state_dict())
    graphed = graph_callables([layer], [(torch.ones(2, 4),)], device=CpuDevice())

    def forwards() -> int:
        return sum(one.replays for one in graphed.report() if one.direction == "forward")

    x = torch.full((2, 4), 2.0)
    for module in (layer, other):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one * 2):
            loss = module(x).square().sum()
        loss.backward()
    assert forwards() == 0
    for module in (layer, other):
        with torch.autograd.graph.save_on_cpu():
            module(x).square().sum().backward()
    assert forwards() == 1
    for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)


def forward_only_now_and_then(call: Sequence[Any], batch: Callable[[], torch.Tensor]) -> Iterator[Any]:
    for place in range(6):
        loss = call[1](call[0](batch())).square().sum()
        if place % 3 != 1:
            loss.backward()
        yield loss


def one_callable_now_and_then(call: Sequence[Any], batch: Callable[[], torch.Tensor]) -> Iterator[Any]:
    for place in range(6):
        hidden = call[0](batch())
        loss = (call[1](hidden) if place % 3 != 1 else hidden).square().sum()
        loss.backward()
        yield loss


def two_forwards_then_two_backwards(call: Sequence[Any], batch: Callable[[], torch.Tensor]) -> Iterator[Any]:
    for _ in range(3):
        losses = [call[1](call[0](batch())).square().sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        yield losses[0] + losses[1]


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
@pytest.mark.parametrize(
    "program",
    [
        forward_only_now_and_then,
        one_callable_now_and_then,
        two_forwards_then_two_backwards,
    ],
)
def test_any_order_is_allowed_where_none_is_given(program: Callable[..., Iterator[Any]]) -> None:
    found: list[list[torch.Tensor]] = []
    for graphs in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        call: Any = layers
        if graphs:
            samples = [(torch.ones(2, 4),), (torch.ones(2, 4, requires_grad=True),)]
            call = graph_callables(layers, samples, device=CpuDevice())
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        for result in program(call, lambda: torch.randn(2, 4)):
            gradients = [torch.zeros(()) if one.grad is None else one.grad.clone() for one in parameters]
            found.append([result.detach().clone(), *gradients])
    half = len(found) // 2
    for mine, theirs in zip(found[:half], found[half:], strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert all(
        sum(one.replays for one in call.report() if one.direction == way) >= 3 for way in ("forward", "backward")
    )


def adversarial(generator: Any, critic: Any, seed: int) -> list[torch.Tensor]:
    """The critic has a backward of its own twice, while the generator's is still to come."""
    torch.manual_seed(seed)
    found = []
    parameters = [*generator.parameters(), *critic.parameters()]
    for _ in range(4):
        made = generator(torch.randn(2, 4))
        critic(torch.randn(2, 4).requires_grad_()).square().sum().backward()
        critic(made.detach().requires_grad_()).square().sum().backward()
        critic(made).square().mean().backward()
        found += [made.detach().clone(), *(one.grad.clone() for one in parameters if one.grad is not None)]
        for one in parameters:
            one.grad = None
    return found


def test_callables_without_an_order_do_not_wait_for_each_other() -> None:
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        layers = nn.Linear(4, 4), nn.Linear(4, 4)
        if graphs:
            samples = [(torch.ones(2, 4),), (torch.ones(2, 4, requires_grad=True),)]
            group = graph_callables(list(layers), samples, device=CpuDevice())
        found.append(adversarial(*layers, seed=1))
    assert same(*found) and len(found[0]) == 4 * 5
    assert group.calls_without_graph == 0
    assert [one.replays for one in group.report()] == [4, 4, 12, 12]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_a_graphed_layer(reentrant: bool) -> None:
    found: list[list[torch.Tensor | None]] = []
    for graphs in (False, True):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4)]
        model = nn.Sequential(*layers, nn.GELU())
        if graphs:
            graph_callables(layers[:1], [(torch.ones(2, 4, requires_grad=True),)], device=CpuDevice())
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            loss = checkpoint(model, x, use_reentrant=reentrant).square().sum()
            loss.backward()
            found.append([loss, x.grad, *[parameter.grad for parameter in model.parameters()]])
    for mine, theirs in zip(found[:3], found[3:], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is not None and other is not None and torch.equal(one, other)


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


AROUND: dict[str, Callable[[], Any]] = {
    "another dtype of autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "deterministic": lambda: mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True),
}


@pytest.mark.parametrize("name", sorted(AROUND))
def test_settings_around_a_call_are_part_of_its_key(name: str) -> None:
    module = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = graphed(module, [torch.randn(2, 4)])
        x = torch.randn(2, 4)
        module(x).float().sum().backward()
        assert call.calls_without_graph == 0
        with AROUND[name]():
            found = module(x)
            assert torch.equal(found, plain(module, x))
            assert found.dtype == plain(module, x).dtype
        found.float().sum().backward()
        assert call.calls_without_graph >= (name != "deterministic")


def test_graphs_of_inference_mode_replay_there_only() -> None:
    module = nn.Linear(3, 3).eval()
    with torch.inference_mode():
        call = graphed(module, batches(1))
    x = torch.randn(2, 3)
    for mode, without in ((torch.inference_mode, 0), (torch.no_grad, 1)):
        with mode():
            assert torch.equal(module(x), plain(module, x))
        assert call.calls_without_graph == without


class Scaled(torch.Tensor):
    """Integers and a scale, as quantized weights are kept."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, device=integers.device)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].integers, args[0].scale)
        args = [one.integers * one.scale if isinstance(one, Scaled) else one for one in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_tensors_inside_wrapped_weights_are_compared() -> None:
    module = nn.Linear(3, 3)
    weight = Scaled(torch.randint(-5, 5, (3, 3)), torch.tensor(0.5))
    module.weight = nn.Parameter(weight, requires_grad=False)
    held: Any = module.weight
    call = graphed(module, batches(1, requires_grad=True))
    for index, x in enumerate(batches(4, requires_grad=True)):
        if index == 1:
            held.scale.fill_(0.25)  # the graph reads it
        if index == 2:
            held.scale = torch.tensor(2.0)
        found = module(x)
        assert torch.equal(found, functional.linear(x, held.integers * held.scale, module.bias))
        found.sum().backward()
        assert call.calls_without_graph == max(0, index - 1)


@pytest.mark.parametrize(
    "make", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrized_weights_are_computed_on_every_call(make: Callable[[nn.Module], nn.Module]) -> None:
    module = make(nn.Linear(3, 3))
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1))
    for x in batches(3):
        for one in (module, reference):
            one(x).square().sum().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(0.1)
    assert same(gradients(module), gradients(reference))
    assert call.calls_without_graph == 0


def test_own_generator_advances_as_in_eager() -> None:
    generator = torch.Generator().manual_seed(1)
    other = torch.Generator().manual_seed(1)
    call = graphed(lambda x: x * torch.rand(3, generator=generator), batches(1, requires_grad=True))
    for x in batches(3, requires_grad=True):
        found = call[0](x)
        assert torch.equal(found, x * torch.rand(3, generator=other))
        found.sum().backward()
    assert call.calls_without_graph == 0


AROUND_A_MODULE: dict[str, Callable[[nn.Module], Any]] = {
    "before the forward": lambda module: module.register_forward_pre_hook(lambda one, given: (given[0] * 2,)),
    "after the forward": lambda module: module.register_forward_hook(lambda one, given, result: result + 1),
    "before the backward": lambda module: module.register_full_backward_pre_hook(lambda one, slopes: (slopes[0] / 2,)),
    "after the backward": lambda module: module.register_full_backward_hook(lambda one, found, of: (found[0] * 3,)),
}


@pytest.mark.parametrize("name", sorted(AROUND_A_MODULE))
def test_hooks_added_to_a_graphed_module_run_around_its_graphs(name: str) -> None:
    module = Normalized(lambda layer: layer)
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1, requires_grad=True))
    handles = []
    for index, x in enumerate(batches(6, requires_grad=True)):
        if index == 2:
            handles = [AROUND_A_MODULE[name](one) for one in (module, reference)]
        if index == 4:
            handles = [handle.remove() for handle in handles]
        slopes, found = [], []
        for one in (module, reference):
            given = x.detach().requires_grad_()
            found.append(one(given))
            found[-1].square().sum().backward()
            slopes.append(given.grad)
        assert same(found[:1], found[1:]) and same(slopes[:1], slopes[1:])
    assert same(gradients(module), gradients(reference))
    assert call.calls_without_graph == 0


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_hooks_of_a_callable_belong_to_its_caller() -> None:
    inner = nn.Linear(3, 3)
    call = graphed([nn.Sequential(inner, nn.Tanh()), inner], [(torch.randn(2, 3, requires_grad=True),)] * 2)
    inner.register_forward_hook(lambda module, given, result: result + 1)
    for x in batches(2, requires_grad=True):
        whole = call[0](x)
        assert torch.equal(whole, (plain(inner, x) + 1).tanh())
        whole.sum().backward()
    assert [one.replays for one in call.report() if one.direction == "forward"] == [0, 2]


class Normalized(nn.Module):
    """With a layer whose weight a hook computes before each forward."""

    def __init__(self, normalize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = normalize(nn.Linear(3, 3)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.outer(self.inner(x).tanh())


def scaled(layer: nn.Module, scale: list[float]) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    layer.register_forward_hook(lambda module, args, result: result * scale[0])
    return layer


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_hooks_on_inner_modules_and_their_state_are_compared() -> None:
    found = []
    for graphs in (False, True):
        scale = [2.0]
        module = Normalized(functools.partial(scaled, scale=scale))
        if graphs:
            call = graph_callables([module], [torch.randn(2, 3)], device=CpuDevice())
        torch.manual_seed(1)
        handle = None
        for index in range(6):
            if index == 2:
                scale[0] = 3.0
            if index == 3:
                scale[0] = 2.0
                handle = module.outer.register_forward_hook(lambda module, args, result: result * 5)
            if index == 5 and handle is not None:
                handle.remove()
            found.append(module(torch.randn(2, 3)).detach().clone())
    assert same(found[:6], found[6:])
    assert call.calls_without_graph == 3


def test_backward_hooks_on_inner_modules_are_refused() -> None:
    module = Normalized(lambda layer: layer)
    module.inner.register_full_backward_hook(lambda module, of_inputs, of_results: None)
    with pytest.raises(StepRefused, match=r"callable 1 has hooks of the backward on .*\.inner"):
        graph_callables([module], [torch.randn(2, 3)], device=CpuDevice())


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
def test_random_programs_equal_uncaptured_runs() -> None:
    replays = without = 0
    for seed in range(RANDOM_PROGRAMS):
        expected, _ = outcome(seed, "cpu", None)
        found, group = outcome(seed, "cpu", functools.partial(graph_callables, device=CpuDevice()))
        assert not list(differences(found, expected)), (seed, drawn(seed))
        replays += sum(one.replays for one in group.report())
        without += group.calls_without_graph
    assert replays > 10 * RANDOM_PROGRAMS
    assert without < replays
