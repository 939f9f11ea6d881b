"""Tensors that are not plain ones: wrapper subclasses, DTensor, nested, sparse, complex, quantized, narrow dtypes."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from kinds.world import STEPS, World, kind


class Scaled(torch.Tensor):
    """An int8 matrix and the scale of each row, as weight-only quantization has them."""

    @staticmethod
    def __new__(cls: Any, whole: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, whole.shape, strides=whole.stride(), dtype=scale.dtype, device=whole.device
        )

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor) -> None:
        self.whole, self.scale = whole, scale

    @classmethod
    def of(cls, dense: torch.Tensor) -> Scaled:
        scale = dense.detach().abs().amax(1, keepdim=True) / 127
        return cls((dense.detach() / scale).round().to(torch.int8), scale)

    def dense(self) -> torch.Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["whole"], inner["scale"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return cls(func(args[0].whole), func(args[0].scale))
        args, kwargs = pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _both(pair: Any) -> list[torch.Tensor]:
    return [pair.a, pair.b]


@kind()
def quantized_weights(world: World) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(Scaled.of(layer.weight.to(world.device)), requires_grad=False)
        layer.bias.data = layer.bias.data.to(world.device)
    run = world.compile(net)
    with torch.no_grad():
        for step in range(STEPS):
            if step == 4:
                dense = world.values(70, 6, 4)
                net[0].weight = nn.Parameter(Scaled.of(dense), requires_grad=False)
            world.note(run(world.values(step)))


@kind()
def pairs_that_are_trained(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    net.weight = nn.Parameter(TwoTensor(world.values(72, 4, 4), world.values(73, 4, 4)))
    net.bias = nn.Parameter(TwoTensor(world.values(74, 4), world.values(75, 4)))
    run = world.compile(net)
    for step in range(STEPS):
        loss = run(world.values(step)).square().sum()
        loss.backward()
        world.note(_both(loss), *(_both(parameter.grad) for parameter in net.parameters()))
        net.zero_grad()


@kind(gradients=False, captured=False)
def pairs_that_are_written(world: World) -> None:
    def program(pair: Any, x: torch.Tensor) -> Any:
        pair.mul_(2)
        return pair + x

    run = world.compile(program)
    for step in range(STEPS):
        pair = TwoTensor(world.values(step), world.values(step + 40))
        world.note(_both(run(pair, world.values(step + 20))), _both(pair))


@contextlib.contextmanager
def world_of_one(device: str) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        rank=0,
        world_size=1,
        store=dist.HashStore(),  # type: ignore[attr-defined]
    )
    try:
        yield init_device_mesh(device, (1,))
    finally:
        # A process group does not end while stock's graphs hold its collectives, and then the program fails.
        torch.compiler.reset()
        gc.collect()
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(30)
        assert not ending.is_alive(), "the process group does not end"


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


@kind()
def a_module_parallelized_over_one(world: World) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with world_of_one(world.device) as mesh:
        net = world.module(TwoLayers())
        net = parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        run = world.compile(net)
        for step in range(STEPS):
            loss = run(world.values(step)).square().sum()
            loss.backward()
            world.note(loss, [parameter.grad.full_tensor() for parameter in net.parameters()])
            net.zero_grad()


@kind()
def distributed_tensors_as_inputs(world: World) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with world_of_one(world.device) as mesh, torch.no_grad():
        weight = distribute_tensor(world.values(76, 4, 4), mesh, [Replicate()])
        run = world.compile(lambda x: (x @ weight).relu())
        for step in range(STEPS):
            found = run(distribute_tensor(world.values(step), mesh, [Shard(0)]))
            world.note(found.full_tensor(), repr(found.placements))


@kind(gradients=False, captured=False)
def nested_tensors(world: World) -> None:
    net = world.module(nn.Linear(4, 4))
    run = world.compile(lambda jagged: torch.relu(net(jagged)) * 2)
    for step in range(STEPS):
        rows = [world.values(10 * step + i, 2 + (i + step) % 3, 4) for i in range(3)]
        world.note(list(run(torch.nested.nested_tensor(rows, layout=torch.jagged)).unbind()))


@kind()
def nested_tensors_that_are_trained(world: World) -> None:
    net = world.module(nn.Linear(4, 4))

    def program(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(values, offsets)
        return net(jagged).sin().values().square().sum()

    run = world.compile(program)
    for step in range(STEPS):
        offsets = world.moved(torch.tensor([0, 1 + step % 3, 5, 8]))
        world.train(run(world.values(step, 8, 4), offsets), net)


@kind(gradients=False, captured=False)
def sparse_inputs_and_attributes(world: World) -> None:
    adjacency = world.values(77, 3, 3).relu().to_sparse()

    def program(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency, x).relu() + torch.sparse.mm(other, x)

    run = world.compile(program)
    for step in range(STEPS):
        other = world.values(step + 30, 3, 3).relu()
        world.note(run(world.values(step), other.to_sparse()))
        world.note(run(world.values(step + 20), other.to_sparse_csr()))


@kind(captured=False)
def complex_tensors(world: World) -> None:
    turn = torch.polar(torch.ones(2), torch.tensor([0.3, 0.7])).to(world.device)

    def program(x: torch.Tensor) -> Any:
        turned = torch.view_as_complex(x.reshape(3, 2, 2)) * turn
        return torch.view_as_real(turned).flatten(1), turned.abs(), turned.conj(), torch.fft.fft(x)

    run = world.compile(program)
    for step in range(STEPS):
        world.note([one.resolve_conj() for one in run(world.values(step))])


@kind()
def complex_and_conjugate_inputs(world: World) -> None:
    run = world.compile(lambda x, y: (x @ y.mH, x.imag + 1, x * 2))
    for step in range(STEPS):
        x = world.values(step, 3, 3, dtype=torch.complex64)
        y = world.values(step + 20, 3, 3, dtype=torch.complex64)
        world.note(run(x, y), run(x.conj(), y.mT), run(x, y.imag.to(torch.complex64)))


@kind(gradients=False, captured=False)
def complex_inputs_of_which_a_part_is_written(world: World) -> None:
    """Inductor leaves views of complex tensors to operators, and does not take a write to one for one to the input."""

    def program(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state[1].mul_(2)
        state[:, 2:3] = x
        return torch.view_as_real(state).sum(1) * 2

    run = world.compile(program)
    for step in range(2 * STEPS):
        state = world.values(step + 30, 3, 4, dtype=torch.complex64)
        world.note(run(world.values(step, 3, 1, dtype=torch.complex64), state), state)


class _Oscillating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(3, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state[1].mul_(1.5)
        self.state[:, 2:3].add_(x)
        return torch.view_as_real(self.state).sum(1)


@kind(gradients=False)
def complex_buffers_of_which_a_part_is_written(world: World) -> None:
    net, run = world.compiled(_Oscillating())
    for step in range(2 * STEPS):
        world.note(run(world.values(step, 3, 1, dtype=torch.complex64)), net.state)


@kind()
def narrow_and_unsigned_numbers(world: World) -> None:
    def program(x: torch.Tensor, u: torch.Tensor, eight: torch.Tensor, mask: torch.Tensor) -> Any:
        return (
            torch.where(mask, x, -x),
            u.view(torch.int16) + 1,
            u.to(torch.int32) * 2,
            eight.to(torch.float32) + x,
            x.to(torch.float8_e4m3fn),
            mask.logical_not(),
        )

    run = world.compile(program)
    for step, x in world.steps():
        found = run(x, world.whole(step, 999, dtype=torch.uint16), x.to(torch.float8_e5m2), x > 0)
        world.note([one.to(torch.float32) for one in found])


@kind()
def numbers_in_cpu_tensors(world: World) -> None:
    """Tensors without dimensions on the CPU, as arguments and as attributes, next to tensors of the device."""
    offset = torch.tensor(0.5)

    def program(x: torch.Tensor, scale: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
        return (x * scale + offset).abs() ** power

    run = world.compile(program)
    for step in range(STEPS):
        world.note(run(world.values(step), torch.tensor(1.5 + step), torch.tensor(step % 3, dtype=torch.int32)))
        offset.add_(1)
