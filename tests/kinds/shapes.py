"""Sizes that change, sizes that depend on data, and limits of compiling again."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import nn

from kinds.world import STEPS, World, kind


@kind(gradients=False)
def all_sizes_dynamic(world: World) -> None:
    net, table = world.module(nn.Linear(4, 4)), torch.arange(64.0)

    def program(x: torch.Tensor) -> Any:
        return net(x) + table[: x.shape[0], None].to(x.device), x.shape[0] * 2, x.numel()

    run = world.compile(program, dynamic=True)
    for step in range(2 * STEPS):
        world.note(run(world.values(step, 2 + step % 4, 4)))
        table.add_(1)


@kind(captured=False)  # Inductor makes no partitions on the CPU, and what reads a size is not captured
def sizes_from_an_item(world: World) -> None:
    def program(x: torch.Tensor, count: torch.Tensor) -> Any:
        rows = count.item()
        torch._check(rows >= 0)
        torch._check(rows <= x.shape[0])
        return x[:rows].sum(0), torch.ones(rows, device=x.device) * 2, rows

    run = world.compile(program)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for step in range(2 * STEPS):
            count = torch.tensor(1 + step % 3)
            world.note(run(world.values(step), count if step % 2 else count.to(world.device)))


@kind(captured=False)
def items_that_break_the_graph(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        if y.sum().item() > 0:
            return y * 2
        return y - float(y.max())

    run = world.compile(program)
    world.infer(run, 2 * STEPS)


@kind(captured=False)
def sizes_from_nonzero(world: World) -> None:
    def program(x: torch.Tensor) -> Any:
        found = torch.nonzero(x > 0.5)
        return found.shape[0], found.sum(0), torch.masked_select(x, x < 0) * 2, x[x > 1].sum()

    run = world.compile(program)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        for step in range(STEPS):
            world.note(run(world.values(step)))


@kind()
def more_shapes_than_are_compiled(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: net(x).sin(), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for step in range(3 * STEPS):
            world.note(run(world.values(step, 1 + step % 5, 4)))


@kind(captured=False)
def numbers_that_change(world: World) -> None:
    shift = torch.arange(4.0)
    run = world.compile(lambda x, scale, count: x * scale + shift.to(x.device) * count)
    world.infer(run, 2 * STEPS, inputs=lambda step: (world.values(step), 0.5 * step, step))
