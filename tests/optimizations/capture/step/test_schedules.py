"""Schedulers may change learning rates on every call of a step that is recorded once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import Graph, assert_as_eager, batches, loss_of, network, state_of, training_step
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 20
Make = Callable[[Any], torch.optim.Optimizer]

SCHEDULERS: dict[str, Callable[..., LRScheduler]] = {
    "OneCycleLR": lambda optimizer, cycles: OneCycleLR(
        optimizer, max_lr=0.05, total_steps=CALLS + 1, cycle_momentum=cycles
    ),
    "CyclicLR": lambda optimizer, cycles: CyclicLR(optimizer, 0.01, 0.05, step_size_up=4, cycle_momentum=cycles),
}


@pytest.fixture(autouse=True)
def capturable_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adam's kernels for graphs run on the CPU as well; it says that they do not."""
    for module in ("adam", "nadam"):
        held = sys.modules[f"torch.optim.{module}"]
        monkeypatch.setattr(held, "_get_capturable_supported_devices", lambda *given, **named: ["cpu", "cuda"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs without a CUDA graph")
        yield


def adam(kind: type = torch.optim.AdamW, **options: Any) -> Make:
    return lambda parameters: kind(parameters, lr=0.01, **options)


def groups(parameters: Any) -> torch.optim.Optimizer:
    found = list(parameters)
    given = [{"params": found[:2]}, {"params": found[2:], "betas": (0.8, 0.99), "weight_decay": 0.0}]
    return torch.optim.AdamW(given, lr=0.01, capturable=True, foreach=True)


def run(
    make: Make,
    schedule: str,
    *,
    graphed: bool,
    between: Callable[[int, torch.optim.Optimizer], None] | None = None,
    cycles: bool = False,
) -> tuple[list[torch.Tensor], Any]:
    model = network("cpu")
    optimizer = make(model.parameters())
    scheduler = SCHEDULERS[schedule](optimizer, cycles)
    train = training_step(model, optimizer)
    step: Any = GraphedStep(train, device=CpuDevice()) if graphed else train
    found = []
    for index, batch in enumerate(batches("cpu", CALLS)):
        found.append(step(*batch).detach().clone())
        scheduler.step()
        if between is not None:
            between(index, optimizer)
    assert all(type(group["lr"]) is float for group in optimizer.param_groups)
    return [*found, *state_of(model, optimizer)], step.report() if graphed else None


EXACT = {
    "Adam": adam(torch.optim.Adam, capturable=True, foreach=True),
    "Adam with amsgrad": adam(torch.optim.Adam, capturable=True, foreach=True, amsgrad=True, weight_decay=0.1),
    "AdamW": adam(capturable=True, foreach=True, maximize=True),
    "two groups": groups,
}


@pytest.mark.parametrize("name", sorted(EXACT))
@pytest.mark.parametrize("schedule", sorted(SCHEDULERS))
def test_scheduled_learning_rate_reaches_the_graph(name: str, schedule: str) -> None:
    expected, _ = run(EXACT[name], schedule, graphed=False)
    found, report = run(EXACT[name], schedule, graphed=True)
    for mine, theirs in zip(found, expected, strict=True):
        # The learning rate is float32 in the graph; eager multiplies it with the weight decay in double precision.
        if name == "Adam":  # without weight decay nothing is derived from a number of single precision
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert (report.refusals, report.replays, len(report.recordings)) == ((), CALLS - 3, 1)
    assert report.patched_learning_rates == (2 if name == "two groups" else 1)


class Wrapper(torch.optim.Optimizer):
    """Share the groups of an optimizer, as the wrappers of Accelerate and Fabric do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.wrapped = optimizer

    @property
    def param_groups(self) -> Any:
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:
        return self.wrapped.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wrapped.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step()


def test_wrapped_optimizer_keeps_learning_rates() -> None:
    """Two optimizers share a group: its number is restored once, not converted from the single-precision tensor."""

    def rates(graph: Graph) -> Iterator[float]:
        model = network("cpu")
        optimizer = adam(capturable=True, foreach=True)(model.parameters())
        step = graph(training_step(model, Wrapper(optimizer)))
        for index, batch in enumerate(batches("cpu", 8)):
            step(*batch)
            rate = optimizer.param_groups[0]["lr"]
            yield rate
            optimizer.param_groups[0]["lr"] = 0.9 * rate + 0.1 / (index + 3)

    report = assert_as_eager(rates)
    assert (report.patched_learning_rates, report.refusals) == (1, ()) and report.replays >= 4


REFUSED = {
    "fused": (adam(fused=True), "optimizer.param_groups[0]['betas']", "cycle_momentum=False"),
    "another optimizer with betas": (
        adam(torch.optim.NAdam, capturable=True, foreach=True),
        "optimizer.param_groups[0]['betas']",
        "cycle_momentum=False",
    ),
    "momentum": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        "optimizer.param_groups[0]['momentum']",
        "cycle_momentum=False",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_number_only_options_are_refused_by_name(name: str) -> None:
    make, value, advice = REFUSED[name]
    expected, _ = run(make, "OneCycleLR", graphed=False, cycles=True)
    found, report = run(make, "OneCycleLR", graphed=True, cycles=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    (refusal,) = report.refusals
    assert value in refusal.reason and "['lr']" not in refusal.reason and advice in refusal.advice
    assert refusal.source_line is not None and "step_parts.py:" in refusal.source_line
    assert report.recordings == ()


def test_weight_decay_that_changes_on_every_call_is_named() -> None:
    def between(index: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 / (index + 1)

    make = EXACT["Adam with amsgrad"]
    expected, _ = run(make, "CyclicLR", graphed=False, between=between)
    found, report = run(make, "CyclicLR", graphed=True, between=between)
    assert all(map(torch.equal, found, expected))
    (refusal,) = report.refusals
    assert "optimizer.param_groups[0]['weight_decay']" in refusal.reason and "change it seldom" in refusal.advice


def test_rate_written_by_program_and_step_equals_eager() -> None:
    """The step's own write to the learning rate's tensor must not be taken for the program's."""

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        model = network("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, fused=True)
        train = training_step(model, optimizer)

        def train_and_set(batch: Any) -> torch.Tensor:
            loss = train(batch)
            if isinstance(rate := optimizer.param_groups[0]["lr"], torch.Tensor):
                rate.fill_(1.0)  # as schedulers do
            else:
                optimizer.param_groups[0]["lr"] = 1.0
            return loss.detach()

        step = graph(train_and_set)
        for index, (batch,) in enumerate(batches("cpu", 8)):
            optimizer.param_groups[0]["lr"] = 0.25 if index else 0.5
            rows = 1 + index // 2  # calls of a signature that was not refused yet
            yield step({"x": batch["x"][:rows], "y": batch["y"][:rows]})
        yield from state_of(model, optimizer)

    assert_as_eager(program)


class Sign(torch.optim.Optimizer):
    """One of the program's own."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign() * group["lr"])


def test_custom_optimizer_refusal_explains_tensor_rates() -> None:
    refusals, replays = [], []
    for rate in (0.1, torch.tensor(0.1)):
        model = network("cpu")
        optimizer = Sign(model.parameters(), rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = GraphedStep(training_step(model, optimizer), device=CpuDevice())
        for batch in batches("cpu", 12):
            step(*batch)
            scheduler.step()
        refusals.append([one.advice for one in step.report().refusals])
        replays.append(step.report().replays)
    assert len(refusals[0]) == 1 and "one of your own a tensor on the GPU" in refusals[0][0]
    assert refusals[1] == [] and replays[1] == 12 - 3


class Prepared:
    """A library's accelerator, which references the scheduler next to what a step calls."""

    __module__ = "hypothesis"

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self.weight = 1.0

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.weight).backward()


def referenced_by_a_library(
    work: Callable[[Prepared, torch.Tensor], Any], *, graphed: bool, between: Callable[[int, Prepared], None]
) -> tuple[list[torch.Tensor], Any]:
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    prepared = Prepared(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))  # powers of two are exact as float32

    def train(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        work(prepared, loss)
        optimizer.step()
        return loss.detach()

    step: Any = GraphedStep(train, device=CpuDevice()) if graphed else train
    found = []
    for index, batch in enumerate(batches("cpu", CALLS)):
        found.append(step(*batch))
        between(index, prepared)
    return [*found, *(one.detach() for one in model.parameters())], step


def test_scheduler_count_of_a_library_is_not_compared() -> None:
    def between(index: int, prepared: Prepared) -> None:
        prepared.scheduler.step()
        if index == 9:
            prepared.weight = 2.0

    expected, _ = referenced_by_a_library(Prepared.backward, graphed=False, between=between)
    found, step = referenced_by_a_library(lambda prepared, loss: prepared.backward(loss), graphed=True, between=between)
    assert all(map(torch.equal, found, expected))
    report = step.report()
    assert (report.refusals, len(report.recordings), report.replays) == ((), 2, CALLS - 3 - 2)


def test_scheduler_count_is_compared_where_it_may_be_read() -> None:
    def work(prepared: Prepared, loss: torch.Tensor) -> None:
        prepared.backward(loss * (1 + prepared.scheduler.last_epoch // 10))

    def between(index: int, prepared: Prepared) -> None:
        prepared.scheduler.step()

    expected, _ = referenced_by_a_library(work, graphed=False, between=between)
    found, _ = referenced_by_a_library(work, graphed=True, between=between)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("returned", [False, True])
def test_step_that_uses_a_rate_gets_numbers_and_is_refused(returned: bool) -> None:
    kept: dict[str, Any] = {"last": 0.0}
    model = network("cpu")
    optimizer = adam(capturable=True, foreach=True)(model.parameters())
    scheduler = SCHEDULERS["OneCycleLR"](optimizer, False)
    train = training_step(model, optimizer)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        loss = train(batch)
        used = optimizer.param_groups[0]["lr"]
        if not returned:
            kept["last"] = used
        return loss.detach(), used if returned else 0.0

    graphed = GraphedStep(step, device=CpuDevice())
    for batch in batches("cpu", 12):
        _, found = graphed(*batch)
        assert repr(found if returned else kept["last"]) == repr(optimizer.param_groups[0]["lr"])
        scheduler.step()
    report = graphed.report()
    assert report.recordings == () and report.refusals
