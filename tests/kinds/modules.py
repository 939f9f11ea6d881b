"""Modules as users have them: parametrized, copied, swapped, on several devices, sharded, sharing code, in threads."""

from __future__ import annotations

import copy
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from kinds.subclasses import TwoLayers, world_of_one
from kinds.world import STEPS, World, kind, network


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def _train(world: World, run: Any, net: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> None:
    """Train a module that `run` calls, and note losses, parameters and buffers."""
    optimizer = kind(net.parameters(), **{"lr": 0.1, **options})
    for step in range(STEPS):
        loss = run(world.values(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        world.note(loss)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]
    world.note(whole, list(net.buffers()))


@kind()
def parametrizations_of_weights(world: World) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    parametrize.register_parametrization(net[0], "weight", _Symmetric())
    parametrizations.weight_norm(net[2])
    net = world.module(net)
    _train(world, world.compile(net), net)


@kind(unlike_eager="Inductor's iteration has other numbers than eager's")
def spectral_norm_with_its_iteration(world: World) -> None:
    """In training each call writes the vectors of the power iteration; in evaluation it does not."""
    net = world.module(nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()))
    _train(world, world.compile(net), net)
    net.eval()
    run = world.compile(net)
    world.infer(run)
    world.note(list(net.buffers()))


class _Counting(nn.Module):
    """Counters on the CPU and on the device, written in each call; a list of tensors and numbers between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.calls = torch.zeros((), dtype=torch.int64)
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.add_(x.detach().mean(0))
        result: torch.Tensor = self.linear(x) + self.seen * self.calls.to(x.device)
        return result


@kind(gradients=False)
def counters_on_both_sides(world: World) -> None:
    net, run = world.compiled(_Counting())
    for step in range(STEPS + 2):
        world.note(run(world.values(step)), net.calls, net.seen)
        if step == 3:
            net.calls = torch.tensor(40)


@kind(gradients=False)
def compiled_modules_copied_and_pickled(world: World) -> None:
    net, run = world.compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    world.infer(run)
    twin = copy.deepcopy(run)
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    world.note([name.removeprefix("_orig_mod.") for name in state])
    for value in state.values():
        value.mul_(2)
    twin.load_state_dict(state)
    for step in range(STEPS):
        world.note(run(world.values(step)), twin(world.values(step)))
    whole = io.BytesIO()
    torch.save(net, whole)
    whole.seek(0)
    again = world.compile(torch.load(whole, weights_only=False))
    for step in range(STEPS):
        world.note(again(world.values(step)))


@kind(gradients=False)
def weights_brought_by_hooks(world: World) -> None:
    """Weights wait on the CPU; a hook loads them to the device before a module runs, and offloads them after it."""
    layers = [nn.Linear(4, 4) for _ in range(2)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: module.to(world.device) and None)
        layer.register_forward_hook(lambda module, inputs, output: module.to("cpu") and None)
    runs = [world.compile(layer.forward) for layer in layers]
    for layer, run in zip(layers, runs, strict=True):
        layer.forward = run
    for step in range(STEPS):
        world.note(layers[1](layers[0](world.values(step))))


class _TwoDevices(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.on_cpu = nn.Embedding(10, 4)
        self.on_device = nn.Linear(4, 4).to(device)

    def forward(self, tokens: torch.Tensor) -> Any:
        embedded = self.on_cpu(tokens)
        y = self.on_device(embedded.to(self.on_device.weight.device))
        return y, embedded.sum() + 1


@kind()
def modules_on_two_devices(world: World) -> None:
    net = _TwoDevices(world.device)
    run = world.compile(net)
    for step in range(STEPS):
        y, total = run(torch.randint(10, (5,), generator=torch.Generator().manual_seed(step)))
        (y.square().sum().cpu() + total).backward()
        world.note(y, total)
        world.note_gradients(net)


@kind()
def exported_programs(world: World) -> None:
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(net, (world.values(0),), dynamic_shapes=({0: rows},))
    world.infer(world.compile(exported.module()), inputs=lambda step: (world.values(step, 3 + step % 2, 4),))


@kind()
def compiled_optimizers(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    rate = torch.tensor(0.1, device=world.device)
    capturable = {"capturable": True} if world.device == "cuda" else {}
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, **capturable)
    update = world.compile(lambda: optimizer.step())
    for step in range(2 * STEPS):
        net(world.values(step)).square().mean().backward()
        update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        rate.mul_(0.9)
        world.note([p.detach() for p in net.parameters()])


@kind()
def compiled_optimizers_with_rates_on_the_cpu(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    update = world.compile(lambda: optimizer.step())
    for step in range(STEPS + 2):
        net(world.values(step)).square().mean().backward()
        update()
        scheduler.step()
        optimizer.zero_grad()
        world.note([p.detach() for p in net.parameters()])


@kind()
def functions_that_call_compiled_ones(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    inner = world.compile(lambda x: net(x).sin())

    @torch.compiler.disable
    def apart(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    def program(x: torch.Tensor) -> torch.Tensor:
        y = inner(x) * 2
        y = apart(y)
        return inner(y).cos()

    run = world.compile(program)
    for step in range(STEPS):
        world.train(run(world.values(step)).sum() + inner(world.values(step + 20)).sum(), net)


@kind()
def dynamically_quantized_modules(world: World) -> None:
    """Quantized weights with a scale for each column, unpacked in the graph."""
    whole = world.whole(40, 100, 4, 4, dtype=torch.int8)
    scale, zero = world.values(41, 4).abs(), torch.tensor(3, dtype=torch.int8)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x @ ((whole - zero.to(x.device)).to(x.dtype) * scale)

    world.infer(world.compile(program), between=lambda: zero.add_(1))


ADAMW = {"kind": torch.optim.AdamW, "lr": 0.05, "foreach": False}


@kind()
def compiled_around_data_parallel(world: World) -> None:
    with world_of_one(world.device):
        net = nn.parallel.DistributedDataParallel(world.module(TwoLayers()))
        _train(world, world.compile(net), net, **ADAMW)


@kind()
def compiled_inside_data_parallel(world: World) -> None:
    with world_of_one(world.device):
        inner = world.module(TwoLayers())
        net = nn.parallel.DistributedDataParallel(world.compile(inner))
        _train(world, net, inner, **ADAMW)


@kind()
def compiled_layers_that_are_sharded(world: World) -> None:
    from torch.distributed.fsdp import fully_shard

    with world_of_one(world.device) as mesh:
        net = world.module(TwoLayers())
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        _train(world, world.compile(net), net, **ADAMW)


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
    nets = [world.module(network()) for _ in range(3)]
    run = world.compile(lambda net, x: net(x) * 2)
    for step in range(3 * STEPS):
        world.note(run(nets[step % 3], world.values(step)))
        if step % 7 == 6:
            nets[step % 3][0].weight.mul_(1.1)
        if step % 9 == 8:
            nets.append(nets.pop(0))


def _train_in_threads(world: World, *, calls_before: int, micro_batches: int) -> None:
    nets = [world.module(network()) for _ in range(3)]
    runs = [world.compile(net) for net in nets]
    for run, net in [*zip(runs, nets, strict=True)] * calls_before:
        run(world.values(0)).sum().backward()
        net.zero_grad()

    def work(number: int) -> list[torch.Tensor]:
        net, noted = nets[number], []
        for step in range(STEPS):
            for part in range(micro_batches):
                loss = runs[number](world.values(100 * number + 10 * part + step)).square().mean()
                loss.backward()
                noted.append(loss.detach().clone())
            noted += [p.grad.clone() for p in net.parameters()]
            net.zero_grad()
        return noted

    with ThreadPoolExecutor(len(nets)) as threads:  # under stock they may raise
        world.note(list(threads.map(work, range(len(nets)))))


@kind(ends_stock=True)
def training_in_threads(world: World) -> None:
    _train_in_threads(world, calls_before=1, micro_batches=1)


@kind(ends_stock=True)
def accumulation_in_threads_from_the_first_call_on(world: World) -> None:
    _train_in_threads(world, calls_before=0, micro_batches=2)


@kind()
def backwards_in_another_thread(world: World) -> None:
    net, run = world.compiled(network())
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
    cell, run = world.compiled(nn.GRUCell(4, 4))
    state = world.values(99, 3, 4) * 0
    for step in range(3 * STEPS):
        state = run(world.values(step), state)
        if step % 3 == 2:
            world.train(state, cell)
            state = state.detach()
