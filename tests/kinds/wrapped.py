"""Modules inside wrappers that train or shard them, code that several modules share, and options of Inductor."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from kinds.subclasses import TwoLayers, world_of_one
from kinds.world import STEPS, World, kind


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def _steps(world: World, run: Any, net: nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)
    for step in range(STEPS):
        loss = run(world.values(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        world.note(loss)
    world.note([_whole(p) for p in net.parameters()])


def _whole(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p.detach()


@kind()
def compiled_around_data_parallel(world: World) -> None:
    with world_of_one(world.device):
        net = nn.parallel.DistributedDataParallel(world.module(TwoLayers()))
        _steps(world, world.compile(net), net)


@kind()
def compiled_inside_data_parallel(world: World) -> None:
    with world_of_one(world.device):
        inner = world.module(TwoLayers())
        net = nn.parallel.DistributedDataParallel(world.compile(inner))
        _steps(world, net, inner)


@kind()
def compiled_layers_that_are_sharded(world: World) -> None:
    from torch.distributed.fsdp import fully_shard

    with world_of_one(world.device) as mesh:
        net = world.module(TwoLayers())
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        _steps(world, world.compile(net), net)


class _Decorated(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale
        self.table = torch.full((4,), scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(self.linear(x)) * self.scale + self.table.to(x.device)
        return result


@kind()
def one_compiled_method_of_many_objects(world: World) -> None:
    inner = world.compile(_Decorated.inner)
    nets = [world.module(_Decorated(float(i))) for i in range(3)]
    for step in range(2 * STEPS):
        net = nets[step % 3]
        world.train(inner(net, world.values(step)), net)
        if step == STEPS:
            nets[1] = world.module(_Decorated(7.0))
            nets[2].table.add_(2)


@kind(gradients=False)
def one_compiled_function_of_many_modules(world: World) -> None:
    nets = [world.module(_net()) for _ in range(3)]
    run = world.compile(lambda net, x: net(x) * 2)
    for step in range(3 * STEPS):
        world.note(run(nets[step % 3], world.values(step)))
        if step % 7 == 6:
            nets[step % 3][0].weight.mul_(1.1)
        if step % 9 == 8:
            nets.append(nets.pop(0))


@kind(ends_stock=True)
def training_in_threads(world: World) -> None:
    nets = [world.module(_net()) for _ in range(3)]
    runs = [world.compile(net) for net in nets]
    for run, net in zip(runs, nets, strict=True):
        run(world.values(0)).sum().backward()
        net.zero_grad()

    def work(number: int) -> list[torch.Tensor]:
        net, noted = nets[number], []
        for step in range(STEPS):
            loss = runs[number](world.values(10 * number + step)).square().mean()
            loss.backward()
            noted += [loss.detach().clone(), *(p.grad.clone() for p in net.parameters())]
            net.zero_grad()
        return noted

    with ThreadPoolExecutor(len(nets)) as threads:  # under stock they may raise
        world.note(list(threads.map(work, range(len(nets)))))


@kind()
def backwards_in_another_thread(world: World) -> None:
    net = world.module(_net())
    run = world.compile(net)
    for step in range(STEPS):
        loss = run(world.values(step)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        world.note(loss)
        world.note_gradients(net)


@kind()
def recurrent_states_carried_on(world: World) -> None:
    """Truncated backpropagation through time: states of one call are the next one's inputs, some detached."""
    cell = world.module(nn.GRUCell(4, 4))
    run = world.compile(cell)
    state = world.values(99, 3, 4) * 0
    for step in range(3 * STEPS):
        state = run(world.values(step), state)
        if step % 3 == 2:
            world.train(state, cell)
            state = state.detach()
