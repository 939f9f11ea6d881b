"""Operators that hold graphs of their own: branches, loops, scans, attention with functions in it, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kinds.world import STEPS, World, kind


@kind()
def branches_by_a_tensor(world: World) -> None:
    weight = world.values(50, 4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ weight, lambda x: (x - 1).cos(), (x,)) + x

    run = world.compile(program)
    world.infer(run)


@kind()
def branches_by_a_cpu_tensor(world: World) -> None:
    """The predicate is on the CPU, and the branches close over tensors there and on the device."""
    weight, shift = world.values(51, 4, 4), torch.arange(4.0)

    def program(x: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
        moved = shift.to(x.device)
        return torch.cond(switch, lambda x: x @ weight + moved, lambda x: x - moved, (x,))

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(world.values(step), torch.tensor(step % 3 == 0)))


@kind()
def branches_that_are_trained(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: net(x).relu(), lambda x: net(x) * 2, (x,)).sum()

    run = world.compile(program)
    for step in range(STEPS):
        world.train(run(world.values(step)), net)


@kind(on_cpu=False)
def loops_while(world: World) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def program(x: torch.Tensor, limit: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < limit, lambda i, x: (i + 1, x * 1.5 - 0.1), (torch.zeros_like(limit), x))

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(world.values(step), world.moved(torch.tensor(step % 3 + 1))))


@kind(on_cpu=False)
def scans(world: World) -> None:
    from torch._higher_order_ops.scan import scan

    def program(x: torch.Tensor, start: torch.Tensor) -> Any:
        return scan(lambda carry, row: (carry + row, carry * row), start, x, dim=0)

    run = world.compile(program)
    world.infer(run, inputs=lambda step: (world.values(step, 5, 4), world.values(step + 60, 4)))


@kind()
def scans_associatively(world: World) -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    def program(x: torch.Tensor) -> torch.Tensor:
        return associative_scan(lambda one, other: one * 0.5 + other, x, 0, combine_mode="generic") * 2

    run = world.compile(program)
    world.infer(run, inputs=lambda step: (world.values(step, 8, 4),))


@kind(on_cpu=False)
def maps_over_rows(world: World) -> None:
    from torch._higher_order_ops.map import map as map_over

    weight = world.values(52, 4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return map_over(lambda row: row @ weight + row, x)

    run = world.compile(program)
    world.infer(run)


@kind(on_cpu=False)
def attention_with_a_score_function(world: World) -> None:
    """The score closes over a table that is written between calls and replaced once."""
    from torch.nn.attention.flex_attention import flex_attention

    slopes = [world.values(53, 2).abs()]

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        table = slopes[0]
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - table[h] * (i - j).abs()) + 1

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(*(world.values(10 * step + i, 1, 2, 128, 16) for i in range(3))))
        slopes[0].add_(0.5)
        if step == 3:
            slopes[0] = slopes[0] * 0.1


@kind(on_cpu=False)
def attention_with_masks_that_change(world: World) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=mask) * 2

    run = world.compile(program)
    for step in range(STEPS):
        window = world.moved(torch.tensor(16 * (step % 3 + 1)))
        mask = create_block_mask(
            lambda b, h, i, j, w=window: (i >= j) & (i - j < w), 1, 1, 256, 256, device=world.device
        )
        world.note(run(*(world.values(10 * step + i, 1, 2, 256, 16) for i in range(3)), mask))


@kind(on_cpu=False)
def attention_that_is_trained(world: World) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    bias = world.values(54, 128, grad=True)

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j]).square().mean()

    run = world.compile(program)
    for step in range(STEPS):
        inputs = [world.values(10 * step + i, 1, 2, 128, 16, grad=True) for i in range(3)]
        loss = run(*inputs)
        loss.backward()
        world.note(loss, [one.grad for one in inputs], bias.grad)
        bias.grad = None


@kind(captured=False)
def checkpoints(world: World) -> None:
    first, second = world.module(nn.Linear(4, 8)), world.module(nn.Linear(8, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: torch.dropout(first(x).sin(), 0.5, True), x, use_reentrant=False)
        return second(x).square().mean()

    run = world.compile(program)
    for step in range(STEPS):
        torch.manual_seed(step)
        world.train(run(world.values(step)), first, second)


@kind()
def compiled_blocks_in_reentrant_checkpoints(world: World) -> None:
    blocks = [world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(3)]
    runs = [world.compile(block) for block in blocks]
    for step in range(STEPS):
        x = world.values(step, grad=True)
        y = x * 1
        for run in runs:
            y = checkpoint(run, y, use_reentrant=True)
        world.train(y, *blocks)
        world.note(x.grad)


@kind()
def a_checkpoint_with_cpu_attributes(world: World) -> None:
    """A checkpoint's second run, in the backward, reads a CPU table, which is written between calls."""
    linear, table = world.module(nn.Linear(4, 4)), torch.arange(4.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: linear(x * table.to(x.device)).tanh(), x, use_reentrant=False).sum()

    run = world.compile(program)
    for step in range(STEPS):
        world.train(run(world.values(step)), linear)
        table.add_(1)
