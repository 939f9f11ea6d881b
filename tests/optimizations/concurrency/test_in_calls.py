"""A recording's chain is raced against branches in the program's calls, before its inputs are read in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_gpu.driver import Node
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, Compiled, Model, values, word

from optimizations.concurrency.branches import BRANCHES, CHAIN
from optimizations.concurrency.order import Launch
from optimizations.trees import node
from tests.optimizations.concurrency.test_branches import Race, log_of


class TwoKernels(Model):
    """out = 2 * x + y * w twice, by two kernels that do not depend on each other."""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        x, y, w = inputs
        (first,) = super().__call__(inputs)
        if self.cuda.capturing is None:
            return [first, first.clone()]
        second = self.cuda.allocate(COUNT)
        pointers = [word(one.data_ptr()) for one in (x, y, w, second)]
        graph = self.cuda.capturing.graph
        chain = self.cuda.driver.graphs[graph].nodes[-1:]
        self.cuda.driver.add_node(graph, Node("KERNEL", self.body, pointers), after=chain)
        return [first, second]


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The alternative that wins each race of two launches that do not depend on each other."""
    faster = [BRANCHES]
    launches = [Launch(f"kernel {place}", place, writes=((8 * place, 8 * place + 8),)) for place in range(2)]
    monkeypatch.setattr(node, "log_of_capture", lambda *arguments: log_of(launches))
    monkeypatch.setattr(node, "noted", lambda log, model, *arguments: model)
    monkeypatch.setattr(node, "Race", lambda names: Race(names, faster[0]))
    monkeypatch.setattr(node, "mark", lambda device_index: object())
    return faster


def called(compiled: Compiled, w: torch.Tensor, calls: int) -> None:
    for step in range(calls):
        x, y = values(step), values(-3 * step)
        for result in compiled(x, y, w):
            assert torch.equal(result, 2 * x + y * w)


@pytest.mark.parametrize("winner", [BRANCHES, CHAIN])
def test_inputs_are_read_in_place_after_the_race(
    cuda_on_cpu: CudaOnCpu,
    faster: list[str],
    winner: str,
) -> None:
    faster[0] = winner
    compiled, w = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto"), values(7)
    called(compiled, w, 4)
    (during,) = compiled.reports
    assert during.concurrency is not None and during.concurrency.decision == "measuring"
    assert during.stage == "racing"
    called(compiled, w, 24)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert (report.concurrency.decision, report.concurrency.width) == (winner, 2)
    assert report.concurrency.chain_us == 100.0
    assert report.stage == "done"
    assert all(one.indirect for one in report.inputs)


def test_moved_parameter_ends_the_race(cuda_on_cpu: CudaOnCpu, faster: list[str]) -> None:
    compiled = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto")
    for start in range(12):
        called(compiled, values(start), 1)
    called(compiled, values(1), 30)
    assert all(one.concurrency is not None for one in compiled.reports)


def test_disabled_option_keeps_the_chain_with_a_reason(cuda_on_cpu: CudaOnCpu, faster: list[str]) -> None:
    compiled = Compiled(TwoKernels(cuda_on_cpu), outputs=2)
    called(compiled, values(7), 10)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert (report.concurrency.decision, report.concurrency.reason) == ("chain", "the option concurrency is 'off'")


@pytest.mark.parametrize(
    ("call", "winner", "decision"),
    [
        ("cuGraphGetNodes", BRANCHES, CHAIN),
        ("cuGraphGetEdges", BRANCHES, CHAIN),
        ("cuGraphRemoveDependencies", BRANCHES, CHAIN),
        ("cuGraphAddDependencies", CHAIN, BRANCHES),
    ],
)
def test_driver_refusal_leaves_a_correct_graph(
    cuda_on_cpu: CudaOnCpu,
    faster: list[str],
    call: str,
    winner: str,
    decision: str,
) -> None:
    faster[0] = winner
    compiled, w = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto"), values(7)
    called(compiled, w, 2)
    cuda_on_cpu.driver.failing.add(call)
    called(compiled, w, 60)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert report.concurrency.decision == decision
    assert "80.0 us" not in report.concurrency.reason
