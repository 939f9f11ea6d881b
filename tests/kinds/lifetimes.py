"""Hold results and weights: attributes, capsules, storages, errors, models that are gone, inner functions."""

from __future__ import annotations

import gc
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from kinds.world import STEPS, World, kind


@kind()
def results_with_something_attached(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    trained, plain = world.compile(net), world.compile(lambda x: x * 2)
    for step in range(STEPS + 2):
        y = trained(world.values(step))
        world.note(y.retains_grad, sorted(vars(y)))
        if step % 2:
            y.retain_grad()
            y.name_of_the_callers_own = step
        y.square().sum().backward()
        world.note(y.grad if step % 2 else None)
        world.note_gradients(net)
        z = plain(world.values(step))
        world.note(z.grad is None, sorted(vars(z)))
        z.requires_grad_()
        z.square().sum().backward()
        world.note(z.grad)
        z.requires_grad_(False)
        z.name_of_the_callers_own = step
        del y, z


@kind()
def results_without_a_history_with_something_attached(world: World) -> None:
    """Indices and a detached result of a forward that is trained: attributes, gradients, weak references."""
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor) -> Any:
        y = net(x)
        return y, y.argmax(1), y.detach() * 2

    run, kept = world.compile(program), WeakTensorKeyDictionary()
    for step in range(3 * STEPS):
        y, index, detached = run(world.values(step))
        world.note(sorted(vars(index)), sorted(vars(detached)), detached.grad, detached.requires_grad)
        for result in (index, detached):
            if step % 3 == 0:
                result.name_of_the_callers_own = step
            if step % 3 == 1:
                world.note(result in kept, kept.setdefault(result, result.sum()))
        if step % 3 == 2:
            (detached.requires_grad_() * 3).sum().backward()
            detached.requires_grad_(step % 2 == 0)
        y.sum().backward()
        world.note_gradients(net)
        del y, index, detached, result


@kind()
def hooks_left_on_results_that_require_nothing_any_more(world: World) -> None:
    run = world.compile(lambda x: x.sin() * x)
    for step in range(4 * STEPS):
        with torch.no_grad():
            y = run(world.values(step))
        y.requires_grad_()
        if step % 4 == 0:
            y.register_hook(torch.neg)
        y.detach_().requires_grad_()
        (y * 3).sum().backward()
        world.note(y.grad)
        y.detach_().grad = None
        del y


@kind()
def models_gone_before_their_results(world: World) -> None:
    kept = []
    for number in range(3):
        net = world.module(nn.Linear(4, 4))
        run = world.compile(net)
        with torch.no_grad():
            for step in range(STEPS):
                y = run(world.values(step))
        for _ in range(STEPS):
            loss = run(world.values(number)).square().sum()
            net.zero_grad()
            loss.backward(retain_graph=True)
        kept.append((y, y.clone()))
        parameters = list(net.parameters())
        del net, run, y
        gc.collect()
        if world.device != "cpu":
            torch.cuda.empty_cache()
        kept.append((world.values(number, 64, 64) * 0, torch.zeros_like(world.values(number, 64, 64))))
        loss.backward()
        world.note([parameter.grad for parameter in parameters])
    for result, expected in kept:
        world.note(result, torch.equal(result, expected))


@kind()
def weights_gone_with_their_model(world: World) -> None:
    """They stay valid, also those of the last model, after which nothing is called."""
    for number in range(3):
        net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        run = world.compile(net)
        for step in range(STEPS):
            run(world.values(step)).square().sum().backward()
            with torch.no_grad():
                world.note(run(world.values(step)))
        weights = [weakref.ref(parameter) for parameter in net.parameters()]
        del net, run
        gc.collect()
        world.note(number, [weight() is None for weight in weights])


@kind()
def values_kept_for_results(world: World) -> None:
    """Entries of a dictionary for tensors that are alive: results of an inference and of a training, and gradients."""
    net = world.module(nn.Linear(4, 4))
    trained, plain = world.compile(net), world.compile(lambda x: x * 2)
    kept = WeakTensorKeyDictionary()

    def sum_of(tensor: torch.Tensor) -> Any:
        if found := tensor in kept:
            return found, kept[tensor]
        kept[tensor] = tensor.detach().sum()
        return found, kept[tensor]

    for step, x in world.steps(2 * STEPS, grad=True):
        y = trained(x)
        world.note(sum_of(y))
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        world.note(sum_of(gradient))
        del y, gradient
        with torch.no_grad():
            z = plain(world.values(step))
        world.note(sum_of(z), sum_of(z))
        del z


_INNER: dict[str, Any] = {}


@torch.library.custom_op("kinds_of_programs::by_another", mutates_args=())
def _by_another(x: torch.Tensor) -> torch.Tensor:
    return _INNER["run"](x).clone()


_by_another.register_fake(torch.empty_like)


@kind()
def operators_that_call_compiled_functions(world: World) -> None:
    inner = _INNER["run"] = world.compile(lambda x: x.sin() * 2)
    outer = world.compile(lambda x: torch.ops.kinds_of_programs.by_another(x + 1) * 3)
    try:
        for step in range(STEPS):
            world.note(outer(world.values(step)), inner(world.values(step + 30)))
    finally:
        _INNER.clear()


@torch.library.custom_op("kinds_of_programs::runs_backward", mutates_args=())
def _runs_backward(x: torch.Tensor) -> torch.Tensor:
    _INNER.pop("loss").backward()
    return x.clone()


_runs_backward.register_fake(torch.empty_like)


@kind()
def operators_that_run_pending_backwards(world: World) -> None:
    """Gradients are filled, which the operator's schema does not say."""
    net, trained = world.compiled(nn.Linear(4, 4))
    outer = world.compile(lambda x: torch.ops.kinds_of_programs.runs_backward(x + 1) * 3)
    for step in range(STEPS):
        _INNER["loss"] = trained(world.values(step)).square().sum()
        with torch.no_grad():
            world.note(outer(world.values(step + 30)))
        world.note_gradients(net)


def _results(world: World) -> Any:
    """Yield results of a compiled module one by one, without a reference of its own."""
    run = world.compile(world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    with torch.no_grad():
        for step in range(2 * STEPS):
            yield run(world.values(step))


@kind()
def results_in_capsules(world: World) -> None:
    capsules = [torch.utils.dlpack.to_dlpack(y) for y in _results(world)]
    world.note([torch.from_dlpack(one) for one in capsules])


@kind()
def results_of_which_only_the_memory_is_referenced(world: World) -> None:
    storages = [y.untyped_storage() for y in _results(world)]
    world.note([torch.empty(0, device=world.device).set_(one, 0, (3, 4), (4, 1)) for one in storages])


@kind()
def results_in_backwards_of_others(world: World) -> None:
    weight = world.values(50, grad=True)
    losses = [(weight * y).sum() for y in _results(world)]
    for loss in losses:
        loss.backward()
        world.note(weight.grad)
        weight.grad = None


@kind()
def results_in_errors_that_are_kept(world: World) -> None:
    def refused(y: torch.Tensor) -> TracebackType | None:
        try:
            raise ValueError("as ever")
        except ValueError as error:
            return error.__traceback__

    traces = [refused(y) for y in _results(world)]
    world.note([trace.tb_frame.f_locals["y"] for trace in traces if trace is not None])


@kind()
def results_that_become_parameters(world: World) -> None:
    """Each is trained, through the function that it came from."""
    run, found = world.compile(world.module(nn.Linear(4, 4))), []
    for step in range(STEPS):
        with torch.no_grad():
            latent = nn.Parameter(run(world.values(step)))
        optimizer = torch.optim.SGD([latent], lr=0.1)
        for _ in range(2):
            run(latent).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(latent)
    world.note(found)
