"""One partition reads an input and a later one writes it: the caller's tensor equals eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from simulated_gpu import compiler as simulation
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import CompiledOnCpu, cut_into_partitions

from optimizations import torch_internals
from optimizations.trees import graphed_function
from optimizations.trees.graphed_function import on_aligned_inputs


@torch.library.custom_op(
    "partition_inputs::triple", mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,), device_types="cpu"
)
def triple(a: torch.Tensor) -> torch.Tensor:
    return a * 3


@triple.register_fake
def _(a: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    b = triple(x * 2)
    x.add_(b)
    c = triple(x * 5)
    y.copy_(c - y)
    return x[1:], c, y * 2


def misaligned(values: torch.Tensor) -> torch.Tensor:
    return aligned(values.numel(), offset=1).view(values.shape).copy_(values)


def results(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    """Results and arguments of calls with arguments that move, are misaligned, or are a result of another graph."""
    call, make = compiled(step), compiled(lambda z: z * 2 + 1)
    kept, found = [], []
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for number in range(30):
            torch.compiler.cudagraph_mark_step_begin()
            x, y = (torch.randn(4, 8, generator=generator) for _ in range(2))
            x = (aligned(32).view(4, 8).copy_, misaligned, make)[number % 3](x)
            y = misaligned(y) if number % 2 else y
            y = x if number % 10 == 9 else y
            kept.append((x, y) if number % 3 != 2 else y)
            found += [one.clone() for one in (*call(x, y), x, y)]
    return found


def checked_as_on_a_gpu(inputs: Sequence[Any], static: Sequence[int]) -> list[int]:
    """Indices of tensors that Inductor takes for aligned, and are not known to be."""
    return [
        index
        for index, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and not (index in static and value.data_ptr() % 16 == 0)
    ]


def test_arguments_over_partitions_equal_eager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(lambda program: program)
    cut_into_partitions(monkeypatch)
    monkeypatch.setattr(simulation, "CUTS", ("triple",))
    monkeypatch.setattr(torch_internals.cudagraph_trees, "get_input_idxs_to_check", checked_as_on_a_gpu)
    world: CompiledOnCpu = request.getfixturevalue("compiled_on_cpu")

    def outside_of_captures(model: Any, *arguments: Any) -> Callable[[list[Any]], Any]:
        """The simulation's placeholders are not aligned, and what it copies in a capture is lost."""
        run = on_aligned_inputs(model, *arguments)
        return lambda inputs: run(inputs) if world.cuda.capturing is None else model(inputs)

    monkeypatch.setattr(graphed_function, "on_aligned_inputs", outside_of_captures)
    found = results(lambda program: torch.compile(program, backend="encore"))
    wrong = [
        (number // 5, number % 5)
        for number, (one, other) in enumerate(zip(found, expected, strict=True))
        if not torch.allclose(one, other)
    ]
    assert not wrong
    assert len(world.functions) > 3, "nothing was cut"
    assert world.cuda.replays


@pytest.mark.parametrize("returns", [True, False])
def test_aligned_copies_are_written_back(returns: bool) -> None:
    """A returned misaligned input is the input itself, unless its memory holds a result."""

    def model(inputs: list[Any]) -> list[Any]:
        x, y = inputs
        inputs.clear()
        assert x.data_ptr() % 16 == y.data_ptr() % 16 == 0
        x += 1
        return [x, y, x + y]

    run = on_aligned_inputs(model, [0, 1], [0], lambda index: returns)
    x, y = misaligned(torch.ones(4)), torch.ones(4)
    first, second, total = run([x, y])
    assert torch.equal(x, torch.full((4,), 2.0))
    assert (first is x) is returns
    assert torch.equal(first, x)
    assert second is y
    assert torch.equal(total, x + y)
