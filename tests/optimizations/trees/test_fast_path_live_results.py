"""Fast calls next to live or missing results: which take the slow path, and what they must not overwrite."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu, at_address
from simulated_gpu.trees import COUNT, Compiled, Model, check, nodes, settle, slow_reasons, values

from optimizations.in_place import budget
from optimizations.trees import reasons
from optimizations.trees.containers import managers
from tests.optimizations.trees.test_fast_path import W, on_fast_path, training_of


class Reusing(Model):
    """Its first recording puts its result at the address of an earlier graph's, as the allocator may."""

    memory: torch.Tensor | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        memory, allocate = self.memory, self.cuda.allocate
        if memory is None or self.cuda.capturing is None:
            return super().__call__(inputs)
        self.memory = None
        self.cuda.allocate = lambda _: at_address(memory.data_ptr(), COUNT * 4, torch.float32)  # type: ignore[method-assign]
        try:
            return super().__call__(inputs)
        finally:
            self.cuda.allocate = allocate  # type: ignore[method-assign]


def test_live_result_in_written_memory_is_not_overwritten(cuda_on_cpu: CudaOnCpu) -> None:
    """It was dead when the next graph was recorded, and its memory was reused by that graph."""
    reusing = Reusing(cuda_on_cpu)
    first, second = Compiled(Model(cuda_on_cpu, results=2), outputs=2), Compiled(reusing)

    def iteration(start: int, *, hold: bool = False) -> None:
        x, y = values(start), values(-2 * start)
        one, other = first.checked(x, y, W)
        expected = 2 * x + y * W
        if start == 1:
            reusing.memory = at_address(one.data_ptr(), COUNT * 4, torch.float32)
        held = one if hold else None
        del one
        second.checked(y, x, W, mark=False)
        assert held is None or torch.equal(held, expected)
        del other

    settle(iteration, first, second)
    (before, behind) = nodes()
    assert behind.parent is before
    iteration(41, hold=True)
    assert second.slow_reasons() == [reasons.KEPT]


def test_live_result_at_the_start_slows_the_next_call(cuda_on_cpu: CudaOnCpu) -> None:
    """Only the slow path checks, and ends the path that began with the live result once that is released."""
    first, second = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu))

    def iteration(start: int, let_go_of: list[torch.Tensor] | None = None) -> torch.Tensor:
        first.checked(values(start), values(-2 * start), W)
        (let_go_of or []).clear()
        return second.checked(values(start + 1), values(-2 * start), W, mark=False)[0]

    settle(iteration, first, second)
    held = [iteration(40)]
    assert slow_reasons(first, second) == []
    iteration(41, let_go_of=held)
    assert second.slow_reasons() == [reasons.KEPT]
    assert first.uncaptured() == {reasons.KEPT: 1}
    assert not second.uncaptured()
    (one,) = managers()
    assert one.held_in_generation is None
    settle(iteration, first, second, calls=4)


def called_once_and_twice(cuda: CudaOnCpu, *, steady: bool) -> tuple[Compiled, list[int]]:
    """A function called twice in some iterations and once in others; how often each recording was replayed in them."""
    compiled = Compiled(Model(cuda), lean=steady)

    def iteration(start: int, calls: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        found = []
        for place in range(calls):
            x, y = values(start + place), values(start - 2 * place)
            found.append((compiled.function([x, y, W])[0], 2 * x + y * W))
        assert all(torch.equal(result, expected) for result, expected in found)

    for start in range(30):
        iteration(start, 2)
    compiled.slow_reasons()
    before = [node.replays for node in nodes()]
    for start in range(12):
        iteration(start, 2 if start % 5 == 0 else 1)
    found = [node.replays - replays for node, replays in zip(nodes(), before, strict=True)]
    return compiled, found


def test_second_call_in_iteration_replays_stocks_recording(cuda_on_cpu: CudaOnCpu) -> None:
    """Stock tries what follows the last call before it begins a new path."""
    stocks, by_stock = called_once_and_twice(cuda_on_cpu, steady=False)
    del stocks
    compiled, found = called_once_and_twice(cuda_on_cpu, steady=True)
    assert found == by_stock
    assert compiled.slow_reasons() == [reasons.ANOTHER_FOLLOWS]


class Two(Model):
    """The result, and the one with x and y exchanged."""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        x, y, w = inputs
        inputs.clear()
        return [*super().__call__([x, y, w]), *super().__call__([y, x, w])]


class Runs(torch.autograd.Function):
    """A function whose results refer to a backward, as those of AOTAutograd's do."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, function: Any, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(function(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return None, None, None


def test_live_result_survives_another_losing_its_history(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, leaf = Compiled(Two(cuda_on_cpu), outputs=2, is_inference=False), torch.ones(1, requires_grad=True)

    def iteration(start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The second result, and what it is."""
        torch.compiler.cudagraph_mark_step_begin()
        x, y = values(start), values(-2 * start)
        one, other = Runs.apply(leaf, compiled.function, [x, y, W])
        assert torch.equal(one, 2 * x + y * W)
        return other, 2 * y + x * W

    settle(iteration, compiled)
    held, expected = iteration(40)
    assert compiled.slow_reasons() == []
    for start in range(41, 44):
        iteration(start)
        assert torch.equal(held, expected)
    assert reasons.KEPT in compiled.slow_reasons()


def test_different_result_of_a_graph_takes_the_slow_path(cuda_on_cpu: CudaOnCpu) -> None:
    """The graph reads the recorded one, and nothing else distinguishes them."""
    first, second = Compiled(Two(cuda_on_cpu), outputs=2), Compiled(Model(cuda_on_cpu))

    def iteration(start: int, which: int = 0) -> None:
        x, y = values(start), values(-2 * start)
        second.checked(first.checked(x, y, W)[which], y, W, mark=False)

    settle(iteration, first, second)
    iteration(41, 1)
    assert second.slow_reasons() == [reasons.FIXED_INPUT_MOVED]


def test_result_passed_on_is_the_callers_tensor(cuda_on_cpu: CudaOnCpu) -> None:
    """A fast call releases only those results of earlier graphs that are dead after it."""
    first, second = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu, returns_x=True), outputs=2)

    def iteration(start: int) -> torch.Tensor:
        x, y = values(start), values(-2 * start)
        (made,) = first.checked(x, y, W)
        assert second.checked(made, y, W, mark=False)[1] is made
        assert torch.equal(made, 2 * x + y * W)
        return made

    settle(iteration, first, second)
    for start in range(4):
        made = iteration(start)
        assert nodes()[-1].outputs_weakrefs[1]() is not None, "its memory counts as in use"
        del made
    assert slow_reasons(first, second) == []


def test_recording_without_a_graph_has_no_fast_path(cuda_on_cpu: CudaOnCpu) -> None:
    """A finalizer of the program may end all graphs during a call."""
    compiled = on_fast_path(cuda_on_cpu)
    (node,) = nodes()
    assert node.takes_fast_path and compiled
    node.graph = None
    node.expect_again()
    assert not node.takes_fast_path


def test_fast_call_clears_the_input_list(cuda_on_cpu: CudaOnCpu) -> None:
    """Otherwise the caller would keep them and their memory alive while later functions run."""
    compiled = on_fast_path(cuda_on_cpu)
    torch.compiler.cudagraph_mark_step_begin()
    given = [values(1), values(2), W]
    compiled.function(given)
    assert given == []
    assert compiled.slow_reasons() == []


def test_bytes_copied_by_fast_calls_are_counted(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu, hides_y=True))
    check(compiled, W, calls=30)
    compiled.slow_reasons()
    before = compiled.reports[0].total_copied_bytes
    check(compiled, W, calls=4)
    assert compiled.slow_reasons() == []
    assert compiled.reports[0].total_copied_bytes == before + 4 * W.nbytes


def test_forwards_without_backward_are_fast_with_step_marks(cuda_on_cpu: CudaOnCpu) -> None:
    """With marks an iteration begins although the previous backward never ran."""
    training = training_of(cuda_on_cpu)
    replays = cuda_on_cpu.replays
    for step in range(6):
        training.step(step, backward=False)
    assert slow_reasons(*training.both) == []
    assert cuda_on_cpu.replays == replays + 6


def test_calls_are_fast_while_work_on_their_recording_waits(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", 100)
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W, calls=4)
    compiled.slow_reasons()
    check(compiled, W, calls=20)
    assert compiled.slow_reasons() == []
    assert compiled.reports[0].stage == "waiting"


def test_backward_of_the_last_results_is_released(cuda_on_cpu: CudaOnCpu) -> None:
    """The backward references parameters that may have been swapped."""
    compiled, weights = Compiled(Model(cuda_on_cpu), is_inference=False), [values(5), values(6)]

    def serve(start: int) -> weakref.ref[torch.Tensor]:
        """To what the backward of the results refers to."""
        torch.compiler.cudagraph_mark_step_begin()
        leaf, x, y, w = torch.ones(1, requires_grad=True), values(start), values(-2 * start), weights[start % 2]
        (result,) = Runs.apply(leaf, compiled.function, [x, y, w])
        assert torch.equal(result, 2 * x + y * w)
        return weakref.ref(leaf)

    settle(serve, compiled)
    for start in range(40, 46):
        assert serve(start)() is None
    assert compiled.slow_reasons() == []
    assert len(nodes()) == 2
