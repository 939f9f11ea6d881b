"""Compiled functions on a GPU: what a recording costs, results of changing sizes, and functions without a graph."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict

import pytest
import torch
from torch import nn

import optimizations
from optimizations.trees.results import Results

pytestmark = pytest.mark.gpu


WIDTH, LAYERS = 256, 24
SIZES, FIRST_SIZES = 40, 4
"""The first sizes do not count: code is still compiled and tuned for them."""


@pytest.mark.alone
def test_recording_takes_at_most_a_tenth_longer_than_stocks() -> None:
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


ROWS = (8, 24, 40)


def _boxes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * 2 + y).relu(), (x - y).sum(1)


@pytest.mark.parametrize("selection", ["off", "measure"])
def test_changing_sizes_are_correct_and_not_recorded_again(monkeypatch: pytest.MonkeyPatch, selection: str) -> None:
    made_again: list[int] = []
    make = Results._make_again
    monkeypatch.setattr(Results, "_make_again", lambda self, place: (made_again.append(place), make(self, place))[1])
    call = torch.compile(_boxes, backend="encore", dynamic=True, options={"selection": selection})
    with torch.no_grad():
        for step in range(300):
            x = torch.full((ROWS[step % 3], 16), float(step), device="cuda")
            y = torch.full_like(x, 1.0 - step)
            results = call(x, y)
            for found, expected in zip(results, _boxes(x, y), strict=True):
                assert torch.equal(found, expected), step
            assert all(vars(result) for result in results), "the mark that this is about"
            del results, found
            if step == 100:
                made_again.clear()
    assert sum(one.steady_replays for one in optimizations.recordings()) > 100
    assert not made_again


def test_small_function_follows_graphs_over_streams() -> None:
    """It waits for the graph that makes its input, and the next replay, which writes over that, waits for it."""
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.float64) / 45

    def large(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x @ weight)
        return x

    def small(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    graphed = torch.compile(large, backend="encore")
    plain = torch.compile(small, backend="encore", options={"selection": "rule"})
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.randn(2048, 2048, device="cuda", dtype=torch.float64) for _ in range(3)]
    torch.cuda.synchronize()
    with torch.no_grad():
        for step in range(30):
            torch.compiler.cudagraph_mark_step_begin()
            x = inputs[step % 3]
            with torch.cuda.stream(streams[step % 2]):
                made = graphed(x)
            with torch.cuda.stream(streams[1 - step % 2]):
                result = plain(made)
            del made
            torch.compiler.cudagraph_mark_step_begin()
            with torch.cuda.stream(streams[step % 2]):
                graphed(inputs[(step + 1) % 3])
            torch.cuda.synchronize()
            torch.testing.assert_close(result, small(large(x)))
    assert any(one.reason.startswith("selection") for report in optimizations.report() for one in report.uncaptured)
