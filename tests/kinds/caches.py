"""Caches of generation loops: as inputs and as attributes, written in part, cut back, reordered, and grown."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kinds.world import STEPS, World, kind

ORDER = (1, 1, 2)
"""The beam that each beam goes on from."""


def _reordered(cache: torch.Tensor) -> torch.Tensor:
    return cache.index_select(0, torch.tensor(ORDER, device=cache.device))


@kind(gradients=False, captured=False)
def caches_written_from_a_position_on(world: World) -> None:
    """The position is a number, and goes back where a guess was wrong."""
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor, cache: torch.Tensor, length: int) -> Any:
        cache[:, length : length + x.shape[1]] = net(x)
        return cache[:, : length + x.shape[1]].sum(1), length + x.shape[1]

    run = world.compile(program)
    for sequence in range(2):
        cache, length = world.moved(torch.zeros(3, 12, 4)), 0
        for step, count in enumerate((4, 1, 3, 1, 2)):
            found, length = run(world.values(20 * sequence + step, 3, count, 4), cache, length)
            world.note(found, cache, length)
            length -= step == 2


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(3, 10, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.keys.index_copy_(1, self.position, torch.tanh(self.linear(x))[:, None])
        weights = self.keys.exp()
        self.position.add_(1)
        self.keys[:, -1] = weights.mean(1)
        return (weights * self.keys).sum(1), self.position, self.keys[:, :2]


@kind(gradients=False)
def caches_that_modules_hold(world: World) -> None:
    """Results that are the cache, or views of it, are kept; the cache is reordered and replaced."""
    net, kept = world.module(_Cached()), []
    run = world.compile(net)
    for sequence in range(3):
        for step in range(8):
            found, position, first = run(world.values(20 * sequence + step))
            world.note(found, position, first, position is net.position, net.keys)
            kept = [*kept[-2:], first if step % 2 else found]
            world.note(kept)
            if step == 4:
                net.keys.copy_(_reordered(net.keys))
        net.position.zero_()
        if sequence == 1:
            net.keys = world.moved(torch.zeros(3, 10, 4))


@kind(gradients=False)
def caches_that_grow(world: World) -> None:
    """The result of one call is the input of the next, cut back and reordered."""
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor, cache: torch.Tensor) -> Any:
        grown = torch.cat([cache, net(x)], 1)
        return grown.mean(1), grown

    run = world.compile(program)
    for sequence in range(3):
        cache = world.moved(torch.zeros(3, 2, 4))
        for step in range(6):
            found, cache = run(world.values(20 * sequence + step, 3, 1 + step % 3, 4), cache)
            world.note(found, cache)
            if step % 3 == 2:
                cache = cache[:, :-1]
            if step % 4 == 3:
                cache = _reordered(cache)


@kind(gradients=False)
def results_kept_written_and_passed_back(world: World) -> None:
    run = world.compile(lambda x, y: (x * 2 + y, (x - y).t()))
    ring: list[Any] = []
    for step in range(24):
        x = ring[step % len(ring)][0] if len(ring) > 3 else world.values(step)
        found = run(x, world.values(step + 50))
        version = found[0]._version
        found[0].add_(1)
        world.note(found, found[0]._version - version, [one.stride() for one in found])
        ring = [*ring[-4:], found]
        if step % 4 == 3:
            ring[0][0].mul_(0.5)
        world.note(ring)


@kind(gradients=False, captured=False)
def inputs_written_over_and_over(world: World) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(y)
        first = x.tanh()
        x.mul_(2)
        second = (first + x).exp()
        y.copy_(first)
        x[0].sub_(1)
        return second.flip(0) + y, x.t(), first

    run, kept = world.compile(program), []
    for step in range(16):
        x, y = world.values(step) * 0.1, world.values(step + 40) * 0.1
        found = run(x, y)
        kept = [*kept[-2:], found[2]]
        world.note(found, x, y, kept)


class _Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(1, 8, 4))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.keys[:, positions] = self.linear(x)
        return torch.softmax(x @ self.keys.transpose(1, 2), -1) @ self.keys


@kind(gradients=False)
def caches_written_at_a_tensor_of_positions(world: World) -> None:
    """The first of several graphs returns its arguments, and views of them, to the later ones."""
    net = world.module(_Indexed())
    run = world.compile(net)
    for step in range(2 * STEPS):
        world.note(run(world.values(step, 1, 1, 4), world.moved(torch.tensor([step % 8]))), net.keys)
