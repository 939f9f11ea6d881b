"""Training with complex weights on a GPU: both directions replay graphs, with eager's values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import optimizations

pytestmark = pytest.mark.gpu


class Spectral(nn.Module):
    """Two layers of a Fourier neural operator."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        weights = torch.randn(2, width, width, modes, dtype=torch.complex64) / width
        self.weights = nn.Parameter(weights)
        self.mixing = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = self.weights.shape[-1]
        for weight, mixing in zip(self.weights, self.mixing, strict=True):
            frequencies = torch.fft.rfft(x)
            kept = torch.einsum("bim,iom->bom", frequencies[..., :modes], weight)
            spread = torch.zeros_like(frequencies)
            spread[..., :modes] = kept
            x = (torch.fft.irfft(spread, n=x.shape[-1]) + mixing(x)).relu()
        return x


def test_spectral_layers_are_trained_with_graphs() -> None:
    torch.manual_seed(0)
    net = Spectral(8, 5).cuda()
    compiled = torch.compile(net, backend="encore", options={"selection": "off"})
    for step in range(40):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(4, 8, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        found = compiled(x)
        gradients = torch.autograd.grad(found.square().mean(), list(net.parameters()))
        expected = net(x)
        for mine, theirs in zip(
            (found, *gradients),
            (expected, *torch.autograd.grad(expected.square().mean(), list(net.parameters()))),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    recordings = [one for report in optimizations.report() for one in report.recordings]
    assert {one.direction for one in recordings if one.replays > 0} == {"forward", "backward"}
