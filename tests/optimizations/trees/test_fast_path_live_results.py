"""Fast calls next to live or missing results: which take the slow path, and what they must not overwrite."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu, at_address
from simulated_gpu.trees import COUNT, Compiled, Model, Training, check, nodes, settle, slow_reasons, values

from optimizations.trees import liveness, reasons
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


# Fast calls of a forward with many results check all their references at once.


RESULTS = liveness.MANY + 3


class Backward(Model):
    def __call__(self, inputs: list[Any]) -> list[Any]:
        del inputs[3:]
        return super().__call__(inputs)


def with_many_results(cuda: CudaOnCpu) -> Training:
    """A training loop with many saved results, after all inputs are proven."""
    training = Training(Model(cuda, results=RESULTS), Backward(cuda), saved=RESULTS)
    settle(training.step, *training.both)
    return training


def test_dead_results_are_not_checked_one_by_one(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    training = with_many_results(cuda_on_cpu)
    asked: list[int] = []
    references = liveness._references
    monkeypatch.setattr(liveness, "_references", lambda values, at: (asked.append(at), references(values, at))[1])
    for start in range(4):
        training.step(start)
    assert slow_reasons(*training.both) == []
    assert set(asked) <= {0}, "the gradient, the only result of the backward, is asked about alone"


HOLDS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "the result": lambda saved: saved[3],
    "a view of it": lambda saved: saved[3][4:8],
    "its storage": lambda saved: saved[3].untyped_storage(),
    "a tensor over its memory": lambda saved: saved[3].data,
    "a backward": lambda saved: torch.ones(COUNT, requires_grad=True) * saved[3],
}


@pytest.mark.parametrize("held", sorted(HOLDS))
def test_one_live_result_of_many_takes_the_slow_path(cuda_on_cpu: CudaOnCpu, held: str) -> None:
    training = with_many_results(cuda_on_cpu)
    seen = training.step(1, look=HOLDS[held])
    assert reasons.INPUT_STILL_HELD in slow_reasons(*training.both), "the backward would write over it"
    del seen
    settle(training.step, *training.both, calls=8)


def test_recreated_result_is_checked_with_the_others(cuda_on_cpu: CudaOnCpu) -> None:
    training = with_many_results(cuda_on_cpu)
    training.step(1, look=lambda saved: saved[3].unsqueeze_(0).dim())
    assert training.step(2, look=lambda saved: saved[3].shape) == (COUNT,)
    settle(training.step, *training.both, calls=3)
    seen = training.step(1, look=lambda saved: saved[3])
    assert reasons.INPUT_STILL_HELD in slow_reasons(*training.both) and seen.shape == (COUNT,)


def test_reference_counts_match_stocks_current_references(cuda_on_cpu: CudaOnCpu) -> None:
    training = with_many_results(cuda_on_cpu)
    node = next(one for one in nodes() if one.function is training.forward.functions[0])
    references = node.references([(0, place) for place in range(RESULTS)])
    assert type(references) is liveness.Many
    assert not liveness.any_alive(references) and references.idle()
    node._mark_prior_graph_output_as_aliased((0, 2))
    assert not references.idle() and liveness.any_alive(references), "what is aliased counts as held, as under stock"
    node.remove_node_cached_tensors()
    assert not references.idle() and not liveness.any_alive(references)


def test_reference_of_cpp_shows_in_the_count_of_python() -> None:
    """Counts of many results rely on it, on any version of PyTorch."""
    held = [torch.zeros(1)]
    unused = liveness._references(held, 0)
    product = torch.ones(1, requires_grad=True) * held[0]
    assert liveness._references(held, 0) > unused == liveness._UNUSED
    del product
    assert liveness._references(held, 0) == unused
    held[0].untyped_storage()
    assert liveness._references([held[0].untyped_storage()], 0) == liveness._UNUSED_STORAGE


STEPS = 150


WEIGHTS = 3


class Program:
    """Call two functions in random order. Results are live for random times and must keep their values."""

    def __init__(self, cuda: CudaOnCpu, seed: int) -> None:
        self.draw = random.Random(seed)
        self.functions = [Compiled(Model(cuda)), Compiled(Model(cuda, hides_y=seed % 2 == 1))]
        self.weights = [values(3 * index + 1) for index in range(WEIGHTS)]
        self.weight = self.weights[0]
        self.held: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.calls = 0

    def input(self) -> torch.Tensor:
        """Small whole numbers: sums and products of them are exact. Sometimes misaligned, or a result that is held."""
        if self.held and self.draw.random() < 0.05:
            given = self.draw.choice(self.held)[1]
            if given.shape == (16,) and float(given.abs().max()) < 1000:
                return given
        return values(self.draw.randrange(-20, 20), self.draw.choice((0, 0, 0, 0, 1)))

    def call(self, which: int) -> None:
        x, y = self.input(), self.input()
        expected = 2 * x + y * self.weight
        (out,) = self.functions[which].function([x, y, self.weight])
        self.calls += 1
        assert torch.equal(out, expected), self.calls
        if self.draw.random() < self.keeping:
            kept = out if self.draw.random() < 0.7 else out[4:8]
            until = self.calls + self.draw.randrange(1, 6)
            self.held.append((until, kept, expected if kept is out else expected[4:8]))

    def step(self, steady: bool) -> None:
        self.keeping = 0.0 if steady else 0.2
        torch.compiler.cudagraph_mark_step_begin()
        if not steady and self.draw.random() < 0.1:
            self.weight = self.draw.choice(self.weights)
        if not steady and self.draw.random() < 0.02:
            for one in managers():
                one.leave_pool()
        if not steady and self.draw.random() < 0.05:
            for node in nodes():
                node.takes_fast_path = False
        order = [0, 1] if steady or self.draw.random() < 0.7 else self.draw.choices((0, 1), k=self.draw.randrange(1, 4))
        for which in order:
            self.call(which)
        self.check()

    def check(self) -> None:
        for _, out, expected in self.held:
            assert torch.equal(out, expected), self.calls
        self.held = [one for one in self.held if one[0] > self.calls]


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_compute_what_eager_does(cuda_on_cpu: CudaOnCpu, seed: int) -> None:
    program = Program(cuda_on_cpu, seed)
    for index in range(STEPS):
        program.step(steady=index % 30 >= 15)
    steady = sum(report.steady_replays for one in program.functions for report in one.reports)
    slow = [calls for one in program.functions for calls in one.functions[0].slow_calls()]
    assert steady > STEPS / 4, "the fast path was tried, and left"
    assert sum(one.calls for one in slow) > STEPS / 8
    assert len({one.reason for one in slow}) >= 4, slow
