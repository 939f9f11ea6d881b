"""Programs around callables compute the same with graphs as without: results, gradients, and what the user keeps."""

from __future__ import annotations

import collections
import functools
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from callable_parts import (
    AddsItself,
    Buffered,
    Halves,
    ReturnsOwnTensors,
    Scaled,
    Skips,
    batches,
    gradients,
    graphed,
    same,
)
from simulated_gpu.operators import CpuDeviceWithHost
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

Run = Callable[[Sequence[Any]], Iterator[torch.Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Hold a program, which yields tensors to compare. Each run makes its own callables.

    `samples` are arguments of each callable, `without` is how many calls run without graphs.
    """

    make: Callable[[], Sequence[Any]]
    run: Run
    samples: Callable[[Sequence[Any]], Sequence[Any]] = lambda made: [tuple(batches(1)) for _ in made]
    without: int = 0
    order: Sequence[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_replayed: bool = True


def with_gradients(made: Sequence[Any]) -> Sequence[Any]:
    return [tuple(batches(1, requires_grad=True)) for _ in made]


def linear() -> list[nn.Module]:
    return [nn.Linear(3, 3)]


def train(made: Sequence[Any], count: int = 3, *, requires_grad: bool = False) -> Iterator[Any]:
    """Run forwards and backwards of the first callable."""
    for x in batches(count, requires_grad=requires_grad):
        result = made[0](x)
        result.square().sum().backward()
        yield from (result.detach().clone(), x.grad)
        del result  # hooks of a module make it a view


def train_inputs(made: Sequence[Any]) -> Iterator[Any]:
    return train(made, requires_grad=True)


# Ways to compute gradients.


def by_autograd_grad(made: Sequence[Any]) -> Iterator[Any]:
    """Call `torch.autograd.grad` while gradients exist already."""
    made[0](*batches(1)).sum().backward()
    for x in batches():
        yield from torch.autograd.grad(made[0](x).square().sum(), list(made[0].parameters()))


def of_some_parameters(made: Sequence[Any]) -> Iterator[Any]:
    for x in batches():
        made[0](x).square().sum().backward(inputs=[made[0].bias])
        yield made[0].bias.grad.clone()


def thrown_away_and_kept(made: Sequence[Any]) -> Iterator[Any]:
    for index, x in enumerate(batches(4)):
        made[0](x).square().sum().backward()
        yield from gradients(made[0])
        made[0].zero_grad(set_to_none=index % 2 == 0)


def used_elsewhere_too(made: Sequence[Any]) -> Iterator[Any]:
    for x in batches():
        (made[0](x).square().sum() + made[0].weight.square().sum()).backward()
        yield made[0].weight.grad.clone()


def adversarial(made: Sequence[Any]) -> Iterator[Any]:
    """The critic has a backward of its own twice, while the generator's is still to come."""
    generator, critic = made
    for _ in range(4):
        result = generator(*batches(1))
        critic(*batches(1, requires_grad=True)).square().sum().backward()
        critic(result.detach().requires_grad_()).square().sum().backward()
        critic(result).square().mean().backward()
        yield result.detach().clone()
        yield from gradients(generator, critic)
        generator.zero_grad(), critic.zero_grad()


def one_forward_without_a_backward(made: Sequence[Any]) -> Iterator[Any]:
    """The first callable is also called without the second."""
    for place, x in enumerate(batches()):
        hidden = made[0](x)
        loss = (made[1](hidden) if place != 2 else hidden).square().sum()
        if place != 1:
            loss.backward()
        yield loss.detach().clone()


def two_forwards_then_two_backwards(made: Sequence[Any]) -> Iterator[Any]:
    for _ in range(3):
        losses = [made[1](made[0](x)).square().sum() for x in batches(2)]
        for loss in losses:
            loss.backward()
        yield from (loss.detach().clone() for loss in losses)


# Hooks.


KEPT: list[torch.Tensor] = []
"""Gradients that hooks keep, and a weight, outside of what a callable reaches."""


def hooked_parameter(kind: str) -> list[nn.Linear]:
    """Hooks from before the capture must not run in the graph as well: they would run twice."""
    module = nn.Linear(3, 3)
    KEPT.clear()
    if kind == "changes":
        module.weight.register_hook(lambda gradient: gradient * 2)
    elif kind == "keeps":
        module.weight.register_hook(KEPT.append)
    elif kind == "after":
        module.weight.register_post_accumulate_grad_hook(lambda one: KEPT.append(one.grad.clone()))  # type: ignore[union-attr]
    else:
        node: Any = module.weight.view_as(module.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_prehook(lambda found: KEPT.append(found[0]))
        NODES.append(node)
    return [module]


NODES: list[Any] = []
"""Kept alive, and with them their hooks."""


def hooked(made: Sequence[Any]) -> Iterator[Any]:
    assert KEPT == []  # no warm-up run called them
    yield from train(made)
    yield from KEPT


class Normalized(nn.Module):
    """With a layer that has hooks or parametrizations."""

    def __init__(self, normalize: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.inner, self.outer = normalize(nn.Linear(3, 3)), nn.Linear(3, 3)
        self.scale = [2.0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.outer(self.inner(x).tanh())


AROUND_A_MODULE: dict[str, Callable[[nn.Module], Any]] = {
    "before the forward": lambda module: module.register_forward_pre_hook(lambda one, given: (given[0] * 2,)),
    "after the forward": lambda module: module.register_forward_hook(lambda one, given, result: result + 1),
    "before the backward": lambda module: module.register_full_backward_pre_hook(lambda one, slopes: (slopes[0] / 2,)),
    "after the backward": lambda module: module.register_full_backward_hook(lambda one, found, of: (found[0] * 3,)),
}


def hooked_for_a_while(made: Sequence[Any], name: str) -> Iterator[Any]:
    """Hooks added to a graphed module run around its graphs."""
    yield from train(made, 2, requires_grad=True)
    handle = AROUND_A_MODULE[name](made[0])
    yield from train(made, 2, requires_grad=True)
    handle.remove()
    yield from train(made, 2, requires_grad=True)


def hooked_inside() -> list[nn.Module]:
    module = Normalized()
    module.inner.register_forward_pre_hook(lambda one, given: (given[0] + 1,))
    module.inner.register_forward_hook(lambda one, given, result: result * module.scale[0])
    module.inner.register_full_backward_pre_hook(lambda one, slopes: (slopes[0] * 3,))
    return [module]


def changed_inside(made: Sequence[Any]) -> Iterator[Any]:
    """Hooks on inner modules, and their state, are compared."""
    yield from train(made, 2)
    made[0].scale[0] = 3.0
    yield from train(made, 1)
    made[0].scale[0] = 2.0
    handle = made[0].outer.register_forward_hook(lambda module, args, result: result * 5)
    yield from train(made, 2)
    handle.remove()
    yield from train(made, 1)


class Unused(nn.Module):
    """One of its parameters and one of its arguments have no part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
        KEPT.clear()
        self.unused.weight.register_hook(KEPT.append)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.used(x) + y.detach()  # type: ignore[no-any-return]


def without_a_gradient(made: Sequence[Any]) -> Iterator[Any]:
    for _ in range(2):
        x, y = batches(2, requires_grad=True)
        y.register_hook(KEPT.append)
        made[0](x, y).square().sum().backward()
        yield from (x.grad, y.grad)
    assert KEPT == [], "hooks without a gradient are not called"


# Results.


def some_results(made: Sequence[Any]) -> Iterator[Any]:
    """An optimizer leaves parameters of unused results as they are, weight decay and momentum included."""
    (module,) = made
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for uses in ([0], [1], [0], [0, 1], [0]):
        x, y = batches(2, requires_grad=True)
        optimizer.zero_grad()
        results = module(x, y)
        sum(results[index].square().sum() for index in uses).backward()
        optimizer.step()
        yield from (None if leaf.grad is None else leaf.grad.clone() for leaf in [x, y, *module.parameters()])
        yield from (parameter.detach().clone() for parameter in module.parameters())


Pair = collections.namedtuple("Pair", "first second")


@dataclass
class Result:
    first: torch.Tensor
    rest: Any = None
    number: int = 3


class Structured(nn.Linear):
    """Returns all kinds of things, with gradients and without."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {
            "output": BaseModelOutput(last_hidden_state=y, hidden_states=(y, x)),
            "pair": Pair(y * 2, None),
            "result": Result(y + 1, [y, {"x": x.detach()}]),
            "mask": y > 0,
            "index": y.argmax(-1),
            "text": "text",
            "list": [],
        }


def structured(made: Sequence[Any]) -> Iterator[Any]:
    """Containers are new on every call."""
    for x in batches():
        found = made[0](x)
        found["list"].append(1)
        assert found["list"] == [1]
        assert (found["text"], found["result"].number, found["pair"].second) == ("text", 3, None)
        assert found["result"].rest[0] is found["output"].last_hidden_state is found["output"].hidden_states[0]
        assert not found["index"].requires_grad
        hidden, pair, first = found["output"].last_hidden_state, found["pair"].first, found["result"].first.exp()
        (hidden + found["output"].hidden_states[1].square() + pair + first).sum().backward()
        yield from (hidden.detach().clone(), found["mask"].clone(), found["index"].clone())


def argument_returned(made: Sequence[Any]) -> Iterator[Any]:
    (module,) = made
    for start in batches(requires_grad=True):
        x = start * 2
        returned = module(x)
        same_one = returned if module.alone else returned[0]
        assert same_one is x
        loss = (x * 3).sum() if module.alone else (returned[1] * x.detach()).sum() + x.square().sum()
        if module.alone:
            same_one.mul_(2)
            loss = loss + (x * same_one).sum()
        loss.backward()
        yield from (x.detach().clone(), start.grad)


def view_of_results(made: Sequence[Any], count: int) -> Iterator[Any]:
    """A variable of the loop holds a view of a result, which costs one call for each graph."""
    found = [torch.empty(0)] * count
    for _ in range(8):
        for index, x in enumerate(batches(count)):
            found[index] = made[0](x).squeeze(-1)
        for one in found:
            one.square().sum().backward()
        yield from (one.detach().clone() for one in found)


# Kinds of callables.


class Weighted(nn.Module):
    """Applies a function of the input and its weight."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*shape))
        self.weight.main_grad = torch.zeros(shape)  # type: ignore[attr-defined]

    def forward(self, *given: Any) -> Any:
        return self.function(*given, self.weight)


def closing_over(function: Callable[..., Any], *shape: int) -> list[Any]:
    """Return a function that uses a weight which is no argument of it."""
    return [Weighted(function, *shape).forward]


def compared(query: torch.Tensor, key: torch.Tensor, more: dict[str, torch.Tensor], weight: torch.Tensor) -> Any:
    """Attention compares queries and keys by identity."""
    return query * weight if query is key is more["value"] else query * key


def one_tensor_thrice(made: Sequence[Any]) -> Iterator[Any]:
    for x in batches(requires_grad=True):
        made[0](x, x, {"value": x}).square().sum().backward()
        yield from (x.grad, made[0].weight.grad.clone())


def penalty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Differentiate twice with respect to a leaf of its own, as for a gradient penalty."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((x @ weight).square().sum(), x, create_graph=True)
    return slope.square().sum()


def with_own_leaf(x: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a leaf of its own."""
    own = x.detach().requires_grad_()
    (own * own).sum().backward()
    assert own.grad is not None and own.is_leaf
    return x * own.grad


def with_hooks_of_arguments(x: torch.Tensor) -> torch.Tensor:
    view = x.view_as(x)
    view.register_hook(lambda gradient: gradient * 5)
    x.register_hook(torch.neg)
    return view * 2


def referenced_weakly() -> list[Any]:
    """Return a function whose weight is not among the state that Encore reaches."""
    weight = nn.Parameter(torch.randn(3))
    KEPT[:] = [weight]
    reference = weakref.ref(weight)
    return [lambda x: x * reference()]


def unreached(made: Sequence[Any]) -> Iterator[Any]:
    yield from train(made)
    yield KEPT[0].grad


def scalars(made: Sequence[Any]) -> Iterator[Any]:
    for x in batches():
        result = made[0](x)
        result.backward()
        yield result.detach().clone()


def stepped(made: Sequence[Any]) -> Iterator[Any]:
    """Update weights after each call: parametrized ones are computed on every call."""
    for _ in range(3):
        yield from train(made, 1)
        with torch.no_grad():
            for parameter in made[0].parameters():
                parameter.sub_(0.1)


def three_in_flight(made: Sequence[Any]) -> Iterator[Any]:
    for _ in range(3):
        xs = batches(requires_grad=True)
        results = [made[0](x) for x in xs]
        for result in results:
            result.square().sum().backward()
        yield from (one.detach().clone() for one in results)
        yield from (x.grad for x in xs)


class Checkpointed(nn.Linear):
    """A checkpoint inside: only its backward is separate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = lambda y: functional.linear(y, self.weight, self.bias).relu()  # noqa: E731
        return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def checkpointed_around(made: Sequence[Any], reentrant: bool) -> Iterator[Any]:
    for x in batches(requires_grad=True):
        result = checkpoint(lambda x: functional.gelu(made[0](x)), x, use_reentrant=reentrant)
        result.square().sum().backward()
        yield from (result.detach(), x.grad)


class Dropping(nn.Module):
    """LayerDrop at rate 0, which draws on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0 <= random.random():
                x = layer(x).tanh()
        return x


def dropping(made: Sequence[Any]) -> Iterator[Any]:
    """The numbers of the captures were put back, and launches draw none."""
    yield torch.tensor([*torch.rand(2), random.random()])
    yield from train(made)


class Holder:
    """An object that is none of the kinds that arguments are taken apart into."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale


def held_changes(made: Sequence[Any], held: Holder, value: Any) -> Iterator[Any]:
    """Numbers and tensors inside of argument objects are compared."""
    before = held.scale
    for index, x in enumerate(batches(4, requires_grad=True)):
        if index == 2:
            held.scale = value
        result = made[0](x, held)
        result.sum().backward()
        yield from (result.detach().clone(), x.grad)
    held.scale = before


def quantized() -> list[nn.Module]:
    (module,) = linear()
    weight = Scaled(torch.randint(-5, 5, (3, 3)), torch.tensor(0.5))
    module.weight = nn.Parameter(weight, requires_grad=False)
    return [module]


def scales_change(made: Sequence[Any]) -> Iterator[Any]:
    """Tensors inside of wrapped weights are compared. The graph reads a scale that is written in place."""
    yield from train(made, 1, requires_grad=True)
    made[0].weight.scale.fill_(0.25)
    yield from train(made, 1, requires_grad=True)
    made[0].weight.scale = torch.tensor(2.0)
    yield from train(made, 2, requires_grad=True)


def main_gradients(made: Sequence[Any]) -> Iterator[Any]:
    yield from train(made, requires_grad=True)
    yield made[0].weight.main_grad


NUMBER, TENSOR = Holder(1.0), Holder(torch.ones(3))
PROGRAMS: dict[str, Program] = {
    "torch.autograd.grad": Program(make=linear, run=by_autograd_grad),
    "gradients of some parameters": Program(make=linear, run=of_some_parameters),
    "gradients thrown away, and kept": Program(make=linear, run=thrown_away_and_kept),
    "a parameter that is used elsewhere too": Program(make=linear, run=used_elsewhere_too),
    "a generator and its critic": Program(
        make=lambda: [nn.Linear(3, 3), nn.Linear(3, 3)],
        run=adversarial,
        samples=lambda made: [tuple(batches(1)), *with_gradients(made[1:])],
    ),
    **{
        f"no order: {run.__name__}": Program(
            make=lambda: [nn.Linear(3, 3), nn.Linear(3, 3)],
            run=run,
            samples=lambda made: [tuple(batches(1)), *with_gradients(made[1:])],
            without=without,
        )
        for run, without in (
            (one_forward_without_a_backward, 1),
            (two_forwards_then_two_backwards, 6),
        )
    },
    **{
        f"a hook of a parameter: {kind}": Program(make=functools.partial(hooked_parameter, kind), run=hooked)
        for kind in ("changes", "keeps", "after", "of its node")
    },
    **{
        f"hooks {name}": Program(
            make=lambda: [Normalized()],
            run=functools.partial(hooked_for_a_while, name=name),
            samples=with_gradients,
        )
        for name in AROUND_A_MODULE
    },
    "hooks on inner modules": Program(make=hooked_inside, run=changed_inside, without=3),
    "inputs without a gradient": Program(
        make=lambda: [Unused()], run=without_a_gradient, samples=lambda made: [tuple(batches(2, requires_grad=True))]
    ),
    "unused results": Program(
        make=lambda: [Halves()], run=some_results, samples=lambda made: [tuple(batches(2, requires_grad=True))]
    ),
    "results of any structure": Program(make=lambda: [Structured(3, 3)], run=structured),
    **{
        f"the argument as result, alone: {alone}": Program(
            make=functools.partial(lambda alone: [Skips(alone=alone)], alone),
            run=argument_returned,
            samples=with_gradients,
        )
        for alone in (False, True)
    },
    **{
        f"a view of {count} results": Program(
            make=lambda: [nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())],
            run=functools.partial(view_of_results, count=count),
            without=count,
            order=[1] * count + [-1] * count,
        )
        for count in (1, 2)
    },
    "attributes of a saved parameter": Program(
        make=lambda: [Weighted(AddsItself.apply, 3, 3)], run=main_gradients, samples=with_gradients
    ),
    "arguments compared by identity": Program(
        make=lambda: [Weighted(compared, 3)],
        run=one_tensor_thrice,
        samples=lambda made: [(x := torch.randn(2, 3, requires_grad=True), x, {"value": x})],
    ),
    "a weight that is not reached": Program(make=referenced_weakly, run=unreached),
    **{
        one.__name__: Program(make=functools.partial(list, [one]), run=train_inputs, samples=with_gradients)
        for one in (with_own_leaf, with_hooks_of_arguments)
    },
    "leaves that it makes": Program(make=lambda: closing_over(penalty, 3, 1), run=scalars),
    **{
        f"gradients in memory of others: {name}": Program(
            make=functools.partial(closing_over, function, 2, 3),
            run=three_in_flight,
            samples=with_gradients,
            order=[1, 1, 1, -1, -1, -1],
        )
        for name, function in {
            "expanded": lambda x, weight: x * weight.sum(),
            "the tangent": lambda x, weight: x + weight,
            "the result and the input": ReturnsOwnTensors.apply,
        }.items()
    },
    "a checkpoint inside": Program(make=lambda: [Checkpointed(3, 3)], run=train_inputs, samples=with_gradients),
    **{
        f"a checkpoint around it, reentrant: {reentrant}": Program(
            make=lambda: [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))],
            run=functools.partial(checkpointed_around, reentrant=reentrant),
            samples=with_gradients,
            is_replayed=reentrant,
        )
        for reentrant in (False, True)
    },
    **{
        f"parametrized weights: {make.__name__}": Program(
            make=functools.partial(lambda make: [make(nn.Linear(3, 3))], make), run=stepped
        )
        for make in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    },
    "harmless draws on the host": Program(
        make=lambda: [Dropping()], run=dropping, options={"host_draws": "unused", "device": CpuDeviceWithHost()}
    ),
    "nothing returned": Program(make=lambda: [Buffered(returns=False)], run=lambda made: map(made[0], batches())),
    "a number in an object": Program(
        make=lambda: [lambda x, held: x * held.scale],
        run=functools.partial(held_changes, held=NUMBER, value=5.0),
        samples=lambda made: [(*batches(1, requires_grad=True), NUMBER)],
        without=2,
    ),
    "a tensor in an object": Program(
        make=lambda: [lambda x, held: x * held.scale],
        run=functools.partial(held_changes, held=TENSOR, value=torch.full((3,), 5.0)),
        samples=lambda made: [(*batches(1, requires_grad=True), TENSOR)],
        without=2,
    ),
    "quantized weights": Program(make=quantized, run=scales_change, samples=with_gradients, without=2),
}


def state_of(made: Sequence[Any]) -> Iterator[torch.Tensor | None]:
    for one in made:
        owner = getattr(one, "__self__", one)
        if isinstance(owner, nn.Module):
            yield from gradients(owner)
            yield from owner.buffers()


@pytest.mark.filterwarnings("ignore:callable . runs without its graphs")
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_program_equals_eager(name: str) -> None:
    program, found = PROGRAMS[name], []
    for graphs in (False, True):
        torch.manual_seed(0)
        called, samples = (made := program.make()), program.samples(made)
        random.seed(1)
        torch.manual_seed(1)
        if graphs:  # numbers that captures draw are put back
            called = group = graphed(made, samples, order=program.order, **program.options)
        found.append([*program.run(called), *state_of(made)])
    assert same(*found)
    assert group.calls_without_graph == program.without
    assert any(one.replays for one in group.report()) is program.is_replayed
