"""Trained graphs skip wrappers with the gradients, versions, modes and errors of the slow path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from binding_programs import WeightedSine
from torch import nn

from optimizations import torch_internals
from optimizations.calls.shortcut import FULL_CALLS
from tests.optimizations.calls.test_shortcut import X, kept, pytestmark

__all__ = ["pytestmark"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of the calls that went through Inductor's wrapper, in order."""
    seen: list[str] = []
    owner = torch_internals.CompiledFxGraph
    stock = owner.__call__

    def call(graph: Any, inputs: Any) -> Any:
        seen.append("backward" if graph.fx_kwargs.get("is_backward") else "forward")
        return stock(graph, inputs)

    monkeypatch.setattr(owner, "__call__", call)
    return seen


class Normalized(nn.Module):
    """Writes its running statistics in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(x)
        return normalized * 2


def step(program: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """The output of a step, its gradients, and the buffers after it."""
    program.zero_grad()
    out = call(x)
    out.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in program.parameters() if parameter.grad is not None]
    return [out.detach().clone(), *gradients, *(buffer.clone() for buffer in program.buffers())]


def pair(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two programs that hold the same values."""
    one, other = kind(), kind()
    other.load_state_dict(one.state_dict())
    return one, other


def compiled(program: Any, **options: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = torch.compile(program, backend="encore", fullgraph=True, options=options or None)
    return run


@pytest.mark.parametrize("kind", [WeightedSine, Normalized])
def test_training_skips_wrappers_with_eagers_gradients(kind: Callable[[], nn.Module], full: list[str]) -> None:
    program, eager = pair(kind)
    run = compiled(program)
    for index in range(FULL_CALLS + 4):
        if index == FULL_CALLS + 1:
            full.clear()
        for one, other in zip(step(program, run, X + index), step(eager, eager, X + index), strict=True):
            torch.testing.assert_close(one, other)
    assert full == []
    assert kept() is None


def settled(program: nn.Module, full: list[str]) -> Callable[..., Any]:
    run = compiled(program)
    for _ in range(FULL_CALLS + 1):
        step(program, run, X)
    full.clear()
    return run


def test_forward_without_compiled_backward_skips_wrappers(
    full: list[str],
) -> None:
    program, eager = pair(WeightedSine)
    with torch_internals.fresh_cache():  # a backward from a cache is there from the beginning
        run = compiled(program)
        for _ in range(FULL_CALLS + 1):
            run(X)
        full.clear()
        run(X)
        assert full == []
        for index in range(3):
            for one, other in zip(step(program, run, X + index), step(eager, eager, X + index), strict=True):
                torch.testing.assert_close(one, other)
    assert full == ["backward"], "the first; the forward after it finds the backward compiled"


def test_versions_of_written_inputs_equal_the_slow_path(full: list[str]) -> None:
    counted = {}
    for lean in (True, False):
        torch_internals.reset_dynamo()
        program = Normalized()
        run = compiled(program, lean=lean)
        versions = []
        for _ in range(FULL_CALLS + 3):
            step(program, run, X)
            versions.append([buffer._version for buffer in program.buffers()])
        counted[lean] = versions
    assert counted[True] == counted[False]


def test_inputs_without_gradient_and_other_arguments_pass(full: list[str]) -> None:
    def scaled(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
        return (x * w).detach() * n + w

    run = torch.compile(scaled, backend="encore", fullgraph=True)
    for index in range(FULL_CALLS + 3):
        x, w = (X + index).requires_grad_(), torch.ones(4, requires_grad=True)
        twin_x, twin_w = (X + index).requires_grad_(), torch.ones(4, requires_grad=True)
        run(x, w, 3).sum().backward()
        scaled(twin_x, twin_w, 3).sum().backward()
        assert (x.grad is None) == (twin_x.grad is None)
        torch.testing.assert_close(w.grad, twin_w.grad)


def test_saved_tensor_hooks_get_the_tensors_of_the_slow_path(full: list[str]) -> None:
    packed = {}
    for lean in (True, False):
        torch_internals.reset_dynamo()
        program = WeightedSine()
        run = compiled(program, lean=lean)
        counts = []
        for _ in range(FULL_CALLS + 2):
            seen: list[torch.Size] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, seen=seen: (seen.append(t.shape), t)[1], lambda t: t
            ):
                out = run(X)
            out.sum().backward()
            counts.append(seen)
        packed[lean] = counts
    assert packed[True] == packed[False]
