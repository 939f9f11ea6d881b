"""Interrupted calls: the settings of the thread are as before, and the next call has its result and gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from interrupts import interrupted_behind
from simulated_gpu.compiler import CompiledOnCpu
from torch import nn

from optimizations import torch_internals

FILES = (
    *(
        "/fast_path.py",
        "/liveness.py",
        "/results.py",
        "/manager.py",
        "/node.py",
        "/trained.py",
        "/shortcut.py",
        "/trained.py",
    ),
    *("/apart.py", "/grad_mode.py", "/pyfunctorch.py", "/contextlib.py"),
)


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin()


def settings() -> tuple[object, ...]:
    """The settings of this thread that decide what autograd records and who sees operators."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch_internals.is_view_replay_enabled(),
        torch_internals.len_torch_dispatch_stack(),
    )


def gradient(program: Program, call: Any, x: torch.Tensor) -> torch.Tensor:
    program.zero_grad()
    call(x).square().sum().backward()
    assert program.weight.grad is not None
    return program.weight.grad


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_interrupt_in_call_leaves_settings(compiled_on_cpu: CompiledOnCpu, marks: bool, backward: bool) -> None:
    """A mode that a guard puts back when the traceback goes would be another one from then on."""
    program, eager = Program(), Program()
    call = torch.compile(program, backend="encore")
    places = 0
    for number in range(-10, 1000):
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        x = torch.full((2, 4), float(number))
        where: list[str] = []
        before = settings()
        if number >= 0:
            with contextlib.suppress(KeyboardInterrupt), interrupted_behind(number, *FILES) as where:
                result = call(x)
                if backward:
                    result.sum().backward()
            assert settings() == before, where
        for factor in (1, 2):
            torch.testing.assert_close(gradient(program, call, factor * x), gradient(eager, eager, factor * x))
        if number >= 0 and not where:
            break
        places += number >= 0
    assert places > 10
    assert compiled_on_cpu.cuda.replays
