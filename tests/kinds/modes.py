"""Surround a call: by defaults, modes, randomness, profilers, threads, processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kinds.world import STEPS, World, kind


@kind()
def default_device(world: World) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(4.0) + torch.full((4,), 2.0) * torch.ones(())

    run = world.compile(program)
    try:
        for step in range(STEPS):
            torch.set_default_device(world.device)
            world.note(run(world.values(step)))
            with torch.device(world.device):
                world.note(run(world.values(step + 20)))
    finally:
        torch.set_default_device(None)


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Looking(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class _DoublingAdds(TorchFunctionMode):
    """A mode that changes what an operator means."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.sin else found


@kind(gradients=False)
def function_modes(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: net(torch.sin(x)))
    for step in range(STEPS):
        world.note(run(world.values(step)))
        with _Passing():
            world.note(run(world.values(step)))
        with _DoublingAdds():
            world.note(run(world.values(step)))


@kind(gradients=False, captured=False)
def dispatch_modes(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: net(torch.sin(x)))
    for step in range(STEPS):
        world.note(run(world.values(step)))
        with _Looking():
            world.note(run(world.values(step + 10)))


@kind()
def deterministic_algorithms(world: World) -> None:
    index = world.moved(torch.tensor([0, 1, 0, 2]))

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3, 4, device=x.device).index_add(0, index, x)

    run = world.compile(program)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for step in range(2 * STEPS):
            torch.use_deterministic_algorithms(step % 4 < 2, warn_only=True)
            world.note(run(world.values(step, 4, 4)))
    finally:
        torch.use_deterministic_algorithms(before)


@kind(gradients=False)
def profilers(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(net)
    for step in range(STEPS):
        if step % 2:
            with torch.profiler.profile(), torch.profiler.record_function("call"):
                world.note(run(world.values(step)))
        else:
            world.note(run(world.values(step)))


@kind(gradients=False)
def forked_random_numbers(world: World) -> None:
    """Random numbers that are drawn inside, on the CPU: each state is forked, and what follows is not touched."""
    devices = [0] if world.device == "cuda" else []

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4).to(x.device)

    run = world.compile(program)
    for step in range(STEPS):
        torch.manual_seed(step // 2)
        with torch.random.fork_rng(devices):
            run(world.values(step))
        world.note(torch.rand(2), torch.rand(2, device=world.device).shape)


@kind(gradients=False, captured=False)
def generators_of_random_numbers(world: World) -> None:
    """A generator on the CPU, which the program keeps and passes."""
    own = torch.Generator().manual_seed(3)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, generator=own).to(x.device) * 2

    run = world.compile(program)
    for step in range(STEPS):
        own.manual_seed(step // 2)
        world.note(run(world.values(step)))
        world.note(torch.rand(2, generator=own))


@kind(gradients=False, on_gpu=False)
def fake_tensors_and_real_ones(world: World) -> None:
    """Between real calls a compiled function gets fake tensors, for the shapes of its results.

    On a GPU Inductor's code launches its kernels with them, with graphs or without: an error or an illegal access.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = world.values(30, 4, 4)
    run = world.compile(lambda x, w: (x @ w).relu())
    for step in range(STEPS):
        world.note(run(world.values(step), weight))
        if step in (1, 3):
            with FakeTensorMode() as mode:
                found = run(mode.from_tensor(world.values(step)), mode.from_tensor(weight))
                world.note(tuple(found.shape), str(found.device), type(found).__name__)


@kind(gradients=False)
def alternating_autocast(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(world.device, torch.bfloat16):
            y = net(x)
        return net(x) + y.float()

    run, plain = world.compile(program), world.compile(net)
    for step in range(STEPS):
        found = run(world.values(step))
        world.note((found * 4).round() / 4 if world.device == "cuda" else found)
        with torch.autocast(world.device, torch.bfloat16, enabled=step % 2 == 1):
            world.note(str(plain(world.values(step + 20)).dtype))


@kind(on_gpu=False)
def tasks_and_pools(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(net)

    def served(number: int) -> torch.Tensor:
        with torch.no_grad():
            return run(world.values(number)).clone()

    async def client(number: int) -> torch.Tensor:
        await asyncio.sleep(0)
        return served(number)

    async def clients() -> list[torch.Tensor]:
        return await asyncio.gather(*(client(number) for number in range(STEPS)))

    for _ in range(3):
        world.note(asyncio.run(clients()))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        world.note(list(pool.map(served, range(4 * STEPS))))
