"""Change state between calls: results written and passed on, caches of generation loops, weights, regions, stances."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune, vector_to_parameters

from kinds.world import STEPS, World, kind, network


def _layers(world: World, count: int) -> list[nn.Linear]:
    return [world.module(nn.Linear(4, 4)) for _ in range(count)]


@kind()
def nested_regions(world: World) -> None:
    layers, table = _layers(world, 3), torch.arange(4.0)

    @torch.compiler.nested_compile_region
    def block(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight.t() + bias) + table.to(x.device)

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = block(layer.weight, layer.bias, x)
        return x

    run = world.compile(program)
    for step in range(STEPS):
        world.train(run(world.values(step)), *layers)
        with torch.no_grad():
            world.note(run(world.values(step + 20)))
        table.add_(1)


@kind(gradients=False)
def alternating_stances(world: World) -> None:
    run = world.compile(world.module(nn.Linear(4, 4)))
    for step in range(2 * STEPS):
        with torch.compiler.set_stance("force_eager" if step % 3 == 2 else "default"):
            world.note(run(world.values(step)))
    with torch.compiler.set_stance("eager_on_recompile"):
        world.note(run(world.values(3, 7, 4)), run(world.values(4)))


@kind(gradients=False)
def calls_in_ever_new_orders(world: World) -> None:
    runs = [world.compile(layer) for layer in _layers(world, 3)]
    for step, x in world.steps(4 * STEPS):
        for number in [(0, 1, 2), (0, 2), (1,), (2, 1, 0), (0, 0, 1)][step % 5]:
            x = runs[number](x)
        world.note(x)


@kind(gradients=False)
def results_written_between_graphs(world: World) -> None:
    first = world.compile(lambda x: (x * 2, x + 1))
    second = world.compile(lambda a, b: a @ b.t())
    for step in range(3 * STEPS):
        a, b = first(world.values(step))
        if step % 3:
            a.add_(1)
        if step % 4 == 3:
            b = b.t().contiguous().t()
        world.note(second(a, b))
        if step % 5 == 4:
            a.zero_()
            world.note(second(a, b), a, b)


@kind(gradients=False, captured=False)
def written_inputs_that_are_results(world: World) -> None:
    def program(x: torch.Tensor) -> Any:
        x.mul_(1.5)
        return x.sum(0), x * 2

    run = world.compile(program)
    x = world.values(0)
    for step in range(3 * STEPS):
        total, y = run(x)
        world.note(total, y, x)
        x = y if step % 3 else world.values(step)


class _Buffers(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, device=world.device))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=world.device))
        self.plain = torch.zeros(4, device=world.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.5)
        self.calls += 1
        self.plain.add_(self.mean)
        return x - self.mean * self.calls + self.plain


@kind(gradients=False)
def buffers_written_from_both_sides(world: World) -> None:
    net = _Buffers(world)
    run = world.compile(net)
    for step in range(3 * STEPS):
        world.note(run(world.values(step)), net.mean, net.calls, net.plain)
        if step % 4 == 3:
            net.mean.zero_()
        if step % 5 == 4:
            net.mean = torch.ones(4, device=world.device)
        if step % 6 == 5:
            net.plain = net.plain * 0.5
        if step == 9:
            net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})


@kind()
def parameters_updated_inside(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(gradient * 0.1)
        return loss.detach()

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(world.values(step)), [p.detach() for p in net.parameters()])


@kind(gradients=False)
def one_result_in_two_places(world: World) -> None:
    def program(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y, [y], {"row": y[0], "input": x}

    run = world.compile(program)
    for step in range(STEPS):
        one, other, inside, rows = run(world.values(step))
        world.note(one is other, one is inside[0], one, rows)
        one.add_(1)
        world.note(other, inside, rows)


@kind()
def leaves_made_inside(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor) -> Any:
        y = net(x)
        return y.detach(), y.detach().clone().requires_grad_(), y

    run = world.compile(program)
    for step in range(STEPS):
        detached, leaf, y = run(world.values(step))
        (leaf.sum() * 2 + y.sum()).backward()
        world.note(detached, detached.requires_grad, leaf.grad, leaf.is_leaf, y)
        world.note_gradients(net)


@kind()
def backwards_with_given_gradients(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda x: (net(x), net(x).sin()))
    for step in range(2 * STEPS):
        both = run(world.values(step))
        dense, one_row = world.values(step + 40).t().contiguous().t(), world.values(step + 40, 1, 4).expand(3, 4)
        count = 2 if step % 3 else 1
        torch.autograd.backward(both[:count], [dense if step % 2 else one_row] * count)
        world.note(both)
        world.note_gradients(net)


@kind()
def gradients_added_in_place(world: World) -> None:
    net, run = world.compiled(nn.Linear(4, 4))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    kept = [p.grad for p in net.parameters()]
    for step in range(STEPS):
        run(world.values(step)).sum().backward()
        world.note(kept, [p.grad is one for p, one in zip(net.parameters(), kept, strict=True)])
        if step % 3 == 2:
            for one in kept:
                one.zero_()


ORDER = (1, 1, 2)
"""The beam that each beam goes on from."""


def _reordered(cache: torch.Tensor) -> torch.Tensor:
    return cache.index_select(0, torch.tensor(ORDER, device=cache.device))


@kind(gradients=False, captured=False)
def caches_written_from_a_position_on(world: World) -> None:
    """The position is a number, and goes back where a guess was wrong."""
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor, cache: torch.Tensor, length: int) -> Any:
        cache[:, length : length + x.shape[1]] = net(x)
        return cache[:, : length + x.shape[1]].sum(1), length + x.shape[1]

    run = world.compile(program)
    for sequence in range(2):
        cache, length = world.moved(torch.zeros(3, 12, 4)), 0
        for step, count in enumerate((4, 1, 3, 1, 2)):
            found, length = run(world.values(20 * sequence + step, 3, count, 4), cache, length)
            world.note(found, cache, length)
            length -= step == 2


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(3, 10, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.keys.index_copy_(1, self.position, torch.tanh(self.linear(x))[:, None])
        weights = self.keys.exp()
        self.position.add_(1)
        self.keys[:, -1] = weights.mean(1)
        return (weights * self.keys).sum(1), self.position, self.keys[:, :2]


@kind(gradients=False)
def caches_that_modules_hold(world: World) -> None:
    """Results that are the cache, or views of it, are kept; the cache is reordered and replaced."""
    net, kept = world.module(_Cached()), []
    run = world.compile(net)
    for sequence in range(3):
        for step in range(8):
            found, position, first = run(world.values(20 * sequence + step))
            world.note(found, position, first, position is net.position, net.keys)
            kept = [*kept[-2:], first if step % 2 else found]
            world.note(kept)
            if step == 4:
                net.keys.copy_(_reordered(net.keys))
        net.position.zero_()
        if sequence == 1:
            net.keys = world.moved(torch.zeros(3, 10, 4))


@kind(gradients=False)
def caches_that_grow(world: World) -> None:
    """The result of one call is the input of the next, cut back and reordered."""
    net = world.module(nn.Linear(4, 4))

    def program(x: torch.Tensor, cache: torch.Tensor) -> Any:
        grown = torch.cat([cache, net(x)], 1)
        return grown.mean(1), grown

    run = world.compile(program)
    for sequence in range(3):
        cache = world.moved(torch.zeros(3, 2, 4))
        for step in range(6):
            found, cache = run(world.values(20 * sequence + step, 3, 1 + step % 3, 4), cache)
            world.note(found, cache)
            if step % 3 == 2:
                cache = cache[:, :-1]
            if step % 4 == 3:
                cache = _reordered(cache)


@kind(gradients=False)
def results_kept_written_and_passed_back(world: World) -> None:
    run = world.compile(lambda x, y: (x * 2 + y, (x - y).t()))
    ring: list[Any] = []
    for step in range(24):
        x = ring[step % len(ring)][0] if len(ring) > 3 else world.values(step)
        found = run(x, world.values(step + 50))
        version = found[0]._version
        found[0].add_(1)
        world.note(found, found[0]._version - version, [one.stride() for one in found])
        ring = [*ring[-4:], found]
        if step % 4 == 3:
            ring[0][0].mul_(0.5)
        world.note(ring)


@kind(gradients=False, captured=False)
def inputs_written_over_and_over(world: World) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(y)
        first = x.tanh()
        x.mul_(2)
        second = (first + x).exp()
        y.copy_(first)
        x[0].sub_(1)
        return second.flip(0) + y, x.t(), first

    run, kept = world.compile(program), []
    for step in range(16):
        x, y = world.values(step) * 0.1, world.values(step + 40) * 0.1
        found = run(x, y)
        kept = [*kept[-2:], found[2]]
        world.note(found, x, y, kept)


class _Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(1, 8, 4))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.keys[:, positions] = self.linear(x)
        return torch.softmax(x @ self.keys.transpose(1, 2), -1) @ self.keys


@kind(gradients=False)
def caches_written_at_a_tensor_of_positions(world: World) -> None:
    """The first of several graphs returns its arguments, and views of them, to the later ones."""
    net, run = world.compiled(_Indexed())
    for step in range(2 * STEPS):
        world.note(run(world.values(step, 1, 1, 4), world.moved(torch.tensor([step % 8]))), net.keys)


@kind(gradients=False)
def weights_in_one_vector(world: World) -> None:
    """Weights are views of a new vector in each call, in other alignments, as an evolution strategy sets them."""
    net = world.module(network())
    run, size = world.compile(net), sum(p.numel() for p in net.parameters())
    for step in range(3 * STEPS):
        vector = world.values(step + 40, size + 3)[step % 3 : step % 3 + size]
        vector_to_parameters(vector, net.parameters())
        world.note(run(world.values(step)))


@kind()
def weights_under_masks(world: World) -> None:
    """A hook computes the weight in each call. Then the mask is made permanent, and the hook is gone."""
    net = world.module(network())
    prune.l1_unstructured(net[0], "weight", amount=0.5)
    run = world.compile(net)
    for step in range(2 * STEPS):
        world.train(run(world.values(step)), net)
        if step == STEPS:
            prune.l1_unstructured(net[0], "weight", amount=0.2)
        if step == STEPS + 3:
            prune.remove(net[0], "weight")


@kind(gradients=False)
def weights_from_files(world: World) -> None:
    net, run = world.compiled(network())
    with tempfile.TemporaryDirectory() as folder:
        for step in range(2 * STEPS):
            world.note(run(world.values(step)))
            if step % 3 == 2:
                torch.save({name: value.cpu() * 1.1 for name, value in net.state_dict().items()}, f"{folder}/{step}")
                state = torch.load(f"{folder}/{step}", mmap=True, map_location=world.device)
                net.load_state_dict(state, assign=True)


class _Stateful(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(3, 4))
        self.plain = torch.zeros(3, 4, device=world.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + self.state + self.plain)


@kind()
def results_that_become_weights_and_states(world: World) -> None:
    net, run = world.compiled(_Stateful(world))
    for step in range(3 * STEPS):
        y = run(world.values(step))
        y.sum().backward()
        world.note(y)
        world.note_gradients(net)
        if step % 3 == 0:
            net.state = y.detach()
        elif step % 3 == 1:
            net.plain = y.detach()
        else:
            net.linear.bias.data = y.detach()[0]


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        self.active: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        for name in self.active:
            result = result + x @ self.down[name] @ self.up[name]
        return result


@kind(gradients=False)
def adapters_added_merged_and_dropped(world: World) -> None:
    net, run = world.compiled(_Adapted())

    def add(name: str, seed: int) -> None:
        net.down[name] = nn.Parameter(world.values(seed, 4, 2))
        net.up[name] = nn.Parameter(world.values(seed + 1, 2, 4))

    for step in range(4 * STEPS):
        if step == 4:
            add("one", 30)
            net.active.append("one")
        if step == 8:
            add("two", 32)
            net.active = ["two", "one"]
        if step == 12:
            net.base.weight.data += (net.down["two"] @ net.up["two"]).T
            net.active, _, _ = ["one"], net.down.pop("two"), net.up.pop("two")
        if step > 16:
            add("one", 100 + 2 * step)
        world.note(run(world.values(step)))
