"""Interrupts of calls with gradients on a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from interrupts import FILES_OF_A_CALL, interrupted_after
from torch import nn

pytestmark = pytest.mark.gpu


def test_interrupted_call_keeps_gradients() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128)).cuda()
    call = torch.compile(model, backend="encore")
    x = torch.randn(2, 32, 128, device="cuda")
    for _ in range(8):
        call(x).sum().backward()
    places = 0
    for number in range(200):
        with contextlib.suppress(KeyboardInterrupt), interrupted_after(number, *FILES_OF_A_CALL) as where:
            call(x).sum().backward()
        assert torch.is_grad_enabled(), where
        model.zero_grad()
        result = call(x)
        assert result.grad_fn is not None, where
        result.sum().backward()
        if not where:
            break
        places += 1
    assert places > 3
