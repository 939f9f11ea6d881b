"""Use what autograd lets programs do, and steps with more than one forward and backward, or fewer, or later ones."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

import optimizations
from kinds.world import STEPS, World, kind, network


class Remembering(torch.autograd.Function):
    """Keeps numbers, a string and a tensor that is neither input nor output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, power: int, kind: str) -> Any:
        ctx.power, ctx.kind, ctx.between = power, kind, x.sin()
        ctx.save_for_backward(x, weight)
        count = torch.zeros(1, device=x.device)
        ctx.mark_non_differentiable(count)
        return x.sin() ** power * weight, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, unused: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        factor = 2.0 if ctx.kind == "twice" else 1.0
        one = gradient * weight * ctx.power * ctx.between ** (ctx.power - 1) * x.cos()
        return one * factor, (gradient * ctx.between**ctx.power).sum(0), None, None


class AddedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.add_(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient * 3


@kind()
def functions_with_state(world: World) -> None:
    weight = world.values(1, 4, grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        y, count = Remembering.apply(x, weight, 3, "twice")
        return y.sum() + count.sum()

    run = world.compile(program)
    for _, x in world.steps(grad=True):
        run(x).backward()
        world.note(x.grad, weight.grad)
        weight.grad = None


@kind(captured=False)
def functions_that_write_their_inputs(world: World) -> None:
    run = world.compile(lambda x, y: AddedInPlace.apply(x * 2, y).sin())
    for step in range(STEPS):
        x, y = world.values(step, grad=True), world.values(step + 30, grad=True)
        run(x, y).sum().backward()
        world.note(x.grad, y.grad)


@kind()
def gradients_of_gradients(world: World) -> None:
    """A gradient penalty: the inner gradient is taken of an uncompiled part, and of a compiled loss."""
    net = world.module(nn.Linear(4, 1))
    run = world.compile(lambda x: net(x).sigmoid())
    plain = nn.Sequential(net, nn.Tanh())
    for _, x in world.steps(grad=True):
        (slope,) = torch.autograd.grad(plain(x).sum(), x, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean() + run(x).mean()
        loss.backward()
        world.note(loss, x.grad)
        world.note_gradients(net)


@kind(captured=False, unlike_eager="AOTAutograd differentiates no backward again")
def gradients_of_compiled_gradients(world: World) -> None:
    """The backward of a compiled function is differentiated, which stock refuses."""
    run = world.compile(lambda x: (x**3).sin())
    for _, x in world.steps(grad=True):
        try:
            (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
            slope.sum().backward()
            world.note("differentiated", x.grad)
        except RuntimeError as error:
            world.note(str(error).splitlines()[0])


@kind()
def hooks_of_all_kinds(world: World) -> None:
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    seen: list[torch.Tensor] = []
    net[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    net[2].register_forward_hook(lambda module, inputs, output: output + 1)
    net[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    net[2].weight.register_hook(lambda gradient: gradient * 0.5)
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    run = world.compile(net)
    for step in range(STEPS):
        if step == 4:
            net[2].weight.register_hook(lambda gradient: gradient + 1)
        y = run(world.values(step))
        y.register_hook(lambda gradient, s=step: gradient * (s + 1))
        y.sum().backward()
        world.note(y, seen)
        seen.clear()
        world.note_gradients(net)


@kind()
def steps_in_hooks_behind_the_gradient(world: World) -> None:
    """Each parameter is updated and its gradient dropped as soon as it is there."""
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    run = world.compile(net)
    for step in range(STEPS + 2):
        run(world.values(step)).square().mean().backward()
        world.note([p.detach() for p in net.parameters()])


@kind()
def saved_tensors_packed_otherwise(world: World) -> None:
    net, run = world.compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    for step, x in world.steps(grad=True):
        if step % 3 == 2:
            y = run(x)
        else:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (t.device, t.to("cpu", copy=True)), lambda packed: packed[1].to(packed[0])
            ):
                y = run(x)
        world.train(y, net)
        world.note(x.grad)


@kind()
def saved_tensors_packed_once(world: World) -> None:
    """A store of copies by tensor, as what moves activations elsewhere keeps it, and an attribute on each."""
    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    run, copies = world.compile(net), WeakTensorKeyDictionary()

    def by_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in copies:
            copies[tensor] = tensor.detach().clone()
        return copies[tensor]

    def by_attribute(tensor: Any) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if not hasattr(tensor, "copy_of_the_programs"):
            tensor.copy_of_the_programs = tensor.detach().clone()
        return tensor.copy_of_the_programs

    for step in range(4 * STEPS):
        pack = by_tensor if step % 8 < 4 else by_attribute
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            y = run(world.values(step))
        world.train(y, net)
        del y


@kind()
def backwards_under_compiled_autograd(world: World) -> None:
    import torch._dynamo

    net = world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    seen: list[torch.Tensor] = []
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 2))

    def step_of(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss.detach()

    run = world.compile(step_of)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for step in range(STEPS):
            world.note(run(world.values(step)), seen)
            seen.clear()
            world.note_gradients(net)


@kind()
def alternating_modes_of_gradients(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: net(x).relu())
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)
    for step in range(4 * STEPS):
        with modes[step % 3]():
            y = run(world.values(step))
            world.note(y, y.requires_grad, y.is_inference())
            if y.requires_grad:
                y.sum().backward()
                world.note_gradients(net)


def _backward_or_error(world: World, loss: torch.Tensor, *leaves: torch.Tensor) -> None:
    try:
        loss.backward()
        world.note([leaf.grad for leaf in leaves])
    except RuntimeError as error:
        world.note(str(error).split(":")[0])


@kind()
def results_written_before_the_backward(world: World) -> None:
    """The backward reads two of the three results. Later some are kept as well."""
    run, kept = world.compile(lambda x: (x.exp(), x.tanh(), x * 2)), []
    for step, x in world.steps(4 * STEPS, grad=True):
        results = run(x)
        if step > STEPS and step % 2:
            with torch.no_grad():
                results[step // 2 % 3].mul_(2)
        if step > 2 * STEPS:
            kept.append(results[:2])
        _backward_or_error(world, sum(one.sum() for one in results), x)
    world.note(kept)


@kind()
def results_written_after_another_function_read_them(world: World) -> None:
    """The second function saves the result of the first, or a view of it, for its backward."""
    weight = world.values(80, 4, grad=True)
    make, read = world.compile(lambda x: x * 2), world.compile(lambda y: (y * weight).sum())
    for step, x in world.steps(4 * STEPS, grad=True):
        y = make(x)
        loss = read(y[1:] if step % 4 > 1 else y)
        if step > STEPS and step % 2:
            with torch.no_grad():
                y.mul_(3)
        _backward_or_error(world, loss, x, weight)
        weight.grad = None
        del y, loss


@kind()
def inputs_made_in_inference_mode(world: World) -> None:
    with torch.inference_mode():
        weight, table = world.values(3, 4, 4), torch.arange(4.0)
    run = world.compile(lambda x: x @ weight + table.to(x.device))
    for step in range(STEPS):
        with torch.inference_mode(step % 2 == 0):
            x = world.values(step)
        with torch.no_grad():
            world.note(run(x))


@kind(gradients=False)
def views_of_results_kept(world: World) -> None:
    def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ x.t()
        return y[0], y[1:], y.t()

    run, kept = world.compile(rows), []
    for step in range(14):
        first, others, turned = run(world.values(step))
        if step % 4 == 1:
            others.add_(1)
        kept += [(others,), (first,), (turned[0],), ()][step % 4]
    world.note(kept)


@kind()
def two_forwards_in_each_step(world: World) -> None:
    net, run = world.compiled(network())
    for step in range(8):
        world.train(run(world.values(step)) * run(world.values(step + 30)), net)


@kind(ends_stock=True)
def several_forwards_in_some_steps(world: World) -> None:
    net, run = world.compiled(network())
    for step in range(12):
        forwards = range(1 + (step % 4 == 3) + (step % 5 == 4))
        losses = [run(world.values(20 * step + index)).square().mean() for index in forwards]
        for loss in losses:
            loss.backward()
        world.note_gradients(net)


@kind(ends_stock=True)
def a_backward_that_comes_steps_later(world: World) -> None:
    net, run = world.compiled(network())
    later: torch.Tensor | None = None
    for step in range(14):
        loss = run(world.values(step)).square().mean()
        if step % 5 == 3:
            later = loss
            continue
        loss.backward()
        if step % 5 == 0 and later is not None:
            later.backward()
            later = None
        world.note_gradients(net)


@kind(ends_stock=True)
def graphs_retained_in_some_steps(world: World) -> None:
    """Buffers that a backward may write over are PyTorch's reason to refuse it."""
    net, run = world.compiled(network())
    with functorch_config.patch(donated_buffer=False):
        for step in range(14):
            loss = run(world.values(step)).square().mean()
            loss.backward(retain_graph=step % 5 == 3)
            if step % 5 == 3:
                loss.backward()
            world.note_gradients(net)


@kind()
def forwards_without_a_backward(world: World) -> None:
    net, run = world.compiled(network())
    for step in range(16):
        result = run(world.values(step))
        if step % 3 == 2:
            result.sum().backward()
            world.note_gradients(net)
        world.note(result)


@kind()
def resets_while_a_backward_is_pending(world: World) -> None:
    net, run = world.compiled(network())
    for reset in (lambda: None, lambda: None, lambda: None, optimizations.reset, torch.compiler.reset, lambda: None):
        result = run(world.values(3))
        reset()
        world.train(result, net)


@kind()
def hooks_that_change_and_raise(world: World) -> None:
    net, run = world.compiled(network())

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("not this one")

    for step in range(10):
        result = run(world.values(step))
        result.register_hook(refuse if step % 4 == 2 else lambda gradient: gradient * 3)
        try:
            result.sum().backward()
        except ValueError as error:
            world.note(str(error))
        world.note(result)
        world.note_gradients(net)
