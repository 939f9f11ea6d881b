"""A function without a graph, called on another stream than the graph whose results it reads."""

from __future__ import annotations

import pytest
import torch

import optimizations

pytestmark = pytest.mark.gpu


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
