"""A launch increments the versions of what its graph writes, as eager does, for autograd's checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated_gpu.operators import CpuDevice

from optimizations.capture.step.graphed_step import GraphedStep


def steps(read: torch.Tensor, *, writes: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        if writes:
            read.add_(x)
        return (read + x).sum()

    return step


@pytest.mark.parametrize("other", ["none", "the same memory", "other memory"])
def test_fast_replay_counts_versions_of_written_tensors(other: str) -> None:
    """This includes a tensor exchanged by `swap_tensors`: each has its own counter."""
    weights, expected = torch.zeros(3), torch.zeros(3)
    graphed, eager = GraphedStep(steps(weights, writes=True), device=CpuDevice()), steps(expected, writes=True)
    for index in range(12):
        if index == 7 and other != "none":
            made = weights.data if other == "the same memory" else weights.clone()
            torch.utils.swap_tensors(weights, made)
        version = weights._version
        given = torch.ones(3) * index
        assert torch.equal(graphed(given), eager(given)) and torch.equal(weights, expected)
        assert weights._version > version, index
    report = graphed.report()
    assert report.replays >= 8 and report.dropped_recordings == (other == "other memory")
