"""Leaves and saved tensors are found in autograd's graph, and saved tensors are no lazy conjugates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu

import optimizations
from optimizations import torch_internals
from optimizations.torch_internals.autograd_graph import depending_on, leads_to_hooks, recorded_of


class Doubling(torch.autograd.Function):
    """Its node has an attribute by the name under which nodes of leaves have their tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = x.detach().clone()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


@pytest.fixture
def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def test_leaves_and_saved_tensors_of_a_function_are_found(leaf: torch.Tensor) -> None:
    since = torch_internals.next_sequence_number()
    result = Doubling.apply(leaf.sin())
    found = recorded_of([result, leaf], since, saved_too=True)
    assert [id(one) for one in found.leaves] == [id(leaf)]
    assert (found.older, found.saved) == (False, {leaf.data_ptr()})


@pytest.mark.parametrize("is_custom", [False, True])
def test_graph_from_before_the_function_is_older(leaf: torch.Tensor, is_custom: bool) -> None:
    before = leaf.exp()
    since = torch_internals.next_sequence_number()
    found = recorded_of([Doubling.apply(before) if is_custom else 2 * before], since, saved_too=False)
    assert (found.leaves, found.older) == ((), True)


def test_outputs_are_listed_by_the_leaves_they_reach(leaf: torch.Tensor) -> None:
    other = torch.ones(3, requires_grad=True)
    outputs = [Doubling.apply(leaf), leaf * other, other.detach()]
    assert depending_on(outputs, [leaf, other, torch.ones(1)]) == [{0, 1}, {1}, set()]


def test_hooks_of_leaves_are_found_behind_functions(leaf: torch.Tensor) -> None:
    result = Doubling.apply(leaf.exp())
    assert not leads_to_hooks(result.grad_fn)
    leaf.register_hook(lambda gradient: None)
    assert leads_to_hooks(result.grad_fn)


# Complex programs in training: what is saved for the backward is no lazy conjugate, and both have graphs.


Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def matrices(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y) @ x.mH


def intermediate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Both a value and its conjugate are needed backward."""
    inner = (x * y).sin()
    return inner * inner.conj() * x


def imaginary(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.conj().imag * y.real * y


def spectral(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A layer of a Fourier neural operator."""
    return torch.fft.irfft(torch.fft.rfft(x.real) * y[:, :2], n=3)


@pytest.mark.parametrize("program", [product, matrices, intermediate, imaginary, spectral])
def test_complex_training_has_graphs(compiled_on_cpu: CompiledOnCpu, program: Program) -> None:
    call = torch.compile(program, backend="encore", options={"selection": "off"})
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [torch.randn(3, 3, dtype=torch.complex64, generator=generator).requires_grad_() for _ in range(2)]
        found, expected = (
            (result, *torch.autograd.grad((result * (1 + 2j)).sum().abs(), inputs))
            for result in (call(*inputs), program(*inputs))
        )
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        del found, expected, mine, theirs
    (report,) = optimizations.report()
    assert not [one.reason for one in report.uncaptured if "lazy" in one.reason]
    assert compiled_on_cpu.cuda.replays >= 16
