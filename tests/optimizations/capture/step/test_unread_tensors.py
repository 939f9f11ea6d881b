"""Tensors that no operator of a step reads, and that count all the same: it returns them, or binds them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import batches, loss_of, network

from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 14
Kept = SimpleNamespace
Binds = Callable[[Kept, torch.Tensor], Any]
"""What a step does with what it keeps, and a tensor that it is given; its result is returned."""


def returns(kept: Kept, given: torch.Tensor) -> Any:
    return kept.source


def binds(kept: Kept, given: torch.Tensor) -> Any:
    kept.last = kept.source


def binds_in_a_list(kept: Kept, given: torch.Tensor) -> Any:
    kept.many[0] = kept.pair[1]


def binds_what_it_is_given(kept: Kept, given: torch.Tensor) -> Any:
    kept.last = given


SEEN: list[tuple[Binds, str]] = [
    (returns, "source"),
    (binds, "source"),
    (binds, "target"),
    (binds_in_a_list, "target"),
    (binds_what_it_is_given, "target"),
]


def run(binding: Binds, graphed: bool, changed: str) -> tuple[list[list[Any]], Any]:
    model, mask = network("cpu"), torch.ones(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept(source=torch.zeros(3), last=None, many=[None], pair=(0.5, torch.zeros(3)))

    def step(batch: dict[str, torch.Tensor], given: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach(), binding(kept, given)

    call: Any = GraphedStep(step, device=CpuDevice()) if graphed else step
    found = []
    for index, (batch,) in enumerate(batches("cpu", CALLS)):
        found.append([call(batch, mask), kept.source, kept.last, kept.many[0], kept.pair[1]])
        if index == 7:
            new = torch.full((3,), 7.0)
            if changed == "source":
                kept.source, kept.pair = new, (0.5, new)
            else:
                kept.last = kept.many[0] = new
    return found, call


def values(nest: Any) -> Any:
    if isinstance(nest, torch.Tensor):
        return nest.tolist()
    if isinstance(nest, dict):
        return list(map(values, nest.values()))
    return list(map(values, nest)) if isinstance(nest, (list, tuple)) else nest


@pytest.mark.parametrize(("binding", "changed"), SEEN)
def test_another_tensor_in_the_place_of_one_that_is_returned_or_bound_is_seen(binding: Binds, changed: str) -> None:
    expected, _ = run(binding, False, changed)
    found, step = run(binding, True, changed)
    assert values(found) == values(expected)
    assert step.report().replays >= 5, "it is replayed before the change, at least"


def read_by_its_memory(graphed: bool) -> list[torch.Tensor]:
    model, kept = network("cpu"), [torch.zeros(())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        added = torch.empty(0).set_(kept[0].untyped_storage(), 0, ())
        optimizer.zero_grad()
        loss = loss_of(model, batch) + added
        loss.backward()
        optimizer.step()
        return loss.detach()

    call: Any = GraphedStep(step, device=CpuDevice()) if graphed else step
    found = []
    for index, (batch,) in enumerate(batches("cpu", CALLS)):
        found.append(call(batch))
        if index == 7:
            kept[0] = torch.full((), 7.0)
    assert not graphed or len(call.report().recordings) == 1
    return found


def test_a_tensor_whose_memory_is_given_to_another_is_read() -> None:
    assert all(map(torch.equal, read_by_its_memory(True), read_by_its_memory(False)))
