"""Use results and modules as callers do; and transform, trace or check compiled functions from outside."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize

from kinds.world import STEPS, World, kind

CHANGES: dict[str, Callable[[Any], Any]] = {
    "turned": lambda y: y.t_(),
    "squeezed": lambda y: y.unsqueeze_(0).squeeze_(),
    "extended": lambda y: y.unsqueeze_(1),
    "strided": lambda y: y.as_strided_((2, 2), (1, 2)),
    "resized": lambda y: y.resize_(2, 2),
    "trained": lambda y: y.requires_grad_(),
    "trained_on": lambda y: (y.requires_grad_() * 2).sum().backward(),
    "set": lambda y: y.set_(torch.zeros(5, device=y.device)),
    "exchanged": lambda y: setattr(y, "data", torch.ones(7, device=y.device)),
    "cut": lambda y: setattr(y, "data", y.data[:1]),
    "hooked": lambda y: y.requires_grad_().register_hook(lambda gradient: gradient * 3),
    "detached": lambda y: y.detach_().zero_(),
    "renamed": lambda y: y.rename_("a", "b"),
}
"""Ways to change a result that is a matrix, beyond its values. Memory of a graph's pool cannot be resized."""


def _changed_results(world: World, *, trained: bool) -> None:
    for name, change in CHANGES.items():
        net = world.module(nn.Linear(4, 4))
        run = world.compile(net)
        with torch.set_grad_enabled(trained):
            for step in range(STEPS):
                y = run(world.values(step))
                world.note(name, y, tuple(y.shape), y.stride(), y.requires_grad, y.is_leaf, y.names)
                if y.requires_grad:
                    y.sum().backward()
                    world.note_gradients(net)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        with torch.no_grad() if name not in ("trained_on",) else torch.enable_grad():
                            change(y)
                    except RuntimeError as error:
                        world.note(type(error).__name__)
                del y


@kind()
def results_changed_beyond_their_values(world: World) -> None:
    _changed_results(world, trained=False)


@kind()
def trained_results_changed_beyond_their_values(world: World) -> None:
    _changed_results(world, trained=True)


@kind()
def parameters_swapped_and_converted(world: World) -> None:
    net, run = world.compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    changes: list[Callable[[], Any]] = [
        lambda: torch.utils.swap_tensors(net[0].weight, nn.Parameter(world.values(90, 4, 4))),
        lambda: net[0].requires_grad_(False),
        lambda: net[0].requires_grad_(True),
        lambda: net.double().float(),
        lambda: setattr(net[2], "bias", None),
        lambda: setattr(net[2], "bias", nn.Parameter(world.values(91, 4))),
        lambda: net[0].register_parameter("weight", nn.Parameter(world.values(92, 4, 4))),
        lambda: net[0]._parameters.__setitem__("bias", nn.Parameter(world.values(93, 4))),
        lambda: object.__setattr__(net[0], "bias", net[0].bias),
        lambda: setattr(net[2], "weight", net[0].weight),
        lambda: net.apply(lambda one: nn.init.ones_(one.weight) if isinstance(one, nn.Linear) else None),
        lambda: setattr(net, "1", nn.ReLU()),
        lambda: parametrizations.weight_norm(net[2]),
        lambda: parametrize.remove_parametrizations(net[2], "weight"),
        lambda: net[2].weight.untyped_storage().copy_(torch.zeros(4, 4, device=world.device).untyped_storage()),
        lambda: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
    ]
    for change in changes:
        for step in range(4):
            world.train(run(world.values(step)), net)
        change()


@kind(gradients=False)
def parameters_freed_and_brought_back(world: World) -> None:
    """The storage is resized to nothing and filled again somewhere else, as sharded training does."""
    net = world.module(nn.Linear(4, 4, bias=False))
    kept = net.weight.detach().clone()
    run = world.compile(net)
    others = []
    for step in range(2 * STEPS):
        storage = net.weight.untyped_storage()
        storage.resize_(0)
        others.append(torch.full((4, 4), float(step), device=world.device))
        storage.resize_(64)
        net.weight.copy_(kept * (step + 1))
        world.note(run(world.values(step)))


@kind(captured=False)
def tensors_given_other_memory_inside(world: World) -> None:
    """A compiled function gives an input and a parameter other memory, or frees an input's. No replay repeats it."""
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.data = y * 2
        net.weight.data = net.weight.data * 0.5 + 1
        return net(x).tanh()

    def freeing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.untyped_storage().resize_(0)
        return (y @ y.t()).sin() @ y

    run, run_freeing, kept = world.compile(program), world.compile(freeing), world.values(90)
    for step in range(STEPS):
        for x in (world.values(step), kept):
            world.train(run(x, world.values(step + 10)), net)
            world.note(x, net.weight)
        with torch.no_grad():
            x = world.values(step).clone()
            world.note(run_freeing(x, world.values(step + 10)), x.untyped_storage().nbytes())


@kind()
def lazy_and_tied_modules(world: World) -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 4))
    world.module(net)(world.values(0))
    net[2].weight = net[0].weight
    net.lists = nn.ParameterList([nn.Parameter(world.values(94, 4))])
    net.dicts = nn.ParameterDict({"scale": nn.Parameter(world.values(95, 4))})
    run = world.compile(lambda x: net[2](net[1](net[0](x))) * net.dicts["scale"] + net.lists[0])
    for step in range(STEPS):
        world.train(run(world.values(step)), net)
        if step == 3:
            net.lists[0] = nn.Parameter(world.values(96, 4))


@kind(gradients=False)
def results_in_cycles_and_containers(world: World) -> None:
    """Results that nothing but a cycle, an exception or a generator holds."""

    class Node:
        def __init__(self, value: torch.Tensor) -> None:
            self.value, self.me = value, self

    run = world.compile(world.module(nn.Linear(4, 4)))

    def stream() -> Any:
        for step in range(2 * STEPS):
            yield run(world.values(step))

    for step, y in enumerate(stream()):
        node = Node(y)
        world.note(y)
        if step % 3 == 2:
            try:
                raise ValueError(y)
            except ValueError as error:
                world.note(error.args[0])
        world.note(node.me.value)


@kind(gradients=False)
def the_same_result_passed_twice(world: World) -> None:
    run = world.compile(lambda x, y: (x * 2 + y, y.sin()))
    for step, x in world.steps(2 * STEPS):
        first, second = run(x, x if step % 2 else world.values(step + 20))
        third, fourth = run(first, first if step % 3 else second)
        world.note(third, fourth)
        first.copy_(third)
        world.note(run(first, third))


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
    for _, x in world.steps():
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
    for _, x in world.steps():
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
    for _, x in world.steps(grad=True):
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
    _, run = world.compiled(nn.Linear(4, 4))
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
