"""Callables with work that a graph cannot repeat are refused by name, and nothing of the attempt remains."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from callable_parts import Scaled, batches, graphed, same
from step_refusals import Store
from torch import nn
from torch.nn import functional

from optimizations.capture.step.observer import StepRefused


def pops(x: torch.Tensor, batch: Any) -> torch.Tensor:
    found: torch.Tensor = x * batch.pop("y")
    return found


def appends(x: torch.Tensor, results: list[Any]) -> torch.Tensor:
    results.append(x * 2)
    return x * 2


def renormalizes(x: torch.Tensor, linear: nn.Linear) -> Any:
    linear.weight.data = torch.renorm(linear.weight.data, 2, 0, 0.1)
    return linear(x)


def trains(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    loss = linear(x).square().sum()
    loss.backward()
    return loss.detach()


NOISE = torch.Generator()


class Draws:
    def __init__(self) -> None:
        self.noise = NOISE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(3, generator=self.noise)


def draws_again(x: torch.Tensor) -> torch.Tensor:
    state = torch.cuda.get_rng_state()
    found = functional.dropout(x, 0.5)
    torch.cuda.set_rng_state(state)
    return found


def seeds(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(3)
    return x + torch.randn(3)


class Flips:
    """Alternate between two behaviours without any state that can be compared."""

    def __init__(self) -> None:
        self.at = iter(range(1000)).__next__

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.at() % 2 else x + 1


REFUSALS: dict[str, tuple[Callable[[], Any], tuple[Any, ...], str]] = {
    "an argument is popped": (lambda: pops, ({"y": torch.ones(3)},), "changes a container that it is given"),
    "an argument grows": (lambda: appends, ([],), "changes a container that it is given"),
    "an argument with a gradient is written": (lambda: nn.ReLU(inplace=True), (), "writes into an argument"),
    "a cache among the arguments is written": (
        lambda: lambda x, cache: x * cache.add_(1),
        (torch.zeros(3),),
        "writes into an argument",
    ),
    "Python's random numbers": (
        lambda: lambda x: x * random.random(),
        (),
        r"draws random .*\(random\).* before the call .*host_draws='unused'",
    ),
    "no run is like the one before": (Flips, (), "differs in two calls with equal shapes"),
    "a weight's memory is exchanged": (
        lambda: functools.partial(renormalizes, linear=nn.Linear(3, 3)),
        (),
        r"changes .*weight itself \(its requires_grad, shape or memory\)",
    ),
    "a backward inside": (
        lambda: functools.partial(trains, linear=nn.Linear(3, 3)),
        (),
        r"changes the `\.grad` of a parameter",
    ),
    "a generator of its own": (Draws, (), "reads from an iterator or a random generator, callable 1.noise"),
    "a generator is seeded": (lambda: seeds, (), "seeds a generator of random numbers, or sets its state"),
    "random numbers drawn again": (lambda: draws_again, (), "keeps the GPU's random state"),
    "a sparse gradient": (lambda: Sparse(), (), "computes a sparse gradient"),
    "a result of before": (lambda: Older(torch.exp), (), "takes part in differentiation and was computed before"),
    "one of a custom function": (lambda: Older(Doubling.apply), (), "takes part in differentiation and was computed"),
    "an attribute is bound": (lambda: Binds(), (), "hidden is bound to another tensor"),
    "an object is returned": (lambda: lambda x: [Draws(), x * 2], (), "callable 1 returns a Draws"),
    "TorchScript": (lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(3)), (), "uses a module of TorchScript"),
    "a value is read on the host": (lambda: lambda x: x * x.sum().item(), (), "reads a value of the GPU on the host"),
    "hooks on itself": (lambda: hooked(), (), "callable 1 has hooks on itself"),
    "a hook inside keeps a gradient": (lambda: hooked_inside(), (), r"kept has . members instead of"),
    "compiled in place": (lambda: in_place(), (), "is compiled in place"),
    "a result of a subclass": (
        lambda: lambda x: (x, Scaled(x.detach(), x.detach())),
        (),
        "callable 1 returns a Scaled",
    ),
    "a sparse result": (lambda: torch.Tensor.to_sparse, (), r"returns a tensor of layout torch\.sparse_coo"),
    "a sparse argument": (
        lambda: lambda x, y: x * 2,
        (torch.eye(3).to_sparse_csr(),),
        "callable 1 is given a sample of which tensor 1 is not a dense tensor",
    ),
    "a nested argument": (
        lambda: lambda x, y: x * 2,
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),),
        "tensor 1 is a nested tensor",
    ),
    "an argument that cannot be copied": (
        lambda: lambda x, batch: batch["x"] * x,
        (Store({"x": torch.ones(3)}),),
        "is given an object of a class of which no copy can be made",
    ),
    "a parameter as argument": (
        lambda: torch.mul,
        (nn.Parameter(torch.ones(3)),),
        "tensor 1 is a Parameter; pass plain tensors; reach a parameter by its",
    ),
}


class SetsUp(nn.Module):
    """Sets itself up in its first call. A warm-up must not run instead of that call."""

    mean: torch.Tensor

    def __init__(self, set_up: Callable[[SetsUp, torch.Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.made: Any = torch.zeros(3)
        self.scale, self.ready, self.set_up = 0.5, False, set_up

    def forward(self, x: torch.Tensor) -> Any:
        if not self.ready:
            self.set_up(self, x.detach())
            self.ready = True
        return (x - self.mean - self.made) * self.scale


@pytest.mark.parametrize(
    ("set_up", "name"),
    [
        (lambda module, x: module.mean.fill_(2.0), "ready"),
        (lambda module, x: setattr(module, "made", x.mean(0) * 2), "made"),
        (lambda module, x: setattr(module, "scale", float(x.abs().max())), "scale"),
    ],
)
def test_module_that_initializes_itself_is_refused_until_it_did(set_up: Any, name: str) -> None:
    module, reference = SetsUp(set_up), SetsUp(set_up)
    for is_ready in (False, True):
        if is_ready:
            call = graphed(module, batches(1))
        else:
            with pytest.raises(StepRefused, match=r"sets itself up in its first call.*" + name):
                graphed(module, batches(1))
            assert not module.ready
        x = torch.randn(2, 3)
        assert torch.equal(module(x), reference(x))
    assert call.calls_without_graph == 0


class Binds(nn.Module):
    hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x * 2
        return self.hidden


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table(x.argmax(-1)) * x


class Older(nn.Module):
    """Keeps what was computed of a parameter: its gradient would have to go on from there."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.condition = function(torch.randn(3, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.condition


class Doubling(torch.autograd.Function):
    """Its node has an attribute by the name under which nodes of leaves have their tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = x.detach().clone()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


def hooked() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_forward_hook(lambda module, args, out: out)
    return module


def hooked_inside() -> nn.Module:
    module, kept = nn.Sequential(nn.Linear(3, 3)), list[torch.Tensor]()
    module[0].register_full_backward_hook(lambda module, of_inputs, of_results: kept.append(of_results[0]))
    return module


def in_place() -> nn.Module:
    module = nn.Linear(3, 3)
    module.compile(backend="eager")
    return module


@pytest.mark.filterwarnings("ignore")  # what PyTorch says of sparse and nested tensors
@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_unrepeatable_work_is_refused_without_a_trace(name: str) -> None:
    make, further, words = REFUSALS[name]
    function, x = make(), torch.randn(3, requires_grad=True)
    linear = function.keywords["linear"] if isinstance(function, functools.partial) else nn.Linear(1, 1)
    before = [parameter.detach().clone() for parameter in linear.parameters()]
    state = random.getstate()
    of_torch = [one.get_state() for one in (NOISE, torch.default_generator)]
    cuda = {"get_rng_state": lambda *_: torch.empty(0), "set_rng_state": lambda *_: None}
    with mock.patch.multiple(torch.cuda, **cuda), pytest.raises(StepRefused, match=f"callable 1 .*{words}|{words}"):
        graphed(function, [(x, *further)])
    assert same([*linear.parameters()], before)
    assert all(parameter.grad is None for parameter in linear.parameters())
    assert random.getstate() == state
    assert same([one.get_state() for one in (NOISE, torch.default_generator)], of_torch)
    assert not (isinstance(function, nn.Module) and "forward" in vars(function))


def test_iterator_is_refused_before_it_is_advanced() -> None:
    numbers = itertools.cycle([1.0, 1.0, 1.0, 1.0, 2.0])
    with pytest.raises(StepRefused, match="callable 1 reads from an iterator or a random generator, numbers"):
        graphed(lambda x: x * next(numbers), [(torch.ones(3, requires_grad=True),)])
    assert [next(numbers) for _ in range(5)] == [1.0, 1.0, 1.0, 1.0, 2.0]
