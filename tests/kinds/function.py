"""torch.func, custom operators and kernels of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kinds.world import STEPS, World, kind


@kind()
def vmap_grad_and_jvp(world: World) -> None:
    weight, shift = world.values(20, 4), torch.arange(4.0)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) * w).sum() ** 2

    def program(x: torch.Tensor) -> Any:
        x = x + shift.to(x.device)
        rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
        value, tangent = torch.func.jvp(lambda x: torch.sin(x) * weight, (x,), (torch.ones_like(x),))
        return rows, value, tangent

    run = world.compile(program)
    world.infer(run, between=lambda: shift.mul_(1.5))


@kind()
def parameters_passed_by_functional_call(world: World) -> None:
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    own = dict(net.named_parameters())
    run = world.compile(lambda parameters, x: torch.func.functional_call(net, parameters, (x,)))
    for step in range(STEPS):
        swapped = {name: (p * (step + 1)).detach().requires_grad_() for name, p in own.items()}
        found = run(swapped if step % 3 else own, world.values(step))
        found.sum().backward()
        world.note(found, [p.grad for p in (swapped if step % 3 else own).values()])
        net.zero_grad()


LIBRARY = torch.library.Library("kinds_of_programs", "FRAGMENT")
LIBRARY.define("add_into(Tensor(a!) into, Tensor x) -> ()")
LIBRARY.define("scaled(Tensor x, float by) -> Tensor")
LIBRARY.define("scaled_back(Tensor x, float by) -> Tensor")
LIBRARY.define("last_row(Tensor(a) x) -> Tensor(a)")


@torch.library.impl(LIBRARY, "add_into", "CompositeExplicitAutograd")
def _add_into(into: torch.Tensor, x: torch.Tensor) -> None:
    into.add_(x * 2)


@torch.library.impl(LIBRARY, "scaled", "CompositeExplicitAutograd")
@torch.library.impl(LIBRARY, "scaled_back", "CompositeExplicitAutograd")
def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.impl(LIBRARY, "last_row", "CompositeExplicitAutograd")
def _last_row(x: torch.Tensor) -> torch.Tensor:
    return x[-1]


@torch.library.register_fake("kinds_of_programs::scaled", lib=LIBRARY)
def _fake_scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_autograd(
    "kinds_of_programs::scaled",
    lambda ctx, gradient: (torch.ops.kinds_of_programs.scaled_back(gradient, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
    lib=LIBRARY,
)


@kind(gradients=False, captured=False)
def custom_operators_that_write(world: World) -> None:
    total = world.values(22)

    def program(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch.ops.kinds_of_programs.add_into(into, y)
        torch.ops.kinds_of_programs.add_into(total, x)
        torch.ops.kinds_of_programs.add_into(y, x)
        return y + into

    run = world.compile(program)
    for step in range(STEPS):
        into = world.values(step + 30)
        world.note(run(world.values(step), into), into, total)


@kind()
def custom_operators_that_are_trained(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: torch.ops.kinds_of_programs.scaled(net(x), 2.5).tanh().sum())
    for step in range(STEPS):
        world.train(run(world.values(step)), net)


@kind(gradients=False, captured=False, unlike_eager="AOTAutograd takes no custom operators that return views")
def custom_operators_that_return_views(world: World) -> None:
    def program(x: torch.Tensor) -> Any:
        row = torch.ops.kinds_of_programs.last_row(x * 1)
        return row + 1, torch.ops.kinds_of_programs.last_row(x)

    run = world.compile(program)
    for step in range(STEPS):
        x = world.values(step)
        _, view = found = run(x)
        world.note(found)
        view.add_(1)
        world.note(x)


_COUNTED: list[int] = [0]


@torch.library.custom_op("kinds_of_programs::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    _COUNTED[0] += 1
    return x * 2


@_counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@kind()
def custom_operators_next_to_cpu_tables(world: World) -> None:
    table = torch.arange(4.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        on_cpu = torch.ops.kinds_of_programs.counted(table)
        return torch.ops.kinds_of_programs.counted(x + table.to(x.device)) + on_cpu.to(x.device)

    run = world.compile(program)
    world.infer(run, between=lambda: table.add_(1))


_FAILING = [False]


@torch.library.custom_op("kinds_of_programs::failing", mutates_args=())
def _failing(x: torch.Tensor) -> torch.Tensor:
    if _FAILING[0]:
        raise MemoryError("as planned")
    return x * 2


@_failing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_failing.register_autograd(lambda ctx, gradient: torch.ops.kinds_of_programs.failing(gradient))


@kind()
def operators_that_fail_at_first(world: World) -> None:
    """Memory runs short: the program catches the error and goes on, with gradients and without."""
    net = world.module(nn.Linear(4, 4))
    for failing in (0, 1):
        torch.compiler.reset()
        run = world.compile(lambda x: torch.ops.kinds_of_programs.failing(net(x)))
        for step in range(STEPS + 2):
            try:
                _FAILING[0] = step == failing
                y = run(world.values(step))
                _FAILING[0] = step == failing + 2
                world.train(y, net)
            except MemoryError as error:
                world.note(str(error))
            finally:
                _FAILING[0] = False
            with torch.no_grad():
                world.note(run(world.values(step + 20)))
