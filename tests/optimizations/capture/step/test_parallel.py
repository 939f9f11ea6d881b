"""Modules with collectives are refused by name with a remedy, or run uncaptured as often as they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network, training_step
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from optimizations.capture.step.call import DDP_WARM_UP
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.reach import reach
from optimizations.capture.step.watch import Watch


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """This process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def step_of(model: nn.Module) -> GraphedStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return GraphedStep(training_step(model, optimizer), device=CpuDevice())


def sharded() -> nn.Module:
    return fully_shard(network("cpu"))


MODELS: dict[str, tuple[Any, str, str]] = {
    "find_unused_parameters": (
        lambda: nn.parallel.DistributedDataParallel(network("cpu"), find_unused_parameters=True),
        "uses model with find_unused_parameters=True",
        "leave the option off",
    ),
    "gloo": (
        lambda: nn.parallel.DistributedDataParallel(network("cpu")),
        "uses model over gloo, whose collectives run on the host",
        "use the backend nccl",
    ),
    "DataParallel": (lambda: nn.DataParallel(network("cpu")), "a DataParallel", "use DistributedDataParallel"),
    "fully sharded": (sharded, "a fully sharded module", "use DistributedDataParallel"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_refusal_names_the_cause_and_the_remedy(name: str) -> None:
    make, reason, advice = MODELS[name]
    step = step_of(make())
    losses = [step(*batch).item() for batch in batches("cpu", 2)]
    (refusal,) = step.report().refusals
    assert reason in refusal.reason and advice in refusal.advice
    assert all(loss > 0 for loss in losses) and step.report().eager_calls == 2


def test_distributed_data_parallel_runs_uncaptured_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.parallel.DistributedDataParallel(network("cpu"))
    monkeypatch.setattr(distributed, "get_backend", lambda group: "nccl")
    step = step_of(model)
    for batch in batches("cpu", DDP_WARM_UP - 1):
        step(*batch)
    report = step.report()
    assert (report.refusals, report.eager_calls, report.recordings) == ((), DDP_WARM_UP - 1, ())


def test_gradient_exchange_of_a_backward_is_part_of_the_key() -> None:
    model = nn.parallel.DistributedDataParallel(network("cpu"))
    for batch in batches("cpu", 3):
        training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))(*batch)
    state = reach([("model", model)])
    watch = Watch(state, lambda held, key: False, lambda tensor: True, [])
    assert watch.unchanged()
    with model.no_sync():
        assert not watch.unchanged()
        assert watch.differing() == ["model.require_backward_grad_sync"]
    assert watch.unchanged()
    before = state.snapshot()
    loss_of(model, *batches("cpu", 1)[0]).backward()
    assert list(state.changes(before)) == []  # what it notes for itself is none
    model.eval()
    assert not watch.unchanged()
