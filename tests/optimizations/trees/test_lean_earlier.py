"""Steady calls of a function that reads results of an earlier graph: the very results it was recorded with."""

from __future__ import annotations

from typing import Any

import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, nodes, values

from optimizations.trees import reasons
from tests.optimizations.trees.test_lean import W, slow_calls, slow_reasons

__all__ = ["slow_calls"]


class Two(Model):
    """The result, and the one with x and y exchanged."""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        x, y, w = inputs
        inputs.clear()
        return [*super().__call__([x, y, w]), *super().__call__([y, x, w])]


def test_another_result_of_the_same_graph_goes_the_full_way(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """The graph reads the one that it was recorded with, and nothing else tells them apart."""
    first, second = Compiled(Two(cuda_on_cpu), outputs=2), Compiled(Model(cuda_on_cpu))

    def iteration(start: int, which: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        x, y = values(start), values(-2 * start)
        results = first.function([x, y, W])
        expected = [2 * x + y * W, 2 * y + x * W]
        (found,) = second.function([results[which], y, W])
        assert torch.equal(found, 2 * expected[which] + y * W)

    for start in range(40):
        iteration(start, 0)
    second.functions[0]._slow_calls.clear()
    slow_calls.clear()
    iteration(40, 0)
    assert slow_calls == []
    iteration(41, 1)
    assert slow_reasons(second) == [reasons.FIXED_INPUT_MOVED]


def test_a_result_that_is_handed_on_is_still_the_callers_tensor(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """Of results of earlier graphs a steady call lets go of those only that are dead behind it."""
    first, second = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu, returns_x=True), outputs=2)

    def iteration(start: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        x, y = values(start), values(-2 * start)
        (made,) = first.function([x, y, W])
        result, same = second.function([made, y, W])
        assert same is made
        assert torch.equal(made, 2 * x + y * W)
        assert torch.equal(result, 2 * made + y * W)

    for start in range(40):
        iteration(start)
    slow_calls.clear()
    for start in range(4):
        iteration(start)
    assert slow_calls == []


def test_a_recording_without_a_graph_has_no_steady_calls(cuda_on_cpu: CudaOnCpu) -> None:
    """All graphs may be ended in the midst of a call, by a finalizer of the program's."""
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W)
    (node,) = nodes()
    assert node.takes_fast_path
    node.graph = None
    node.expect_again()
    assert not node.takes_fast_path
