"""Views of one argument over partitions on a GPU: one is read, another written, a third returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


@torch.library.custom_op("partition_inputs_gpu::triple", mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,))
def triple(a: torch.Tensor) -> torch.Tensor:
    return a * 3


@triple.register_fake
def _(a: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


def views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
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


def results(program: Callable[..., Any], compiled: Callable[..., Any]) -> list[torch.Tensor]:
    """Results and arguments of calls whose arguments move, are misaligned, results of a graph, or the same memory."""
    torch.compiler.reset()
    call, make = compiled(program), compiled(lambda z: z * 2 + 1)
    found, kept, generator = [], [], torch.Generator().manual_seed(1)

    def elsewhere(values: torch.Tensor, pad: int) -> torch.Tensor:
        kept.append(torch.empty(256 + 64 * (len(kept) % 7), device="cuda"))
        return torch.empty(values.numel() + pad, device="cuda")[pad:].view(16, 16).copy_(values)

    with torch.no_grad():
        for number in range(90):
            torch.compiler.cudagraph_mark_step_begin()
            values, other = (torch.randn(16, 16, generator=generator).cuda() for _ in range(2))
            kind = number % 6
            x = make(values) if kind == 5 else elsewhere(values, (0, 0, 4, 1, 64)[kind])
            y = x if number % 15 == 14 else elsewhere(other, (0, 3)[number % 2])
            found += [one.clone() for one in (*call(x, y), x, y)]
    return found


@pytest.mark.parametrize("program", [views, rows])
def test_views_over_partitions_equal_eager(program: Callable[..., Any]) -> None:
    expected = results(program, lambda one: one)
    found = results(program, lambda one: torch.compile(one, backend="encore"))
    wrong = [
        number
        for number, (one, other) in enumerate(zip(found, expected, strict=True))
        if not torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    ]
    assert not wrong
