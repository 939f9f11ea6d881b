"""What a recording costs on a GPU, next to one of stock's: all that Encore does beyond it comes later."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict

import pytest
import torch
from torch import nn

import optimizations

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 256, 24
SIZES, FIRST_SIZES = 40, 4
"""Of them the first, in which code is still compiled and tuned, do not count."""


@pytest.mark.alone
def test_a_recording_takes_at_most_a_tenth_longer_than_stocks() -> None:
    """Each size of a dynamic program is warmed up in its first call, and recorded in its second."""
    layers = itertools.chain.from_iterable((nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    net = nn.Sequential(*layers).cuda()
    ways = {
        "encore": torch.compile(net, dynamic=True, backend="encore"),
        "stock": torch.compile(net, dynamic=True, mode="reduce-overhead"),
    }
    took = defaultdict(list)
    with torch.no_grad():
        for number in range(SIZES):
            x = torch.randn(64 + 8 * number, WIDTH, device="cuda")
            for name in sorted(ways, reverse=bool(number % 2)):
                for _ in range(2):
                    torch.compiler.cudagraph_mark_step_begin()
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    ways[name](x)
                    torch.cuda.synchronize()
                    seconds = time.perf_counter() - begun
                if number >= FIRST_SIZES:
                    took[name].append(seconds)
    assert len(optimizations.recordings()) == SIZES
    encore, stock = (statistics.median(took[name]) for name in ("encore", "stock"))
    print(f"a recording takes {encore * 1e3:.2f} ms, one of stock's {stock * 1e3:.2f} ms")
    assert encore <= 1.1 * stock
