"""Call compiled functions in many ways: searches, inner loops, checkpoints, backwards, itself, signal handlers."""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kinds.world import STEPS, World, kind


def _net(world: World) -> nn.Module:
    net: nn.Module = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return net


@kind()
def line_searches(world: World) -> None:
    """An optimizer calls forward and backward as often as it likes, and goes back to parameters from before."""
    net = _net(world)
    run = world.compile(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    for step in range(3):
        x = world.values(step)

        def loss(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            found = run(x).square().sum()
            found.backward()
            return found

        world.note(optimizer.step(loss))  # type: ignore[arg-type]
    world.note([p.detach() for p in net.parameters()])


@kind()
def inner_loops_on_weights_of_their_own(world: World) -> None:
    net = _net(world)
    run = world.compile(lambda weights, x: torch.func.functional_call(net, weights, (x,)).square().mean())
    for step in range(STEPS):
        fast = dict(net.named_parameters())
        for part in range(2):
            slopes = torch.autograd.grad(run(fast, world.values(3 * step + part)), list(fast.values()))
            fast = {name: p - 0.1 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
        world.train(run(fast, world.values(3 * step + 2)), net)


@kind()
def checkpoints_around_compiled_modules(world: World) -> None:
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Tanh()))
    run = world.compile(net)
    for step in range(STEPS):
        x = world.values(step, grad=True)
        y = checkpoint(run, checkpoint(run, x, use_reentrant=False), use_reentrant=False)
        world.train(y, net)
        world.note(x.grad)


@kind()
def backwards_that_run_the_forward_again(world: World) -> None:
    net = _net(world)
    run = world.compile(net)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            ctx.save_for_backward(x)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                y = run(x)
            torch.autograd.backward(y, gradient)
            return x.grad

    for step in range(2 * STEPS):
        x = world.values(step, grad=True)
        y: Any = Again.apply(Again.apply(x))  # type: ignore[no-untyped-call]
        world.train(y, net)
        world.note(x.grad)


@kind()
def functions_that_call_themselves(world: World) -> None:
    net = _net(world)

    def program(x: torch.Tensor, depth: int) -> torch.Tensor:
        y: torch.Tensor = net(x)
        return y if depth == 0 else y + deeper(y * 0.5, depth - 1)

    run = world.compile(program)

    @torch.compiler.disable
    def deeper(x: torch.Tensor, depth: int) -> Any:
        return run(x, depth)

    for step in range(2 * STEPS):
        world.train(run(world.values(step), step % 3), net)


@kind()
def calls_from_a_signal(world: World) -> None:
    run, found = world.compile(_net(world)), []

    def handler(*_: Any) -> None:
        with torch.no_grad():
            found.append(run(world.values(7)))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with torch.no_grad():
            for step in range(2 * STEPS):
                y = run(world.values(step))
                if step % 3 == 2:
                    signal.raise_signal(signal.SIGALRM)
                world.note(y)
    finally:
        signal.signal(signal.SIGALRM, before)
    world.note(found)


@kind(gradients=False)
def weights_exchanged_while_no_guard_looks(world: World) -> None:
    """Set `skip_guard_eval_unsafe`: the caller promises what guards check, and exchanges weights all the same."""
    net: Any = _net(world)
    run = world.compile(net)
    for step in range(STEPS):
        world.note(run(world.values(step)))
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        for step in range(2 * STEPS):
            world.note(run(world.values(step)))
            if step % 4 == 1:
                net[0].weight = nn.Parameter(world.values(90 + step, 4, 4))
            if step % 4 == 3:
                net[0].weight.data = world.values(90 + step, 4, 4)
