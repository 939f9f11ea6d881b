"""Random programs on the simulated driver, with steady calls: no result is ever another than eager's."""

from __future__ import annotations

import random

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, nodes, values

from optimizations.trees.containers import managers

STEPS = 150
WEIGHTS = 3


class Program:
    """Calls of two functions in drawn orders. Results are held for drawn times, and must keep their values."""

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
    full = sum(way.calls for one in program.functions for way in one.functions[0].slow_calls())
    assert steady > STEPS / 4, "steady calls were tried, and left"
    assert full > STEPS / 8
    reasons = {way.reason for one in program.functions for way in one.functions[0].slow_calls()}
    assert len(reasons) >= 4, reasons
