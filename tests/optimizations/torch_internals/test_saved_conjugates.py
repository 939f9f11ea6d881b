"""In training, what a forward saves for its backward is no lazy conjugate, so that both have graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu

import optimizations

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
