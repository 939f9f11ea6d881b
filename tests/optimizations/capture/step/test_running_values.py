"""Tensors that a step reads and binds again: sums, averages and states that are other tensors after each call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import batches, loss_of, network, training_step
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep

Step = Callable[[dict[str, torch.Tensor]], Any]
Made = tuple[Step, Callable[[], list[torch.Tensor]], Callable[[int], None]]
"""A step, what it keeps, and what the program does after each call."""
CALLS = 14
RUNNING: dict[str, Callable[[], Made]] = {}


def running(make: Callable[[], Made]) -> Callable[[], Made]:
    RUNNING[make.__name__] = make
    return make


def nothing(index: int) -> None:
    pass


def trained() -> Step:
    model = network("cpu")
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return lambda batch: train(batch).detach()


@running
def a_sum_in_an_attribute() -> Made:
    """The program keeps the sum so far, and starts another from zero."""
    train, trainer = trained(), SimpleNamespace(total=torch.zeros(()))
    held: list[torch.Tensor] = []

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        trainer.total = trainer.total + loss
        return loss

    def between(index: int) -> None:
        held.append(trainer.total)
        if index == 8:
            trainer.total = torch.zeros(())

    return step, lambda: [trainer.total, *held], between


@running
def an_average_that_is_returned() -> Made:
    train, trainer = trained(), SimpleNamespace(average=torch.zeros(()))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        trainer.average = 0.9 * trainer.average + 0.1 * train(batch)
        return trainer.average  # type: ignore[no-any-return]

    return step, lambda: [trainer.average], nothing


@running
def a_variable_entries_and_members() -> Made:
    train, total = trained(), torch.zeros(())
    metrics, listed = {"loss": torch.zeros(()), "count": torch.zeros((), dtype=torch.int64)}, [torch.zeros(())]

    def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal total
        loss = train(batch)
        total = total * 0.9 + loss
        metrics["loss"] = metrics["loss"] + loss
        metrics["count"] = metrics["count"] + len(batch["x"])
        listed[0] = torch.maximum(listed[0], loss)
        return {"mean": metrics["loss"] / metrics["count"]}

    return step, lambda: [total, *metrics.values(), *listed], nothing


@running
def the_batch_before_and_values_that_change_places() -> Made:
    train = trained()
    state = SimpleNamespace(before=torch.zeros(6, 8), one=torch.ones(()), other=torch.ones(()))

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        moved = (batch["x"] - state.before).abs().mean()
        state.before = batch["x"]
        state.one, state.other = state.other, state.one + moved
        return moved, train(batch)

    return step, lambda: [state.before, state.one, state.other], nothing


@running
def entries_under_keys_that_are_tensors() -> Made:
    """Some are read, and some are only bound, as the weights from before that a second forward needs."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    before: dict[nn.Parameter, torch.Tensor] = {one: torch.zeros_like(one) for one in model.parameters()}

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            before[parameter] = parameter.data.clone()
            parameter.data.add_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for parameter in model.parameters():
            parameter.data.copy_(before[parameter])
            average[parameter] = average[parameter] * 0.9 + parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: [*model.parameters(), *average.values(), *before.values()], nothing


@running
def variables_of_one_name_in_several_functions() -> Made:
    train = trained()

    def running_average(weight: float) -> Callable[[torch.Tensor], torch.Tensor]:
        average = torch.zeros(())

        def update(value: torch.Tensor) -> torch.Tensor:
            nonlocal average
            average = torch.lerp(average, value, weight)
            return average

        return update

    averages = [running_average(weight) for weight in (0.1, 0.5, 0.9)]

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        loss = train(batch)
        return tuple([update(loss) for update in averages])

    return step, lambda: [], nothing


class Metric(nn.Module):
    """As metrics of libraries: states that `update` binds again."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value.sum()
        self.count = self.count + value.numel()


@running
def a_metric_with_states() -> Made:
    """It is read in some calls, and reset."""
    train, metric = trained(), Metric()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        metric.update(loss)
        return loss

    def between(index: int) -> None:
        if index == 7:
            metric.total, metric.count = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    return step, lambda: [metric.total, metric.count], between


@running
def a_window_of_losses_and_the_best() -> Made:
    train, state = trained(), SimpleNamespace(best=torch.tensor(float("inf")), window=torch.zeros(8))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        state.best = torch.minimum(state.best, loss)
        state.window = torch.cat([state.window[1:], loss[None]])
        return loss

    return step, lambda: [state.best, state.window], nothing


@running
def values_from_before_that_are_only_returned() -> Made:
    """No operator reads them. One is returned as it is, one as a view, and one stands in a list."""
    train = trained()
    state = SimpleNamespace(loss=torch.zeros(()), rows=torch.zeros(6, 8), last=[torch.zeros(())])

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        loss, rows, last = state.loss, state.rows, state.last[0]
        state.loss, state.rows, state.last[0] = train(batch), batch["x"] * 2, batch["x"].mean()
        return loss, rows[1:], last

    def between(index: int) -> None:
        if index == 9:
            state.rows = torch.ones(6, 8)

    return step, lambda: [state.loss, state.rows, *state.last], between


@running
def a_sum_that_is_written_and_bound_again() -> Made:
    """The tensor from before is written too, and the program sees that."""
    train, state = trained(), SimpleNamespace(total=torch.zeros(()))
    held: list[torch.Tensor] = []

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        state.total.add_(loss)
        state.total = state.total * 2
        return loss

    def between(index: int) -> None:
        held.append(state.total)

    return step, lambda: [state.total, *held], between


@running
def two_that_begin_as_one_tensor() -> Made:
    """And are told apart from the first call on."""
    train, zero = trained(), torch.zeros(())
    state = SimpleNamespace(one=zero, other=zero)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        state.one, state.other = state.one + loss, state.other * 0.5 + loss
        return loss

    return step, lambda: [state.one, state.other], nothing


class Momentum(torch.optim.Optimizer):
    """Its state is a new tensor in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["average"] = state.get("average", torch.zeros_like(parameter)) * 0.9 + parameter.grad
            parameter.sub_(state["average"], alpha=0.1)


@running
def the_state_of_an_optimizer() -> Made:
    model = network("cpu")
    train = training_step(model, Momentum(model.parameters()))
    return lambda batch: train(batch).detach(), lambda: list(model.parameters()), nothing


def test_a_value_from_before_that_becomes_a_gradient_is_refused() -> None:
    model = network("cpu")
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model[0].weight
    state = SimpleNamespace(before=torch.zeros_like(weight))

    def function(batch: dict[str, torch.Tensor]) -> None:
        loss = train(batch).detach()
        weight.grad, state.before = state.before, loss.expand(weight.shape).clone()

    step = GraphedStep(function, device=CpuDevice())
    for batch in batches("cpu", CALLS):
        before = state.before
        step(*batch)
        assert weight.grad is before
    (refusal,) = step.report().refusals
    assert "state.before is bound to another tensor" in refusal.reason


def outcome(made: Made, step: Step) -> list[torch.Tensor]:
    _, kept, between = made
    found: list[Any] = []
    seen: list[torch.Tensor] = []
    for index, batch in enumerate(batches("cpu", CALLS)):
        found.append(step(*batch))
        between(index)
        seen += [tensor.clone() for tensor in kept()]
    for one in found:
        seen += one.values() if isinstance(one, dict) else one if isinstance(one, tuple) else [one]
    return seen


@pytest.mark.parametrize("name", sorted(RUNNING))
@pytest.mark.parametrize("copies_are_nodes", [True, False])
def test_what_is_read_and_bound_again_is_what_eager_makes_it(name: str, copies_are_nodes: bool) -> None:
    eager, made = RUNNING[name](), RUNNING[name]()
    expected = outcome(eager, eager[0])
    step = GraphedStep(made[0], device=CpuDevice(copies_are_nodes=copies_are_nodes))
    found = outcome(made, step)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index}"
    report = step.report()
    assert (report.refusals, report.replays, len(report.recordings)) == ((), CALLS - 3, 1)


def counting() -> tuple[Any, GraphedStep]:
    state = SimpleNamespace(total=torch.zeros(2))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        state.total = state.total + batch["x"].sum()
        return batch["x"] * 2

    return state, GraphedStep(step, device=CpuDevice())


@pytest.mark.parametrize(
    "other",
    [0.0, torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, requires_grad=True)],
    ids=["a number", "another shape", "another dtype", "requires gradients"],
)
def test_something_else_in_its_place_is_not_given_to_the_graph(other: Any) -> None:
    state, step = counting()
    calls = batches("cpu", 8)
    for batch in calls[:5]:
        step(*batch)
    replays = step.report().replays
    assert replays == 2
    state.total = other
    step(*calls[5])
    assert step.report().replays == replays
    assert torch.equal(state.total, other + calls[5][0]["x"].sum())
    state.total = torch.zeros(2)
    step(*calls[6])
    assert step.report().replays == replays + 1
    assert torch.equal(state.total, calls[6][0]["x"].sum().expand(2))


def test_a_value_that_is_also_an_argument_is_read_as_both() -> None:
    state = SimpleNamespace(total=torch.zeros(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        state.total = state.total + x
        return x * 2

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(8):
        x = torch.full((2,), float(index))
        graphed(x)
    assert graphed.report().replays == 5
    before = state.total.clone()
    assert torch.equal(graphed(state.total), before * 2)
    assert torch.equal(state.total, before * 2)


def test_two_that_are_put_back_to_one_tensor_are_no_reason_to_refuse() -> None:
    state = SimpleNamespace(one=torch.zeros(()), other=torch.zeros(()))

    def step(x: torch.Tensor) -> torch.Tensor:
        state.one, state.other = state.one + x.sum(), state.other * 0.5 + x.sum()
        return x * 2

    graphed = GraphedStep(step, device=CpuDevice())
    one, other = torch.zeros(()), torch.zeros(())
    for index in range(30):
        if index % 5 == 4:
            state.one = state.other = one = other = torch.zeros(())
        x = torch.full((2,), float(index))
        graphed(x)
        one, other = one + x.sum(), other * 0.5 + x.sum()
        assert torch.equal(state.one, one) and torch.equal(state.other, other)
    report = graphed.report()
    assert report.refusals == () and report.replays >= 30 - 3 - 4


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("capture failed")])
@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_a_capture_that_fails_leaves_what_stood_there(error: Exception) -> None:
    state, device = SimpleNamespace(total=torch.zeros(())), CpuDevice()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        state.total = state.total + batch["x"].sum()
        return batch["x"] * 2

    graphed, expected = GraphedStep(step, device=device), torch.zeros(())
    for index, batch in enumerate(batches("cpu", 7)):
        if index == 3:
            device.fail_with = error
        graphed(*batch)
        expected = expected + batch[0]["x"].sum()
        assert torch.equal(state.total, expected)
    assert graphed.report().replays == 0


def test_one_that_is_bound_in_some_calls_only_has_a_graph_for_each_way() -> None:
    model, state = network("cpu"), SimpleNamespace(total=torch.zeros(()), every=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            loss = loss_of(model, batch)
        if state.every:
            state.total = state.total + loss
        return loss

    graphed, expected = GraphedStep(step, device=CpuDevice()), torch.zeros(())
    for index, batch in enumerate(batches("cpu", 24)):
        state.every = index < 6 or index % 2 == 0
        loss = graphed(*batch)
        expected = expected + loss if state.every else expected
        assert torch.equal(state.total, expected)
    assert (graphed.report().refusals, len(graphed.report().recordings)) == ((), 2)
    assert graphed.report().replays > 12


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "requires gradients": lambda: torch.zeros(2, requires_grad=True),
    "was computed of what does": lambda: torch.zeros(2, requires_grad=True) * 2,
    "a parameter": lambda: nn.Parameter(torch.zeros(2)),
    "a class of its own": lambda: torch.zeros(2).as_subclass(Subclass),
    "negated when it is read": lambda: torch._neg_view(torch.arange(2.0)),
    "made in inference mode": lambda: made_in_inference_mode(),
}


class Subclass(torch.Tensor):
    """With a name of its own."""


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("at", [3, 5], ids=["before the recording", "behind it"])
@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_a_tensor_of_another_kind_is_what_eager_makes_of_it(other: str, at: int) -> None:
    found = []
    for graphed in (False, True):
        state, step = counting()
        for index, batch in enumerate(batches("cpu", 10)):
            if index == at:
                state.total = OTHERS[other]()
            (step if graphed else step._step)(*batch)
            total = state.total
            found.append((type(total), total.requires_grad, total.is_inference(), total.detach().clone()))
            if index == at:
                state.total = torch.zeros(2)
    for one, eager in zip(found[10:], found[:10], strict=True):
        assert one[:3] == eager[:3] and torch.equal(one[3], eager[3])
    assert step.report().replays >= 4


@pytest.mark.parametrize("is_read", [True, False])
def test_a_tensor_that_stands_elsewhere_too_is_told_from_others(is_read: bool) -> None:
    """Python asks whether it is that one."""

    def made() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
        state = SimpleNamespace(total=torch.zeros(2), start=torch.zeros(2))

        def step(x: torch.Tensor) -> torch.Tensor:
            if state.total is state.start:
                state.total = x * 100
            else:
                state.total = state.total + x if is_read else x * 3
            return x * 2

        return state, step

    (expected, eager), (state, step) = made(), made()
    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(16):
        if index in (6, 10):
            state.total, expected.total = state.start, expected.start
        eager(torch.full((2,), float(index)))
        graphed(torch.full((2,), float(index)))
        assert torch.equal(state.total, expected.total), index
    assert graphed.report().replays > 5


@pytest.mark.parametrize("is_read", [True, False])
def test_what_stood_there_before_the_recording_is_not_kept_alive(is_read: bool) -> None:
    state = SimpleNamespace(total=torch.zeros(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        state.total = state.total + x if is_read else x * 3
        return x * 2

    graphed, held = GraphedStep(step, device=CpuDevice()), []
    for index in range(9):
        graphed(torch.full((2,), float(index)))
        held.append(weakref.ref(state.total))
    assert graphed.report().replays >= 5
    gc.collect()
    assert [one() is not None for one in held] == [False] * 8 + [True]


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_a_gradient_that_is_kept_as_it_is_and_read_is_refused_with_a_reason() -> None:
    """It stands in `.grad`, too, where the program may write it. Such calls were observed for ever."""
    found = []
    for graphed in (False, True):
        model = network("cpu")
        train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = SimpleNamespace(before=[torch.zeros_like(one) for one in model.parameters()])

        def step(batch: dict[str, torch.Tensor], train: Any = train, state: Any = state, model: Any = model) -> Any:
            loss, before = train(batch).detach(), state.before
            alike = sum((old * one.grad).sum() for old, one in zip(before, model.parameters(), strict=True))
            for index, parameter in enumerate(model.parameters()):
                before[index] = parameter.grad
            return loss, alike

        made: Any = GraphedStep(step, device=CpuDevice()) if graphed else step
        for batch in batches("cpu", 16):
            found += made(*batch)
    assert all(map(torch.equal, found[:32], found[32:]))
    report = made.report()
    assert report.replays == 0 and "`.grad` of a parameter" in report.refusals[0].reason


def test_a_step_whose_values_begin_anew_in_another_dict_is_recorded_each_time() -> None:
    """Once per epoch, for many epochs: each recording was worth it."""
    state = SimpleNamespace(metrics={"total": torch.zeros(())})

    def step(x: torch.Tensor) -> torch.Tensor:
        state.metrics["total"] = state.metrics["total"] + x.sum()
        return x * 2

    graphed, expected = GraphedStep(step, device=CpuDevice(), limit=1), torch.zeros(())
    for index in range(10 * 12):
        if index % 12 == 0:
            state.metrics, expected = {"total": torch.zeros(())}, torch.zeros(())
        graphed(torch.full((2,), float(index)))
        expected = expected + 2.0 * index
        assert torch.equal(state.metrics["total"], expected)
    report = graphed.report()
    assert report.refusals == () and report.dropped_recordings == 9 and report.replays >= 10 * 9
