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


@torch.library.custom_op("partition_inputs::triple", mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,))
def triple(a: torch.Tensor) -> torch.Tensor:
    return a * 3


@triple.register_fake
def _(a: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


def whole(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    b = triple(x * 2)
    x.add_(b)
    c = triple(x * 5)
    y.copy_(c - y)
    return x[1:], c, y * 2


def columns(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    b = triple(x[:, :8] * 2)
    x[:, 8:].add_(b)
    c = triple(x.t().contiguous())
    y.copy_(c.t() - y)
    return x[1:], c, y * 2


def rows(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    b = triple(x[::2] + 1)
    x[1::2].mul_(b)
    c = triple(x * 2)
    y[0].add_(c[1])
    return x.view(8, 32), x[:, 3], y, c


PROGRAMS: list[Callable[..., tuple[torch.Tensor, ...]]] = [whole, columns, rows]
"""Programs in which views of one argument are read, written and returned by several partitions."""


def differing_calls(program: Callable[..., Any], device: str = "cpu") -> list[int]:
    """Return the calls whose results or arguments are not eager's.

    Arguments move, are misaligned, are a result of another graph, or are the same tensor.
    """
    calls = 60
    eager, found = (
        _results(program, compiled, device, calls)
        for compiled in (lambda one: one, lambda one: torch.compile(one, backend="encore"))
    )
    per_call = len(eager) // calls
    pairs = enumerate(zip(found, eager, strict=True))
    wrong = [index // per_call for index, (one, other) in pairs if not torch.allclose(one, other, 1e-5, 1e-5)]
    return list(dict.fromkeys(wrong))


def _results(program: Any, compiled: Callable[..., Any], device: str, calls: int) -> list[torch.Tensor]:
    torch.compiler.reset()
    call, make = compiled(program), compiled(lambda z: z * 2 + 1)
    kept, found = [], []
    generator = torch.Generator().manual_seed(1)

    def elsewhere(values: torch.Tensor, pad: int) -> torch.Tensor:
        room = aligned(256, pad) if device == "cpu" else torch.empty(256 + pad, device=device)[pad:]
        kept.append(room)
        return room.view(16, 16).copy_(values)

    with torch.no_grad():
        for number in range(calls):
            torch.compiler.cudagraph_mark_step_begin()
            values, other = (torch.randn(16, 16, generator=generator).to(device) for _ in range(2))
            kind = number % 6
            x = make(values) if kind == 5 else elsewhere(values, (0, 0, 4, 1, 64)[kind])
            y = x if number % 15 == 14 else elsewhere(other, (0, 3)[number % 2])
            found += [one.clone() for one in (*call(x, y), x, y)]
    return found


def checked_as_on_a_gpu(inputs: Sequence[Any], static: Sequence[int]) -> list[int]:
    """Indices of tensors that Inductor takes for aligned, and are not known to be."""
    return [
        index
        for index, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and not (index in static and value.data_ptr() % 16 == 0)
    ]


@pytest.mark.parametrize("program", PROGRAMS)
def test_arguments_over_partitions_equal_eager(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any]
) -> None:
    cut_into_partitions(monkeypatch)
    monkeypatch.setattr(simulation, "CUTS", ("triple",))
    monkeypatch.setattr(torch_internals.cudagraph_trees, "get_input_idxs_to_check", checked_as_on_a_gpu)
    world: CompiledOnCpu = request.getfixturevalue("compiled_on_cpu")

    def outside_of_captures(model: Any, *arguments: Any) -> Callable[[list[Any]], Any]:
        """The simulation's placeholders are not aligned, and what it copies in a capture is lost."""
        run = on_aligned_inputs(model, *arguments)
        return lambda inputs: run(inputs) if world.cuda.capturing is None else model(inputs)

    monkeypatch.setattr(graphed_function, "on_aligned_inputs", outside_of_captures)
    assert not differing_calls(program)
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
    x, y = aligned(4, offset=1).fill_(1), torch.ones(4)
    first, second, total = run([x, y])
    assert torch.equal(x, torch.full((4,), 2.0))
    assert (first is x) is returns
    assert torch.equal(first, x)
    assert second is y
    assert torch.equal(total, x + y)
