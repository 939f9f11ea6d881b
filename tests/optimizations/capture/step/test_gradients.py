"""Gradients from before a captured step, whose addresses a graph may hold as stale values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice, CpuGraph
from step_parts import batches, loss_of, network

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.records import CapturedGraph, MemoryRange, MemsetNode

Mentions = Callable[..., bool]


def training(reads: Callable[[torch.Tensor], None] | None = None) -> tuple[Callable[..., Any], torch.nn.Module]:
    """A step that throws gradients away before it computes others. `reads`: what is done with each one before."""
    model = network("cpu")

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for parameter in model.parameters():
            if reads is not None and parameter.grad is not None:
                reads(parameter.grad)
            parameter.grad = None
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return step, model


class Untold(CpuDevice):
    """A device that does not report arguments of nodes, so that any address may be read."""

    def read(self, graph: CpuGraph) -> CapturedGraph:
        raise CudaCallFailed("cuGraphGetNodes", 1, "not told")


def run(
    mentions: Mentions | None, calls: int = 8, device: CpuDevice | None = None
) -> tuple[GraphedStep, CpuDevice, list[bool]]:
    """Return the step after so many calls, and whether each call's loss and gradients equal eager's."""
    device, alike = device or Untold(), []
    if mentions is not None:
        device.mentions = mentions  # type: ignore[method-assign]
    (made, model), (other, reference) = training(), training()
    step = GraphedStep(made, device=device)
    for batch in batches("cpu", calls):
        same = torch.equal(step(*batch), other(*batch))
        alike.append(
            same
            and all(
                torch.equal(one.grad, its.grad)
                for one, its in zip(model.parameters(), reference.parameters(), strict=True)
                if one.grad is not None and its.grad is not None
            )
        )
    return step, device, alike


def test_gradients_in_graph_arguments_are_loaded() -> None:
    step, device, alike = run(lambda graph, memory, but=(): bool(memory))
    assert all(alike) and device.captures == 1
    assert step.report().replays >= 4
    (recording,) = step._recorder.recordings.tried
    assert any(recording.gradients._stays)


def test_stale_pointers_in_operator_kernels_load_no_gradients() -> None:
    """Operators read only their arguments, and these gradients were not passed."""
    step, device, alike = run(lambda graph, memory, but=(): bool(memory), device=CpuDevice())
    assert all(alike) and device.captures == 1 and step.report().replays >= 4
    (recording,) = step._recorder.recordings.tried
    assert not any(recording.gradients._stays)


class WithNode(CpuDevice):
    """A device whose graphs have one more node, which fills the memory that was queried last."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[MemoryRange] = []

    def mentions(self, graph: CpuGraph, memory: Sequence[MemoryRange], but: Collection[int] = ()) -> bool:
        self.asked = list(memory) or self.asked
        return bool(memory)

    def read(self, graph: CpuGraph) -> CapturedGraph:
        captured = super().read(graph)
        if not self.asked:
            return captured
        place = self.asked[0]
        fill = MemsetNode(
            address=place.address, pitch_bytes=8, value=0, element_bytes=1, width=place.size_bytes, height=1
        )
        return captured.model_copy(update={"nodes": [*captured.nodes, fill]})


class Unknown(CpuDevice):
    """A device that reports nothing of captured graphs."""

    def node_count(self) -> int:
        raise CudaCallFailed("cuGraphGetNodes", 1, "not told")


@pytest.mark.parametrize("kind", [WithNode, Unknown])
def test_pointers_of_unknown_nodes_may_be_read(kind: type[CpuDevice]) -> None:
    device = kind()
    if kind is Unknown:
        device.mentions = lambda graph, memory, but=(): bool(memory)  # type: ignore[method-assign]
    step, device, alike = run(None, device=device)
    assert all(alike) and device.captures == 1 and step.report().replays >= 4
    (recording,) = step._recorder.recordings.tried
    assert any(recording.gradients._stays)


def test_equal_names_in_two_functions_have_own_gradients() -> None:
    """Some of which are there before a call, and some not."""

    def scaled(start: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.full((8,), start))
        return lambda x: (x * weight).square().sum(), weight

    found: dict[bool, list[Any]] = {}
    for graphed in (False, True):
        (one, first), (other, second) = scaled(0.1), scaled(0.2)

        def step(x: torch.Tensor, one: Any = one, other: Any = other) -> torch.Tensor:
            loss = one(x) + other(x)
            loss.backward()
            return loss.detach()

        made: Any = GraphedStep(step, device=CpuDevice()) if graphed else step
        found[graphed] = seen = []
        for index in range(18):
            seen.append(made(torch.full((8,), index + 1.0)))
            seen += [parameter.grad.clone() for parameter in (first, second)]  # type: ignore[union-attr]
            if index % 3 == 2:
                first.grad = None
            if index % 5 == 4:
                second.grad = None
        replays = made.report().replays if graphed else 0
    assert all(map(torch.equal, found[True], found[False]))
    assert replays >= 8


def test_unused_gradients_of_another_step_are_unchanged() -> None:
    """The program references the recorded gradient: it is restored, and is no longer the parameter's."""
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        mine = torch.optim.SGD(layers[0].parameters(), lr=0.1)

        def step(x: torch.Tensor, layers: Any = layers, mine: Any = mine) -> torch.Tensor:
            loss: torch.Tensor = layers[0](x).square().mean() + 0 * layers[1].weight.detach().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            mine.step()
            mine.zero_grad()
            return loss.detach()

        call: Any = GraphedStep(step, device=CpuDevice()) if graphs else step
        held = layers[1].weight.grad = torch.ones(2, 2)
        for index in range(8):
            if index >= 5:
                layers[1].weight.grad = torch.full((2, 2), float(index))
            there = layers[1].weight.grad
            call(torch.randn(2, 2))
            assert layers[1].weight.grad is there
            found.append([there.clone(), held.clone(), layers[0].weight.detach().clone()])
        assert not graphs or call.report().replays >= 3
    for one, other in zip(found[:8], found[8:], strict=True):
        assert all(map(torch.equal, one, other))


class Sharing:
    """A parameter whose gradient lies in memory that an attribute holds as well, while `others` stand in its place."""

    def __init__(self, use: Callable[[Sharing, torch.Tensor], torch.Tensor]) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.flat = torch.arange(8.0)
        self.eager = functools.partial(use, self)
        self.step = GraphedStep(self.eager, device=CpuDevice())

    @property
    def device(self) -> Any:
        return self.step._recorder.device

    def gradient(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return self.weight.grad


def reads_both(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    return (one.flat * torch.arange(8)).sum() + (one.gradient() * x).sum()


def adds_and_reads(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    (one.weight * x).sum().backward()  # type: ignore[no-untyped-call]
    return (one.flat * torch.arange(8)).sum() + one.gradient().sum()


def clears_and_adds(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    one.flat.zero_()
    (one.weight * x).sum().backward()  # type: ignore[no-untyped-call]
    return one.gradient().sum()


def writes_without_a_version(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    one.flat.data.fill_(2.0)
    return (one.gradient() * x).sum()


SHARED = [reads_both, adds_and_reads, clears_and_adds, writes_without_a_version]


@pytest.mark.parametrize("use", SHARED)
def test_other_gradient_does_not_show_in_shared_memory(
    use: Callable[[Sharing, torch.Tensor], torch.Tensor],
) -> None:
    theirs, mine = Sharing(use), Sharing(use)
    for index in range(24):
        for one in (theirs, mine):
            one.weight.grad = one.flat[2:6] if index < 6 or index % 3 else torch.full((4,), float(index))
        x = torch.full((4,), 1.0 + index)
        assert torch.equal(mine.step(x), theirs.eager(x))
        assert torch.equal(mine.flat, theirs.flat) and torch.equal(mine.gradient(), theirs.gradient())
