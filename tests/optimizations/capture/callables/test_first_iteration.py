"""Without samples, order and samples are those of the first iteration."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.callables.order import MOST_SIGNATURES
from optimizations.capture.step.observer import StepRefused


def places(group: GraphedCallables) -> list[tuple[int, int]]:
    return [(one.callable, one.index) for one in group.report() if one.direction == "forward"]


def one_call(module: nn.Module, x: torch.Tensor) -> None:
    module(x).square().sum().backward()


def test_program_without_optimizer_ends_its_iteration() -> None:
    module = nn.Linear(3, 3)
    group = GraphedCallables(module, device=CpuDevice())
    for _ in range(2):
        one_call(module, torch.randn(2, 3))
    assert not group.report()
    group.end_iteration()
    one_call(module, torch.randn(2, 3))
    assert [one.replays for one in group.report()] == [1, 1]


def test_optimizer_step_before_a_backward_ends_no_iteration() -> None:
    """A discriminator's optimizer steps before the generator's backward has run."""
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    group = GraphedCallables(module, device=CpuDevice())
    optimizer.step()
    loss = module(torch.randn(2, 3)).sum()
    optimizer.step()
    other = module(torch.randn(2, 3)).sum()
    assert not group.report()
    loss.backward()
    other.backward()
    del loss, other
    optimizer.step()
    one_call(module, torch.randn(2, 3))
    assert sorted(places(group)) == [(1, 0), (1, 1)], "two were alive at one time"


def test_forward_without_backward_is_not_waited_for() -> None:
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    group = GraphedCallables(modules, device=CpuDevice())
    optimizer = torch.optim.SGD(modules[0].parameters(), lr=0.1)
    for _ in range(3):
        modules[1](torch.randn(2, 3))
        one_call(modules[0], torch.randn(2, 3))
        optimizer.step()
    assert group.calls_without_graph == 0
    assert [(one.callable, one.direction, one.replays) for one in group.report()] == [
        *((1, "forward", 2), (1, "backward", 2), (2, "forward", 2), (2, "backward", 0)),
    ]


@pytest.mark.parametrize("view", ["slice", "expanded", "with a gradient"])
def test_copies_of_arguments_keep_strides(view: str) -> None:
    """Targets are mostly slices (`tokens[:, 1:]`), and masks are expanded."""
    module = nn.Linear(3, 3)
    group = GraphedCallables(module, device=CpuDevice())
    for _ in range(3):
        whole = torch.randn(2, 4, requires_grad=view == "with a gradient")
        one_call(module, whole[:1, :3].expand(2, 3) if view == "expanded" else whole[:, :-1])
        group.end_iteration()
    assert group.calls_without_graph == 0
    assert [one.replays for one in group.report()] == [2, 2]


def test_copies_of_arguments_are_bounded() -> None:
    module = nn.Linear(3, 3)
    group = GraphedCallables(module, device=CpuDevice())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        for rows in range(1, MOST_SIGNATURES + 2):
            one_call(module, torch.randn(rows, 3))
        optimizer.step()
    assert len(places(group)) == MOST_SIGNATURES and group.calls_without_graph == 1


def test_callable_first_called_later_runs_uncaptured() -> None:
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    reference = copy.deepcopy(modules)
    GraphedCallables(modules, device=CpuDevice())
    optimizer = torch.optim.SGD(modules[0].parameters(), lr=0.1)
    one_call(modules[0], torch.randn(2, 3))
    optimizer.step()
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match="it was not called in the first iteration"):
        assert torch.equal(modules[1](x), reference[1](x))


def test_refusal_is_raised_once_after_the_first_iteration() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    module = Reads(3, 3)
    reference = copy.deepcopy(module)
    GraphedCallables(module, device=CpuDevice())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    one_call(module, torch.randn(2, 3))
    optimizer.step()
    with pytest.raises(StepRefused, match="callable 1 reads a value of the GPU on the host"):
        module(torch.randn(2, 3))
    x = torch.randn(2, 3)
    assert torch.equal(module(x), reference(x))


def test_first_calls_set_up_is_finished_before_the_capture() -> None:
    class SetsUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(3, 3), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = x.detach().mean(0)
            return torch.as_tensor(self.linear(x) + self.table)

    torch.manual_seed(0)
    module = SetsUp()
    reference = copy.deepcopy(module)
    group = GraphedCallables(module, device=CpuDevice())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for x in torch.randn(3, 2, 3):
        assert torch.equal(module(x), reference(x))
        one_call(module, x)
        optimizer.step()
    assert group.report()[0].replays == 4


def test_validation_is_excluded_from_the_first_iteration() -> None:
    module = nn.Linear(3, 3)
    group = GraphedCallables(module, device=CpuDevice())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(2):
        module.eval()
        with torch.no_grad():
            module(torch.randn(7, 3))
        module.train()
        assert not group.report()
        one_call(module, torch.randn(2, 3))
        optimizer.step()
    assert len(group.report()) == 2 and group.report()[0].replays == 1


def test_optimizer_hooks_are_removed_with_the_group() -> None:
    def hooks() -> int:
        return len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)

    before = hooks()
    group = GraphedCallables(nn.Linear(3, 3), device=CpuDevice())
    assert hooks() == before + 1
    group.close()
    assert hooks() == before
