"""What steady calls leave behind, as full ones do, and what does not end them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, nodes, values

from optimizations.in_place import budget
from tests.optimizations.trees.test_lean import Training, W, slow_calls, steady
from tests.optimizations.trees.test_lean_held import Runs

__all__ = ["slow_calls"]


def test_the_list_of_inputs_is_empty_after_a_steady_call(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """Or its caller would keep them alive, and their memory taken, while what follows runs."""
    compiled = steady(cuda_on_cpu, slow_calls)
    torch.compiler.cudagraph_mark_step_begin()
    given = [values(1), values(2), W]
    compiled.function(given)
    assert given == []
    assert slow_calls == []


def test_data_that_steady_calls_copy_is_counted(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    compiled = Compiled(Model(cuda_on_cpu, hides_y=True))
    check(compiled, W, calls=30)
    slow_calls.clear()
    before = compiled.reports[0].total_copied_bytes
    check(compiled, W, calls=4)
    assert slow_calls == []
    assert compiled.reports[0].total_copied_bytes == before + 4 * W.nbytes


def test_forwards_without_backward_are_fast_with_step_marks(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """Marked, an iteration begins though the backward of the one before never came."""
    training = Training(cuda_on_cpu)
    for step in range(12):
        training.step(step)
    slow_calls.clear()
    replays = cuda_on_cpu.replays
    for step in range(6):
        training.step(step, backward=False)
    assert slow_calls == []
    assert cuda_on_cpu.replays == replays + 6


def test_calls_are_steady_while_work_on_their_recording_waits(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", 100)
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W, calls=4)
    slow_calls.clear()
    check(compiled, W, calls=20)
    assert slow_calls == []
    assert compiled.reports[0].stage == "waiting"


def test_backward_of_the_last_results_is_released(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """It refers to parameters that may have been swapped."""
    compiled, weights = Compiled(Model(cuda_on_cpu), is_inference=False), [values(5), values(6)]

    def serve(start: int) -> weakref.ref[torch.Tensor]:
        """To what the backward of the results refers to."""
        torch.compiler.cudagraph_mark_step_begin()
        leaf, x, y, w = torch.ones(1, requires_grad=True), values(start), values(-2 * start), weights[start % 2]
        (result,) = Runs.apply(leaf, compiled.function, [x, y, w])
        assert torch.equal(result, 2 * x + y * w)
        return weakref.ref(leaf)

    for start in range(40):
        serve(start)
    slow_calls.clear()
    for start in range(40, 46):
        assert serve(start)() is None
    assert slow_calls == []
    assert len(nodes()) == 2
