"""Compiled functions inside of what transforms, traces or checks them from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from kinds.world import STEPS, World, kind


def _said(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type of its error: PyTorch refuses some of these."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


@kind(captured=False)
def transforms_around_a_compiled_function(world: World) -> None:
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    run = world.compile(lambda x: net(x))
    for step in range(STEPS):
        x = world.values(step)
        world.note(run(x))
        world.note(_said(lambda x=x: torch.func.grad(lambda x: run(x).sum())(x)))
        world.note(_said(lambda x=x: torch.func.vmap(run)(x)))
        world.note(_said(lambda x=x: torch.func.jvp(run, (x,), (torch.ones_like(x),))))
        world.note(_said(lambda x=x: torch.autograd.functional.jacobian(run, x)))
        world.note(_said(lambda x=x: torch.autograd.functional.vjp(run, x, torch.ones_like(x))))


@kind(captured=False)
def dual_numbers(world: World) -> None:
    run = world.compile(lambda x: x.sin() * 2)

    def is_right_or_refused(x: torch.Tensor) -> bool:
        with forward_ad.dual_level():
            try:
                found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones_like(x))))
            except NotImplementedError:  # graphs compute no derivatives
                return True
            return found.tangent is not None and torch.allclose(found.tangent, 2 * x.cos())

    for step in range(STEPS):
        world.note(run(world.values(step)))
        world.note(is_right_or_refused(world.values(step + 20)))


@kind(gradients=False, captured=False, unlike_eager="Dynamo does not compile while something else traces")
def tracers_around_a_compiled_function(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: net(x).relu())
    for step in range(STEPS):
        x = world.values(step)
        world.note(run(x))
        world.note(_said(lambda x=x: make_fx(run)(x)(x + 1)))
        world.note(_said(lambda x=x: torch.jit.trace(run, x)(x + 1)))
        world.note(_said(lambda x=x: torch.fx.symbolic_trace(run)(x + 1)))


@kind()
def gradients_that_are_checked(world: World) -> None:
    weight = world.values(60, 4, 4, dtype=torch.float64, grad=True)
    run = world.compile(lambda x: torch.tanh(x @ weight))
    for step in range(STEPS):
        x = world.values(step, 2, 4, dtype=torch.float64, grad=True)
        world.note(torch.autograd.gradcheck(run, (x,), fast_mode=step % 2 == 0))


@kind()
def vectorized_jacobians(world: World) -> None:
    """Backwards of a recorded forward, many at once: `is_grads_batched`."""
    weight = world.values(61, 4, 4, grad=True)
    run = world.compile(lambda x: torch.sin(x @ weight))
    for step in range(STEPS):
        x = world.values(step, grad=True)
        y = run(x)
        rows = torch.eye(12, device=world.device).reshape(12, 3, 4)
        try:
            world.note(torch.autograd.grad(y, x, rows, retain_graph=True, is_grads_batched=True)[0])
        except RuntimeError:
            world.note(torch.stack([torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in rows]))


@kind()
def exceptions_between_and_inside_calls(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = net(x)
        if fails:
            raise ValueError("as planned")
        return y.relu()

    run = world.compile(program)
    for step in range(2 * STEPS):
        try:
            y = run(world.values(step), step % 3 == 2)
            if step % 4 == 3:
                (y.sum() + world.values(0, 7)).backward()  # of several numbers
            y.sum().backward()
            world.note(y)
            world.note_gradients(net)
        except (ValueError, RuntimeError) as error:
            world.note(type(error).__name__)


@kind(gradients=False)
def wrong_calls(world: World) -> None:
    """Shapes, dtypes and arguments that do not fit raise what they raise, and the next call is served."""
    net = world.module(nn.Linear(4, 4))
    run = world.compile(net)
    wrong: list[Callable[[], Any]] = [
        lambda: run(world.values(0, 3, 5)),
        lambda: run(world.values(0, 3, 4).double()),
        lambda: run(None),
        lambda: run(),
        lambda: run(world.values(0), 3),
        lambda: run(world.whole(0, 5)),
    ]
    for step in range(STEPS):
        world.note(run(world.values(step)))
        try:
            wrong[step % len(wrong)]()
            world.note("no error")
        except Exception as error:
            world.note("an error" if isinstance(error, (RuntimeError, TypeError)) else type(error).__name__)
