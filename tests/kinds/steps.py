"""Steps of a loop with more than one forward and backward, or fewer, or later ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._functorch.config as functorch_config
from torch import nn

import optimizations
from kinds.world import World, kind


def _net(world: World) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Return a module, and what is compiled of it."""
    net = world.module(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)))
    return net, world.compile(net)


@kind(gradients=False)
def views_of_results_kept(world: World) -> None:
    def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ x.t()
        return y[0], y[1:], y.t()

    run, kept = world.compile(rows), []
    for step in range(14):
        first, others, turned = run(world.values(step))
        if step % 4 == 1:
            others.add_(1)
        kept += [(others,), (first,), (turned[0],), ()][step % 4]
    world.note(kept)


@kind()
def two_forwards_in_each_step(world: World) -> None:
    net, run = _net(world)
    for step in range(8):
        world.train(run(world.values(step)) * run(world.values(step + 30)), net)


@kind(ends_stock=True)
def several_forwards_in_some_steps(world: World) -> None:
    net, run = _net(world)
    for step in range(12):
        forwards = range(1 + (step % 4 == 3) + (step % 5 == 4))
        losses = [run(world.values(20 * step + index)).square().mean() for index in forwards]
        for loss in losses:
            loss.backward()
        world.note_gradients(net)


@kind(ends_stock=True)
def a_backward_that_comes_steps_later(world: World) -> None:
    net, run = _net(world)
    later: torch.Tensor | None = None
    for step in range(14):
        loss = run(world.values(step)).square().mean()
        if step % 5 == 3:
            later = loss
            continue
        loss.backward()
        if step % 5 == 0 and later is not None:
            later.backward()
            later = None
        world.note_gradients(net)


@kind(ends_stock=True)
def graphs_retained_in_some_steps(world: World) -> None:
    """Buffers that a backward may write over are PyTorch's reason to refuse it."""
    net, run = _net(world)
    with functorch_config.patch(donated_buffer=False):
        for step in range(14):
            loss = run(world.values(step)).square().mean()
            loss.backward(retain_graph=step % 5 == 3)
            if step % 5 == 3:
                loss.backward()
            world.note_gradients(net)


@kind()
def forwards_without_a_backward(world: World) -> None:
    net, run = _net(world)
    for step in range(16):
        result = run(world.values(step))
        if step % 3 == 2:
            result.sum().backward()
            world.note_gradients(net)
        world.note(result)


@kind()
def resets_while_a_backward_is_pending(world: World) -> None:
    net, run = _net(world)
    for reset in (lambda: None, lambda: None, lambda: None, optimizations.reset, torch.compiler.reset, lambda: None):
        result = run(world.values(3))
        reset()
        world.train(result, net)


@kind()
def hooks_that_change_and_raise(world: World) -> None:
    net, run = _net(world)

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("not this one")

    for step in range(10):
        result = run(world.values(step))
        result.register_hook(refuse if step % 4 == 2 else lambda gradient: gradient * 3)
        try:
            result.sum().backward()
        except ValueError as error:
            world.note(str(error))
        world.note(result)
        world.note_gradients(net)
