"""Fast calls of a forward with many results check all their references at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, Compiled, Model, Training, nodes, settle, slow_reasons, values

from optimizations.trees import liveness, reasons
from optimizations.trees.containers import managers

RESULTS = liveness.MANY + 3


class Backward(Model):
    def __call__(self, inputs: list[Any]) -> list[Any]:
        del inputs[3:]
        return super().__call__(inputs)


def training_of(cuda: CudaOnCpu) -> Training:
    """A training loop with many saved results, after all inputs are proven."""
    training = Training(Model(cuda, results=RESULTS), Backward(cuda), saved=RESULTS)
    settle(training.step, *training.both)
    return training


def test_dead_results_are_not_checked_one_by_one(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_of(cuda_on_cpu)
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
    training = training_of(cuda_on_cpu)
    seen = training.step(1, look=HOLDS[held])
    assert reasons.INPUT_STILL_HELD in slow_reasons(*training.both), "the backward would write over it"
    del seen
    settle(training.step, *training.both, calls=8)


def test_recreated_result_is_checked_with_the_others(cuda_on_cpu: CudaOnCpu) -> None:
    training = training_of(cuda_on_cpu)
    training.step(1, look=lambda saved: saved[3].unsqueeze_(0).dim())
    assert training.step(2, look=lambda saved: saved[3].shape) == (COUNT,)
    settle(training.step, *training.both, calls=3)
    seen = training.step(1, look=lambda saved: saved[3])
    assert reasons.INPUT_STILL_HELD in slow_reasons(*training.both) and seen.shape == (COUNT,)


def test_reference_counts_match_stocks_current_references(cuda_on_cpu: CudaOnCpu) -> None:
    training = training_of(cuda_on_cpu)
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
