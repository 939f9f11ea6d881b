"""Activation checkpointing around compiled blocks on a GPU, and interrupts of calls with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import interrupted_behind
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu


class Adapted(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(wide, out).requires_grad_(False)
        self.down, self.up = nn.Linear(wide, 4, bias=False), nn.Linear(4, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


class Block(nn.Module):
    """Frozen weights with low-rank adapters."""

    def __init__(self, wide: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(wide).requires_grad_(False)
        self.qkv, self.out = Adapted(wide, 3 * wide), nn.Linear(wide, wide).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, wide = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, wide // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = x + self.out(y.transpose(1, 2).reshape(n, t, wide))
        return result


def losses(compiled: Callable[[nn.Module], Any]) -> list[float]:
    torch.manual_seed(0)
    torch.compiler.reset()
    layers = nn.ModuleList(Block() for _ in range(3)).cuda()
    calls = [compiled(layer) for layer in layers]
    optimizer = torch.optim.SGD([one for one in layers.parameters() if one.requires_grad], lr=0.05)
    found = []
    for step in range(42):
        torch.manual_seed(step)
        x = torch.randn(2, 32, 128, device="cuda")
        for call in calls:
            x = checkpoint(call, x, use_reentrant=False)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_checkpointed_blocks_train_as_eager() -> None:
    expected = losses(lambda layer: layer)
    found = losses(lambda layer: torch.compile(layer, backend="encore"))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-6)


def test_interrupted_call_keeps_gradients() -> None:
    torch.compiler.reset()
    model = Block().cuda()
    call = torch.compile(model, backend="encore")
    x = torch.randn(2, 32, 128, device="cuda")
    for _ in range(8):
        call(x).sum().backward()
    files = (
        "/fast_path.py",
        "/liveness.py",
        "/results.py",
        "/manager.py",
        "/node.py",
        "/trained.py",
        "/trained.py",
        "/apart.py",
    )
    places = 0
    for number in range(200):
        with contextlib.suppress(KeyboardInterrupt), interrupted_behind(number, *files, "/grad_mode.py") as where:
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
