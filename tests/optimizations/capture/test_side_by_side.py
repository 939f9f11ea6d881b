"""Independent kernels of steps and callables run at the same time: in any order that their memory allows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.side_by_side import NotLaunched, side_by_side
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.concurrency import branches as branches_module
from optimizations.concurrency.launch_log import LaunchLog, Logged
from optimizations.concurrency.order import Launch, LaunchOrder
from optimizations.report.concurrency import ConcurrencyReport


class Towers(nn.Module):
    """Stacks that do not depend on each other until their results are added, and one of batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.stack([tower(x) for tower in self.towers]).sum(0))


class SharedStatistics(nn.Module):
    """Two branches that update the same batch statistics, which no schema says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.weights = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * self.weights[0]) + self.norm(x * self.weights[1])


def training(
    optimizer: Callable[..., torch.optim.Optimizer], kind: type[nn.Module] = Towers
) -> tuple[Callable[..., Any], nn.Module]:
    torch.manual_seed(3)
    model = kind()
    made = optimizer(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        made.step()
        return loss.detach()

    return step, model


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(count)]


def compared(
    optimizer: Callable[..., torch.optim.Optimizer],
    calls: int = 24,
    kind: type[nn.Module] = Towers,
    race: Any = None,
    concurrency: Any = "auto",
) -> tuple[GraphedStep, CpuDevice, ConcurrencyReport]:
    """A step with branches on these calls, whose losses and parameters must be those of eager."""
    (eager, theirs), (step, mine) = training(optimizer, kind), training(optimizer, kind)
    device = CpuDevice()
    device.race = race or device.race
    graphed = GraphedStep(step, device=device, concurrency=concurrency)
    for batch in batches(calls):
        assert torch.equal(graphed(*batch), eager(*batch))
    assert all(map(torch.equal, mine.state_dict().values(), theirs.state_dict().values()))
    (recording,) = graphed.report().recordings
    assert recording.concurrency is not None
    return graphed, device, recording.concurrency


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, foreach=False)


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.SGD], ids=["single", "lists"])
def test_step_is_bit_identical_in_every_allowed_order(optimizer: Any) -> None:
    _, device, report = compared(optimizer)
    assert report.decision == "branches" and report.width >= 3 and report.longest_path < report.launches, report
    (graph,) = [one for one in device.graphs if one.valid]
    assert len(graph.orders) > 10


def test_batch_statistics_are_written_in_order() -> None:
    assert compared(sgd, kind=SharedStatistics)[-1].decision == "branches"


@pytest.mark.parametrize("run", [lambda: compared(sgd), lambda: trained("auto")], ids=["step", "callables"])
def test_missing_edges_are_noticed(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchOrder, "node_edges", lambda order: [])
    with pytest.raises(AssertionError):
        run()


def test_steps_stay_chains_without_the_option() -> None:
    *_, report = compared(sgd, 6, concurrency="off")
    assert (report.decision, report.launches) == ("chain", 0) and "'off'" in report.reason


def test_error_while_ordering_launches_keeps_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise ValueError("the launches do not follow one another")

    monkeypatch.setattr(branches_module, "order_launches", fails)
    _, device, report = compared(sgd, calls=8)
    assert report.decision == "chain" and "do not follow" in report.reason
    assert all(one.launched_edges is None for one in device.graphs)


def test_chain_is_used_where_it_is_faster() -> None:
    class ChainWins:
        def __init__(self, alternatives: Any) -> None:
            self.turns = [*alternatives]
            self.winner: str | None = None
            self.median_us = {"chain": 10.0, "branches": 11.0}

        def run(self, call: Callable[[str], tuple[Any, Any]]) -> Any:
            result = call(self.turns.pop(0))[0]
            self.winner = None if self.turns else "chain"
            return result

    _, device, report = compared(sgd, 10, race=ChainWins)
    assert (report.decision, report.chain_us) == ("chain", 10.0)
    (graph,) = [one for one in device.graphs if one.valid]
    assert graph.launched_edges is not None
    assert graph.launched_edges == {(index, index + 1) for index in range(len(graph.nodes()) - 1)}


def test_collectives_keep_the_chain() -> None:
    log = LaunchLog(lambda: 0, device_type="cpu")
    log.logged.append(Logged(Launch("c10d.allreduce_.default", 0), True))
    assert "collectives" in str(side_by_side(CpuDevice(), None, 0, log))


def test_disabled_graph_is_not_launched() -> None:
    graphed, *_ = compared(sgd, calls=8)
    (recording,) = graphed._recorder.recordings.tried
    assert isinstance(recording.graph.race, branches_module.Branches)
    recording.graph.race.unusable = "its edges could not be put back"
    replays = recording.replays
    with pytest.raises(NotLaunched, match="put back"):
        recording.launch(list(batches(1)[0]), graphed._recorder._rates)
    assert recording.replays == replays


def trained(concurrency: Any) -> tuple[GraphedCallables, CpuDevice]:
    """Graphed callables in a training loop, whose losses and parameters must be those of eager."""
    torch.manual_seed(3)
    theirs = Towers()
    mine = copy.deepcopy(theirs)
    device, given = CpuDevice(), batches(20)
    graphed = GraphedCallables([mine], [(given[0][0],)], device=device, concurrency=concurrency)
    optimizers = [sgd(model.parameters(), lr=0.05) for model in (theirs, mine)]
    for x, y in given:
        losses = []
        for model, optimizer in zip((theirs, mine), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert all(map(torch.equal, mine.state_dict().values(), theirs.state_dict().values()))
    assert all(one.replays == len(given) for one in graphed.report())
    return graphed, device


def test_callables_are_bit_identical_in_every_order() -> None:
    graphed, device = trained("auto")
    found = [one.concurrency for one in graphed.report()]
    assert [one.decision for one in found if one is not None] == ["branches", "branches"], found
    assert all(one is not None and one.longest_path < one.launches for one in found)
    assert max(len(one.orders) for one in device.graphs) > 10


def test_callables_stay_chains_without_the_option() -> None:
    graphed, _ = trained("off")
    assert all(one.concurrency is not None and "'off'" in one.concurrency.reason for one in graphed.report())
    with pytest.raises(ValueError, match="concurrency='on' is unknown"):
        GraphedCallables([Towers()], [(torch.zeros(4, 8),)], device=CpuDevice(), concurrency="on")  # type: ignore[arg-type]


def test_callables_do_not_launch_a_disabled_graph() -> None:
    graphed, _ = trained("auto")
    slot = graphed._slots[0]
    assert isinstance(slot.forward.race, branches_module.Branches)
    slot.forward.race.unusable = "its edges could not be put back"
    with pytest.raises(NotLaunched, match="put back"):
        slot.forward.replay()
