"""Call compiled functions in many ways, and surround calls: searches, itself, signals, modes, threads, randomness."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kinds.world import STEPS, World, kind, network


@kind()
def line_searches(world: World) -> None:
    """An optimizer calls forward and backward as often as it likes, and goes back to parameters from before."""
    net, run = world.compiled(network())
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    for _, x in world.steps(3):

        def loss(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            found = run(x).square().sum()
            found.backward()
            return found

        world.note(optimizer.step(loss))  # type: ignore[arg-type]
    world.note([p.detach() for p in net.parameters()])


@kind()
def inner_loops_on_weights_of_their_own(world: World) -> None:
    net = world.module(network())
    run = world.compile(lambda weights, x: torch.func.functional_call(net, weights, (x,)).square().mean())
    for step in range(STEPS):
        fast = dict(net.named_parameters())
        for part in range(2):
            slopes = torch.autograd.grad(run(fast, world.values(3 * step + part)), list(fast.values()))
            fast = {name: p - 0.1 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
        world.train(run(fast, world.values(3 * step + 2)), net)


@kind()
def checkpoints_around_compiled_modules(world: World) -> None:
    net, run = world.compiled(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Tanh()))
    for _, x in world.steps(grad=True):
        y = checkpoint(run, checkpoint(run, x, use_reentrant=False), use_reentrant=False)
        world.train(y, net)
        world.note(x.grad)


@kind()
def backwards_that_run_the_forward_again(world: World) -> None:
    net, run = world.compiled(network())

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

    for _, x in world.steps(2 * STEPS, grad=True):
        y: Any = Again.apply(Again.apply(x))  # type: ignore[no-untyped-call]
        world.train(y, net)
        world.note(x.grad)


@kind()
def functions_that_call_themselves(world: World) -> None:
    net = world.module(network())

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
    run, found = world.compile(world.module(network())), []

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
    net, run = world.compiled(network())
    for step in range(STEPS):
        world.note(run(world.values(step)))
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        for step in range(2 * STEPS):
            world.note(run(world.values(step)))
            if step % 4 == 1:
                net[0].weight = nn.Parameter(world.values(90 + step, 6, 4))
            if step % 4 == 3:
                net[0].weight.data = world.values(90 + step, 6, 4)


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
    _, run = world.compiled(nn.Linear(4, 4))
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
    _, run = world.compiled(nn.Linear(4, 4))

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
