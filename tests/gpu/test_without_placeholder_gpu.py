"""A large input read in place uses no memory of the graph's pool, and every call is correct."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_harness import forget

import optimizations

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ROWS, COLUMNS = 2**14, 2**12


INPUT_BYTES = ROWS * COLUMNS * 4  # 256 MiB


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w).sum(1, keepdim=True)
    for _ in range(4):
        y = torch.relu(y @ y.new_ones(1, 64)).sum(1, keepdim=True) * 0.01
    return y


def compiled(backend: str, **options: Any) -> Callable[..., torch.Tensor]:
    forget()
    keywords: dict[str, Any] = {"options": options} if options else {}
    if backend == "stock":
        return torch.compile(program, mode="reduce-overhead")
    return torch.compile(program, backend="encore", **keywords)


def reserved_beyond(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> int:
    """Return the memory that is reserved for a function after as many calls as a recording takes to settle."""
    before = torch.cuda.memory_reserved()
    for _ in range(60):
        torch.compiler.cudagraph_mark_step_begin()
        function(x, w)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - before


@pytest.mark.parametrize("concurrency", ["auto", "off"])
def test_pool_shrinks_by_the_size_of_the_input(concurrency: str) -> None:
    w = torch.randn(COLUMNS, device="cuda")
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    with torch.no_grad():
        encore = reserved_beyond(compiled("encore", concurrency=concurrency), x, w)
        (recording,) = optimizations.recordings()
        stock = reserved_beyond(compiled("stock"), x, w)
    print(f"reserved: stock {stock / 2**20:.0f} MiB, encore {encore / 2**20:.0f} MiB")
    (large,) = (one for one in recording.inputs if one.data_bytes == INPUT_BYTES)
    assert large.indirect and not large.has_placeholder
    assert encore <= stock - 0.9 * INPUT_BYTES
    assert recording.stage == "done" and recording.total_copied_bytes < INPUT_BYTES


@pytest.mark.parametrize("concurrency", ["auto", "off"])
def test_calls_are_correct_at_any_address(concurrency: str) -> None:
    """New addresses, freed ones, views, addresses that are not aligned, and the memory of results."""
    w = torch.randn(COLUMNS, device="cuda")
    block = torch.randn(ROWS * COLUMNS + 64, device="cuda")
    with torch.no_grad():
        function = compiled("encore", concurrency=concurrency)
        for step in range(60):
            torch.compiler.cudagraph_mark_step_begin()
            if step % 3 == 0:
                x = torch.randn(ROWS, COLUMNS, device="cuda")
            elif step % 3 == 1:
                x = block[step % 7 :][: ROWS * COLUMNS].view(ROWS, COLUMNS)
            else:
                x = torch.full((ROWS, COLUMNS), float(step), device="cuda")
            expected = program(x, w)
            result = function(x, w)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            del x
