"""Versions are counted up for tensors that nothing else is done to, and that nothing is kept of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice

from optimizations import torch_internals
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.torch_internals.version_counters import VersionCounters


def made() -> dict[str, torch.Tensor]:
    return {
        "a parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "a buffer": torch.ones(4),
        "a number": torch.tensor(3.0),
        "a view": torch.ones(4, 4)[1:, 2],
        "nothing": torch.empty(0),
        "integers": torch.ones(3, dtype=torch.int64),
        "complex numbers": torch.ones(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "a result": (torch.ones(3, requires_grad=True) * 2).requires_grad_(),
    }


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda tensor: None,
    "other memory": lambda tensor: setattr(tensor, "data", tensor.data.clone()),
    "another shape": lambda tensor: setattr(tensor, "data", torch.ones(7, dtype=tensor.dtype)),
    "memory of another": lambda tensor: torch.no_grad()(tensor.set_)(torch.ones(9, dtype=tensor.dtype)),
    "written": lambda tensor: tensor.detach().zero_(),
    "requires_grad": lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name in made() for change in CHANGES if name != "sparse" or change == "nothing"],
)
def test_versions_are_counted_whatever_is_done_to_a_tensor(name: str, change: str) -> None:
    tensor = made()[name]
    counters = VersionCounters([tensor])
    CHANGES[change](tensor)
    before = tensor._version
    for count in (1, 2):
        torch_internals.increment_version(counters.tensors)
        assert tensor._version == before + count


def test_autograd_sees_that_a_tensor_was_written() -> None:
    weight = torch.ones(3, requires_grad=True)
    counters = VersionCounters([weight])
    loss = (weight * weight).sum()
    torch_internals.increment_version(counters.tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_neither_tensors_nor_memory_are_kept() -> None:
    tensor, other = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.zeros(5))
    counters = VersionCounters([tensor])
    assert tensor._use_count() == 1
    assert all(one.untyped_storage().nbytes() == 0 for one in counters.tensors)
    torch.utils.swap_tensors(tensor, other)
    gone = weakref.ref(tensor)
    gc.collect()
    gc.disable()
    try:
        del tensor
        assert gone() is None
    finally:
        gc.enable()
    torch_internals.increment_version(counters.tensors)
    assert other._version == 1, "the counter went to the other"


def test_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        counters = VersionCounters([tensor, torch.ones(3)])
    torch_internals.increment_version(counters.tensors)
    assert tensor.is_inference()


def steps(read: torch.Tensor, *, writes: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        if writes:
            read.add_(x)
        return (read + x).sum()

    return step


@pytest.mark.parametrize("other", ["none", "the same memory", "other memory"])
def test_a_steady_replay_counts_the_versions_of_what_its_graph_writes(other: str) -> None:
    """Also of a tensor that `swap_tensors` made another: each has a counter of its own."""
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
