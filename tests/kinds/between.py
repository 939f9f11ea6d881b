"""Do things between graphs and around them: results written and passed on, regions, stances, given gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kinds.world import STEPS, World, kind


def _layers(world: World, count: int) -> list[nn.Linear]:
    return [world.module(nn.Linear(4, 4)) for _ in range(count)]


@kind()
def nested_regions(world: World) -> None:
    layers, table = _layers(world, 3), torch.arange(4.0)

    @torch.compiler.nested_compile_region
    def block(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight.t() + bias) + table.to(x.device)

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = block(layer.weight, layer.bias, x)
        return x

    run = world.compile(program)
    for step in range(STEPS):
        world.train(run(world.values(step)), *layers)
        with torch.no_grad():
            world.note(run(world.values(step + 20)))
        table.add_(1)


@kind(gradients=False)
def alternating_stances(world: World) -> None:
    run = world.compile(_layers(world, 1)[0])
    for step in range(2 * STEPS):
        with torch.compiler.set_stance("force_eager" if step % 3 == 2 else "default"):
            world.note(run(world.values(step)))
    with torch.compiler.set_stance("eager_on_recompile"):
        world.note(run(world.values(3, 7, 4)), run(world.values(4)))


@kind(gradients=False)
def calls_in_ever_new_orders(world: World) -> None:
    runs = [world.compile(layer) for layer in _layers(world, 3)]
    for step in range(4 * STEPS):
        x = world.values(step)
        for number in [(0, 1, 2), (0, 2), (1,), (2, 1, 0), (0, 0, 1)][step % 5]:
            x = runs[number](x)
        world.note(x)


@kind(gradients=False)
def results_written_between_graphs(world: World) -> None:
    first = world.compile(lambda x: (x * 2, x + 1))
    second = world.compile(lambda a, b: a @ b.t())
    for step in range(3 * STEPS):
        a, b = first(world.values(step))
        if step % 3:
            a.add_(1)
        if step % 4 == 3:
            b = b.t().contiguous().t()
        world.note(second(a, b))
        if step % 5 == 4:
            a.zero_()
            world.note(second(a, b), a, b)


@kind(gradients=False, captured=False)
def written_inputs_that_are_results(world: World) -> None:
    def program(x: torch.Tensor) -> Any:
        x.mul_(1.5)
        return x.sum(0), x * 2

    run = world.compile(program)
    x = world.values(0)
    for step in range(3 * STEPS):
        total, y = run(x)
        world.note(total, y, x)
        x = y if step % 3 else world.values(step)


class _Buffers(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, device=world.device))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=world.device))
        self.plain = torch.zeros(4, device=world.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.5)
        self.calls += 1
        self.plain.add_(self.mean)
        return x - self.mean * self.calls + self.plain


@kind(gradients=False)
def buffers_written_from_both_sides(world: World) -> None:
    net = _Buffers(world)
    run = world.compile(net)
    for step in range(3 * STEPS):
        world.note(run(world.values(step)), net.mean, net.calls, net.plain)
        if step % 4 == 3:
            net.mean.zero_()
        if step % 5 == 4:
            net.mean = torch.ones(4, device=world.device)
        if step % 6 == 5:
            net.plain = net.plain * 0.5
        if step == 9:
            net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})


@kind()
def parameters_updated_inside(world: World) -> None:
    (net,) = _layers(world, 1)

    def program(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(gradient * 0.1)
        return loss.detach()

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(world.values(step)), [p.detach() for p in net.parameters()])


@kind(gradients=False)
def one_result_in_two_places(world: World) -> None:
    def program(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y, [y], {"row": y[0], "input": x}

    run = world.compile(program)
    for step in range(STEPS):
        one, other, inside, rows = run(world.values(step))
        world.note(one is other, one is inside[0], one, rows)
        one.add_(1)
        world.note(other, inside, rows)


@kind()
def leaves_made_inside(world: World) -> None:
    (net,) = _layers(world, 1)

    def program(x: torch.Tensor) -> Any:
        y = net(x)
        return y.detach(), y.detach().clone().requires_grad_(), y

    run = world.compile(program)
    for step in range(STEPS):
        detached, leaf, y = run(world.values(step))
        (leaf.sum() * 2 + y.sum()).backward()
        world.note(detached, detached.requires_grad, leaf.grad, leaf.is_leaf, y)
        world.note_gradients(net)


@kind()
def backwards_with_given_gradients(world: World) -> None:
    (net,) = _layers(world, 1)
    run = world.compile(lambda x: (net(x), net(x).sin()))
    for step in range(2 * STEPS):
        both = run(world.values(step))
        dense, one_row = world.values(step + 40).t().contiguous().t(), world.values(step + 40, 1, 4).expand(3, 4)
        count = 2 if step % 3 else 1
        torch.autograd.backward(both[:count], [dense if step % 2 else one_row] * count)
        world.note(both)
        world.note_gradients(net)


@kind()
def gradients_added_in_place(world: World) -> None:
    (net,) = _layers(world, 1)
    run = world.compile(net)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    kept = [p.grad for p in net.parameters()]
    for step in range(STEPS):
        run(world.values(step)).sum().backward()
        world.note(kept, [p.grad is one for p, one in zip(net.parameters(), kept, strict=True)])
        if step % 3 == 2:
            for one in kept:
                one.zero_()
