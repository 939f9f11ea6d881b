"""Inputs, results and written memory of a step: what is copied, versions, and tensors whose metadata changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice, copied
from step_parts import Graph, assert_as_eager, batches, loss_of, network, training_step
from torch import nn

from optimizations.capture.inputs import CopiedInputs
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.tensor_marks import Writes

__all__ = ["copied"]


def training(give: Callable[[torch.Tensor], Any] = lambda loss: loss) -> Callable[..., Any]:
    model = network("cpu")
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return lambda batch: give(train(batch).detach())


def run(step: Callable[..., Any], calls: list[Any]) -> list[torch.Tensor]:
    """Everything the calls returned, kept until the end."""
    kept = [step(*call) for call in calls]
    return [tensor for found in kept for tensor in (found if isinstance(found, (tuple, list)) else [found])]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": lambda loss: loss,
    "several, one twice": lambda loss: (loss, loss * 2, loss),
    "a view": lambda loss: torch.stack([loss, loss + 1])[1],
    "not contiguous": lambda loss: (loss * torch.ones(4, 3)).T,
    "empty": lambda loss: (loss, loss.new_zeros(0, 3)),
    "large": lambda loss: loss * torch.ones(100_000),
    "many": lambda loss: [loss * index for index in range(18)],
    "a part of each row": lambda loss: (loss * torch.arange(36.0).reshape(6, 6))[:, 2:4],
    "channels last": lambda loss: (loss * torch.ones(2, 3, 4, 4)).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", sorted(RESULTS))
def test_results_stay_valid_and_have_eagers_layout(kind: str) -> None:
    """They are ordinary tensors, which may be detached and written."""
    calls = batches("cpu")
    expected = run(training(RESULTS[kind]), calls)
    step = GraphedStep(training(RESULTS[kind]), device=CpuDevice())
    found = run(step, calls)
    assert_same(found, expected)
    assert step.report().replays == len(calls) - 3
    assert step.report().refusals == ()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.stride() == theirs.stride() and mine.storage_offset() in (0, theirs.storage_offset())
    result = found[-1]
    assert not result._is_view()
    result.detach_().mul_(torch.ones((), requires_grad=True))
    assert result.requires_grad


ROWS = torch.tensor([[0, 2]])
REFUSED_RESULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "expanded": (lambda x: x.sum(0, keepdim=True).expand(3, 3), "is no plain one"),
    "sparse": (lambda x: torch.sparse_coo_tensor(ROWS, x[:2].abs(), (3, 3)), "is no plain one"),
    "lazily conjugated": (lambda x: (x * 1j).conj(), "is no plain one"),
    "a view of the argument": (lambda x: x[1:], "returns argument 0 or a view of it"),
    "an argument": (lambda x: x, "returns argument 0 or a view of it"),
    "a tensor from before": (lambda x: ROWS, "returns ROWS or a view of it"),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph", "ignore:Sparse")
@pytest.mark.parametrize("kind", sorted(REFUSED_RESULTS))
def test_result_that_cannot_be_copied_is_refused(kind: str) -> None:
    give, words = REFUSED_RESULTS[kind]
    step = GraphedStep(lambda x: (x.abs(), give(x)), device=CpuDevice())
    for index in range(7):
        x = torch.arange(9.0).reshape(3, 3) + index
        (size, found), expected = step(x), give(x)
        assert torch.equal(size, x.abs()) and torch.equal(found.to_dense(), expected.to_dense())
    report = step.report()
    assert words in report.refusals[0].reason and report.replays == 0


OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:4].expand(3, 4),
    "windows": lambda x: x.as_strided((3, 3), (2, 1)),
    "a column, expanded": lambda x: x.reshape(6, 6)[:, 2:3].expand(-1, 3),
    "a column of a large matrix, expanded": lambda x: (x[:, None] * torch.ones(36, 1000))[:, :1].expand(-1, 5),
}


@pytest.mark.parametrize("kind", sorted(OVERLAPPING))
def test_overlapping_inputs_are_passed(kind: str) -> None:
    graphed = GraphedStep(lambda x: x * 2, device=CpuDevice())
    for _ in range(8):
        x = OVERLAPPING[kind](torch.rand(36))
        assert torch.equal(graphed(x), x * 2)
    assert graphed.report().replays >= 4, graphed.report().refusals


def test_out_of_memory_for_results_ends_the_call_unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that catches this calls again, and must not have its weights changed twice."""
    weight = torch.zeros(200, 200)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x)
        return weight * 2

    full = False

    def unless_full(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocating(*arguments: Any, **keywords: Any) -> torch.Tensor:
            if full:
                raise torch.OutOfMemoryError("no memory")
            return allocate(*arguments, **keywords)

        return allocating

    for owner, name in ((torch, "empty_strided"), (torch.Tensor, "clone")):
        monkeypatch.setattr(owner, name, unless_full(getattr(owner, name)))
    graphed, x = GraphedStep(step, device=CpuDevice()), torch.ones(200, 200)
    for count in range(1, 7):
        assert torch.equal(graphed(x), 2 * count * x)
    full = True
    with pytest.raises(torch.OutOfMemoryError):
        graphed(x)
    full = False
    assert torch.equal(graphed(x), 14 * x)
    assert graphed.report().replays == 4


# What a step writes: arguments, buffers, versions, and tensors whose metadata changed.


CALLS = 14
Made = tuple[Callable[[torch.Tensor], Any], torch.Tensor]
"""A step, and what some calls are given in place of a batch."""


def a_buffer_by_its_data() -> Made:
    kept = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.data.add_(1)
        return x * 2

    return step, kept


def statistics_of_a_module() -> Made:
    norm, batch = nn.BatchNorm1d(4), torch.arange(12.0).reshape(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        norm(batch)
        return x * 2

    assert norm.running_mean is not None
    return step, norm.running_mean


def a_weight_that_an_optimizer_writes_with_others() -> Made:
    torch.manual_seed(3)
    model, batch = nn.Linear(3, 1), torch.arange(12.0).reshape(4, 3)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.01, foreach=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (model(batch).square().mean() + weight.square().sum()).backward()
        optimizer.step()
        return x * 2

    return step, weight.detach()


def outcome(made: Made, step: Callable[..., Any]) -> list[torch.Tensor]:
    _, kept = made
    found = []
    for index in range(CALLS):
        x = (kept if index < 11 else kept[:]) if index in (7, 9, 11) else torch.arange(4.0) + index
        found += [step(x).clone(), x.clone()]
    return [*found, kept]


@pytest.mark.parametrize(
    "make", [a_buffer_by_its_data, statistics_of_a_module, a_weight_that_an_optimizer_writes_with_others]
)
def test_written_tensor_as_argument_equals_eager(make: Callable[[], Made]) -> None:
    eager, made = make(), make()
    expected = outcome(eager, eager[0])
    step = GraphedStep(made[0], device=CpuDevice())
    assert all(map(torch.equal, outcome(made, step), expected))
    assert (step.report().refusals, step.report().replays) == ((), CALLS - 6)


def test_lazily_negative_argument_is_not_plain() -> None:
    step = GraphedStep(lambda x: x * 2, device=CpuDevice())
    for index in range(10):
        x = torch.arange(4.0) + index
        x = torch._neg_view(x) if index in (6, 8) else x
        assert torch.equal(step(x), x * 2), index


# A launch increments the versions of what its graph writes, as eager does, for autograd's checks.


def steps(read: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        read.add_(x)
        return (read + x).sum()

    return step


@pytest.mark.parametrize("other", ["none", "the same memory", "other memory"])
def test_fast_replay_counts_versions_of_written_tensors(other: str) -> None:
    """This includes a tensor exchanged by `swap_tensors`: each has its own counter."""
    weights, expected = torch.zeros(3), torch.zeros(3)
    graphed, eager = GraphedStep(steps(weights), device=CpuDevice()), steps(expected)
    for index in range(12):
        if index == 7 and other != "none":
            made = weights.data if other == "the same memory" else weights.clone()
            torch.utils.swap_tensors(weights, made)
        version = weights._version
        given = torch.ones(3) * index
        assert torch.equal(graphed(given), eager(given)) and torch.equal(weights, expected)
        assert weights._version > version, index
    report = graphed.report()
    assert report.replays >= 8 and report.dropped_recordings == (other == "other memory")


# Calls in inference mode, whose tensors have no version counters.


@pytest.mark.parametrize("made_in_it", [True, False])
def test_written_argument_is_refused_and_written(made_in_it: bool) -> None:
    def adds(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x.sum(0))
        return cache.square().sum()

    def run(step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        with torch.inference_mode(made_in_it):
            cache = torch.zeros(8)
        with torch.inference_mode():
            sums = [step(cache, batch["x"]) for (batch,) in batches("cpu", 6)]
        return [*sums, cache]

    graphed = GraphedStep(adds, device=CpuDevice())
    with pytest.warns(UserWarning, match="into argument 0, of which a graph has a copy"):
        found = run(graphed)
    assert all(map(torch.equal, found, run(adds))) and graphed.report().replays == 0


def test_compiled_code_is_assumed_to_write_mutable_inputs() -> None:
    with torch.inference_mode():
        one, expanded = torch.zeros(3), torch.zeros(1).expand(3)
    plain = torch.zeros(3)
    writes = Writes([one, expanded, plain], compiled=False)
    assert not any(map(writes.include, (one, expanded, plain)))
    compiled = Writes([one, expanded, plain], compiled=True)
    assert [*map(compiled.include, (one, expanded, plain))] == [True, False, False]
    plain.add_(1)
    writes.note(one.view(3, 1))
    assert [*map(writes.include, (one, expanded, plain))] == [True, False, True]


def test_placeholders_are_of_the_kind_of_the_inputs() -> None:
    plain = torch.ones(3)
    with torch.inference_mode():
        made = torch.ones(3)
        kinds = [one.is_inference() for one in CopiedInputs([plain, made]).recording_inputs]
    assert kinds == [False, True]
    assert not CopiedInputs([made]).recording_inputs[0].is_inference()


def test_learning_rate_may_first_change_in_inference_mode() -> None:
    model = network("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(batch: dict[str, torch.Tensor], train: bool) -> torch.Tensor:
        loss = loss_of(model, batch)
        if train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    graphed = GraphedStep(step, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 20)):
        train = not 6 <= index < 9
        with torch.inference_mode(not train):
            graphed(batch, train)
        optimizer.param_groups[0]["lr"] = 0.1 if index < 5 else 0.05 / index
    report = graphed.report()
    assert report.patched_learning_rates == 1 and report.replays >= 10


# Changed metadata of a tensor is noticed although object and address stay the same.


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
CHANGED_BEFORE = (6, 8)


class Training:
    """A step of five layers. `zero` is what becomes of gradients: added to, set to None or zero, or None outside."""

    def __init__(self, zero: str, optimizer: str, inside: Callable[[Training], None] = lambda made: None) -> None:
        torch.manual_seed(3)
        sizes = (8, 16), (16, 16), (16, 16), (16, 16), (16, 4)
        self.model = nn.Sequential(*[nn.Linear(*size) for size in sizes])
        self.model.register_buffer("shift", torch.randn(16, 16) * 0.2)
        self.zero, self.inside = zero, inside
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.zero in ("to None", "to zero"):
            self.clear(to_none=self.zero == "to None")
        x = self.model[1](self.model[0](batch["x"])) @ self.model.shift
        loss = loss_of(self.model[2:], {"x": x, "y": batch["y"]})  # type: ignore[index]
        loss.backward()
        self.inside(self)
        self.optimizer.step()
        return loss.detach()

    def clear(self, *, to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=to_none)

    @property
    def weight(self) -> Any:
        """One in the middle."""
        return self.model[2].weight

    def state(self) -> list[Any]:
        found: list[Any] = []
        for one in self.model.parameters():
            found.append(one.detach().clone())
            if (gradient := one.grad) is not None:
                found += [(type(gradient), gradient.stride(), gradient.requires_grad), gradient.detach().clone()]
        kept = self.optimizer.state.values()
        return [*found, *(one.clone() for held in kept for one in held.values() if isinstance(one, torch.Tensor))]


Change = Callable[[Training], Any]


def changed(
    zero: str, change: Change = lambda made: None, optimizer: str = "sgd", inside: Change = lambda made: None
) -> Any:
    """Return the report of a training that is eager's up to the first call that raises."""

    def program(graph: Graph) -> Iterator[Any]:
        made = Training(zero, optimizer, inside)
        step = graph(made.step)
        for index, batch in enumerate(batches("cpu", CALLS)):
            if index in CHANGED_BEFORE:
                with torch.no_grad():
                    change(made)
            if zero == "outside":
                made.clear()
            try:
                loss = step(*batch)
            except RuntimeError as error:
                yield str(error)
                return
            yield from (loss, *made.state())

    return assert_as_eager(program)


READ: dict[str, Change] = {
    "t_": lambda made: made.weight.grad.t_(),
    "requires_grad_": lambda made: made.weight.grad.requires_grad_(),
}
"""For a gradient that the graph reads. Of one that it made, references are counted: only `.grad` may hold it."""
GRADIENTS: dict[str, Change] = {
    **READ,
    "elsewhere, transposed": lambda made: setattr(made.weight.grad, "data", torch.full((16, 16), 0.1).t()),
    "other memory": lambda made: made.weight.grad.untyped_storage().resize_(1 << 16),
}


@pytest.mark.filterwarnings("ignore:.*runs some of its calls without a CUDA graph")  # zero_grad sets requires_grad
@pytest.mark.parametrize(
    ("zero", "change"),
    [
        *itertools.product(["added to", "to zero"], sorted(GRADIENTS)),
        *itertools.product(["to None", "outside"], sorted(GRADIENTS.keys() - READ)),
    ],
)
def test_gradient_with_changed_metadata_equals_eager(zero: str, change: str) -> None:
    """This includes a gradient that an earlier call made and that is None before the next."""
    assert changed(zero, GRADIENTS[change]).replays >= 2


def halved(made: Training) -> None:
    for one in made.model.parameters():
        one.grad.data = one.grad.data * 0.5  # type: ignore[union-attr]


INSIDE: dict[str, Change] = {
    "data": halved,
    "t_": lambda made: made.weight.grad.t_(),
    "requires_grad_": lambda made: made.weight.grad.requires_grad_(not made.weight.grad.requires_grad),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("inside", sorted(INSIDE))
@pytest.mark.parametrize("zero", ["added to", "to None", "outside"])
def test_step_that_changes_gradient_metadata_is_refused(zero: str, inside: str) -> None:
    """The graph would continue with the memory and metadata from before the change."""
    report = changed(zero, inside=INSIDE[inside])
    if zero == "added to":
        assert report.replays == 0 and ".grad itself" in str(report.refusals[0])
    else:
        assert report.replays == CALLS - 3


OTHERS: dict[str, Change] = {
    "a buffer is transposed": lambda made: made.model.shift.t_(),
    "a parameter is transposed": lambda made: setattr(made.weight, "data", made.weight.data.t()),
}


@pytest.mark.parametrize("other", sorted(OTHERS))
def test_other_changed_metadata_equals_eager(other: str) -> None:
    changed("added to", OTHERS[other])
