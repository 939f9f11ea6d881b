"""Return views of inputs and parameters, numbers, nests of the user's own; and change sizes from call to call."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.utils import _pytree as pytree

from kinds.world import STEPS, World, kind

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    steps: int = 0


class Box:
    def __init__(self, value: torch.Tensor, name: str) -> None:
        self.value, self.name = value, name


pytree.register_pytree_node(Box, lambda box: ([box.value], box.name), lambda values, name: Box(values[0], name))


@kind(gradients=False)
def inputs_and_views_of_them(world: World) -> None:
    weight, flag = world.values(10, 4, 4), world.values(11, 4)

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x, x.t(), y[1:], weight.view(-1)[2:6], weight, x @ weight, flag.expand(3, 4), (x + y).t()

    run = world.compile(program)
    for step in range(STEPS):
        x, y = world.values(step), world.values(step + 20)
        found = run(x, y)
        world.note(found, found[0] is x, found[4] is weight, [one.stride() for one in found])
        found[1].add_(1)
        found[2].mul_(2)
        found[3].sub_(1)
        world.note(x, y, weight)


@kind()
def views_of_inputs_in_training(world: World) -> None:
    weight = world.values(12, 4, 4, grad=True)

    def program(x: torch.Tensor) -> Any:
        y = x @ weight
        return y[0], y.t(), x.view(-1), x.detach(), weight.t()

    run = world.compile(program)
    for _, x in world.steps(grad=True):
        row, turned, flat, detached, other = run(x)
        (row.sum() + turned.square().sum() + flat.sum() * 2 + other.sum()).backward()
        world.note(row, turned, flat, detached.requires_grad, x.grad, weight.grad)
        weight.grad = None


@kind(gradients=False, captured=False, unlike_eager="AOTAutograd fails where inputs overlap that were apart")
def inputs_that_share_memory(world: World) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x + y * 2

    run = world.compile(program)
    for step in range(2 * STEPS):
        base = world.values(step, 5, 4)
        x, y = (base[:3], base[2:]) if step % 3 == 0 else (base[:3], world.values(step + 30, 3, 4))
        world.note(run(x, y), base)


@kind(gradients=False, captured=False)
def inputs_resized_and_set(world: World) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.t_()
        x.copy_(y.t())
        y.zero_()
        return x * 2

    run = world.compile(program)
    for step in range(STEPS):
        x, y = world.values(step), world.values(step + 20)
        world.note(run(x, y), x, y, tuple(x.shape))


@kind(gradients=False)
def strided_inputs_and_outputs(world: World) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x * y).t(), x.flip(0), (x + 1).as_strided((2, 2), (1, 4)), x.expand(2, *x.shape) * 1

    run = world.compile(program)
    for step in range(2 * STEPS):
        base = world.values(step, 8, 9)
        x = base[1 + step % 2 : 4 + step % 2, step % 4 : step % 4 + 4]
        found = run(x, base.t()[:3, 2:6])
        world.note(found, [one.stride() for one in found])


@kind(captured=False)
def empty_and_single_tensors(world: World) -> None:
    def program(x: torch.Tensor, none: torch.Tensor, one: torch.Tensor) -> Any:
        return torch.cat([x, none]) * one, none + 1, one.sum(), torch.empty(0, device=x.device)

    run = world.compile(program)
    for step, x in world.steps():
        world.note(run(x, world.values(step, 0, 4), world.values(step + 20, 1)))


@kind()
def empty_results_that_are_changed(world: World) -> None:
    """Each call returns new tensors: shape, memory, hooks and attributes of earlier ones stay with them."""
    weight = world.values(13, 4, grad=True)

    def program(x: torch.Tensor) -> Any:
        return x[:0] * weight, torch.zeros(0, 4, device=x.device), (x * weight).sum()

    run, seen = world.compile(program), []
    for step in range(2 * STEPS):
        trained, empty, total = run(world.values(step))
        world.note(trained, empty, empty.stride(), sorted(vars(empty)), empty.requires_grad)
        if step % 4 == 0:
            trained.register_hook(lambda gradient: seen.append(gradient))
            empty.name_of_the_callers_own = step
        if step % 4 == 1:
            empty.t_()
        if step % 4 == 2:
            empty.resize_(2, 2).fill_(7.0)
        if step % 4 == 3:
            empty.requires_grad_()
        (trained.sum() + total).backward()
        world.note(weight.grad, len(seen), torch.cat([empty.detach().flatten(), total.detach()[None]]))
        weight.grad = None


@kind()
def numbers_strings_and_nothing(world: World) -> None:
    def program(x: torch.Tensor, rows: int, name: str, factor: float) -> Any:
        return x[:rows] * factor, rows + 1, f"{name}!", None, factor, x.shape, x.dtype, [rows, (None, x.sum())]

    run = world.compile(program)
    for step in range(2 * STEPS):
        *found, nest = run(world.values(step), 1 + step % 3, "name", 0.5 * (step % 2))
        world.note(found, nest)


@kind()
def nests_of_the_users_own(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(inputs: dict[str, Any], box: Box, pair: Any) -> Any:
        logits = net(inputs["x"]) + box.value + pair.left
        found = OrderedDict(a=logits, b=[pair.right, {"c": logits.sum()}])
        return Output(logits, logits.square().mean(), 3), Pair(logits * 2, box.name), found

    run = world.compile(program)
    for step in range(STEPS):
        box = Box(world.values(step + 10), "named")
        pair = Pair(world.values(step + 20), world.values(step + 30))
        output, other, found = run({"x": world.values(step), "unused": 1}, box, pair)
        output.loss.backward()
        world.note(type(output).__name__, type(other).__name__, list(found), output.steps)
        world.note(output.logits, output.loss, other.left, other.right, found)
        world.note_gradients(net)


@kind(gradients=False, captured=False)
def attributes_set_by_the_function(world: World) -> None:
    class Cache:
        keys: torch.Tensor | None = None
        length = 0

    cache = Cache()

    def program(x: torch.Tensor) -> torch.Tensor:
        cache.keys = x * 2 if cache.keys is None else cache.keys + x
        cache.length += 1
        return cache.keys.sum()

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(world.values(step)), cache.length)
        assert cache.keys is not None
        world.note(cache.keys)
        cache.keys = cache.keys.clone()


@kind()
def results_on_the_cpu(world: World) -> None:
    table = torch.arange(4.0)

    def program(x: torch.Tensor) -> Any:
        y = x * 2
        on_cpu = y.sum(0).cpu()
        return y, on_cpu, on_cpu + table, table * 2

    world.infer(world.compile(program), between=lambda: table.add_(1))


@kind(gradients=False)
def arrays_of_numpy(world: World) -> None:
    import numpy

    scales = numpy.arange(4, dtype=numpy.float32)

    def program(x: torch.Tensor, row: Any) -> torch.Tensor:
        both = torch.from_numpy(scales * 2 + row)
        return x * both.to(x.device)

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(world.values(step), numpy.full(4, step, dtype=numpy.float32)))
        scales += 1


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

    world.infer(world.compile(program), 2 * STEPS)


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
