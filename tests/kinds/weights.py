"""Change weights between calls: parts of one vector, masks, files, results, adapters."""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.nn.utils import prune, vector_to_parameters

from kinds.world import STEPS, World, kind


def _net(world: World) -> nn.Sequential:
    net: nn.Sequential = world.module(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)))
    return net


@kind(gradients=False)
def weights_in_one_vector(world: World) -> None:
    """Weights are views of a new vector in each call, in other alignments, as an evolution strategy sets them."""
    net = _net(world)
    run, size = world.compile(net), sum(p.numel() for p in net.parameters())
    for step in range(3 * STEPS):
        vector = world.values(step + 40, size + 3)[step % 3 : step % 3 + size]
        vector_to_parameters(vector, net.parameters())
        world.note(run(world.values(step)))


@kind()
def weights_under_masks(world: World) -> None:
    """A hook computes the weight in each call. Then the mask is made permanent, and the hook is gone."""
    net = _net(world)
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
    net = _net(world)
    run = world.compile(net)
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
    net = world.module(_Stateful(world))
    run = world.compile(net)
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
    net = world.module(_Adapted())
    run = world.compile(net)

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
