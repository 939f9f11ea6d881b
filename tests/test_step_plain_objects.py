"""Batches that are objects of a class of the program's own, another in each call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from graphs_on_cpu import CpuDevice

from optimizations.capture import plain_objects
from optimizations.capture.signature import PLAIN, copies, names, signature
from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 18
T = TypeVar("T")


@pytest.fixture(autouse=True)
def no_classes_of_another_test() -> None:
    plain_objects._CLASSES.clear()


class Batch:
    """Sentences and masks, as tutorials of transformers have them."""

    scale = 1.0

    def __init__(self, source: torch.Tensor, padding: float = -9.0) -> None:
        self.source = source
        self.mask = (source != padding).float()
        self.name = "train"

    def masked(self) -> torch.Tensor:
        return self.source * self.mask * self.scale


class Pair(Generic[T]):
    def __init__(self, x: torch.Tensor) -> None:
        self.parts = [x, {"twice": x * 2}]
        self.inner = Batch(x)


class Model:
    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def train(self, value: torch.Tensor) -> torch.Tensor:
        loss = (value * self.weight).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


BATCHES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "an object": (Batch, lambda batch: batch.masked()),
    "a namespace": (lambda x: types.SimpleNamespace(x=x, n=2), lambda batch: batch.x * batch.n),
    "objects in an object": (Pair, lambda batch: batch.parts[1]["twice"] + batch.inner.masked()),
    "in a dict": (lambda x: {"data": [Batch(x)]}, lambda batch: batch["data"][0].masked()),
}


def losses(step: Callable[[Any], Any], make: Callable[[torch.Tensor], Any], calls: int = CALLS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [step(make(torch.randn(3, generator=generator))) for _ in range(calls)]


def graphed(step: Callable[[Any], Any]) -> Any:
    return GraphedStep(step, device=CpuDevice())


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_batches_of_a_class_share_one_graph(name: str) -> None:
    make, read = BATCHES[name]
    one, other = Model(), Model()
    expected = losses(lambda batch: one.train(read(batch)), make)
    step = graphed(lambda batch: other.train(read(batch)))
    found = losses(step, make)
    assert all(map(torch.equal, found, expected)) and torch.equal(one.weight, other.weight)
    report = step.report()
    assert report.refusals == () and len(report.recordings) == 1
    # Of one that takes no weak references it is not known that it was freed.
    assert report.replays >= CALLS - 4 - (9 if name == "a namespace" else 3)


def test_what_its_class_holds_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(step: Callable[[Any], Any]) -> list[torch.Tensor]:
        monkeypatch.setattr(Batch, "scale", 1.0)
        before = losses(step, Batch, 10)
        monkeypatch.setattr(Batch, "scale", 3.0)
        return before + losses(step, Batch, 10)

    step = graphed(lambda batch: batch.masked() + 1)
    assert all(map(torch.equal, run(step), run(lambda batch: batch.masked() + 1)))
    assert step.report().replays >= 6


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_what_the_step_leaves_in_a_batch_is_there() -> None:
    def step(batch: Batch) -> torch.Tensor:
        batch.source = batch.source + 1  # another tensor
        batch.mask.mul_(2)
        batch.seen = batch.masked().sum()  # type: ignore[attr-defined]
        return batch.seen * 2  # type: ignore[attr-defined, no-any-return]

    called: Any = graphed(step)
    for index in range(CALLS):
        one, other = Batch(torch.full((3,), float(index))), Batch(torch.full((3,), float(index)))
        assert torch.equal(called(one), step(other))
        assert vars(one).keys() == vars(other).keys()
        assert all(torch.equal(vars(one)[key], vars(other)[key]) for key in ("source", "mask", "seen"))


def test_numbers_and_attributes_of_a_batch_count() -> None:
    def step(batch: Any) -> torch.Tensor:
        found: torch.Tensor = batch.source * batch.times + (batch.extra if hasattr(batch, "extra") else 0)
        return found

    called = graphed(step)
    for index in range(4 * CALLS):
        batch: Any = Batch(torch.full((3,), float(index)))
        batch.times = 2 + (index % 3 == 2)
        if index % 5 == 4:
            batch.extra = torch.ones(3) * index
        assert torch.equal(called(batch), step(batch))
    assert called.report().replays >= 20


def test_two_objects_by_turns_stand_for_themselves() -> None:
    both = [Batch(torch.ones(3)), Batch(torch.ones(3) * 2)]

    def step(batch: Batch) -> torch.Tensor:
        batch.source.mul_(1.5)
        return batch.source * 2

    called, expected = graphed(step), [torch.ones(3), torch.ones(3) * 2]
    for index in range(4 * CALLS):
        expected[index % 2] *= 1.5
        assert torch.equal(called(both[index % 2]), expected[index % 2] * 2)
    assert not plain_objects.is_container(both[0])
    assert len(called.report().recordings) == 2 and called.report().replays >= 2 * CALLS


def test_some_objects_by_turns_may_be_bound_to_other_tensors() -> None:
    """As agents are, which keep what their network remembers."""

    def agents() -> list[Any]:
        return [types.SimpleNamespace(hidden=torch.zeros(3) + index, x=torch.ones(3)) for index in range(4)]

    def step(agent: Any) -> torch.Tensor:
        agent.hidden = (agent.hidden * 0.5 + agent.x).detach()
        return agent.hidden * 2  # type: ignore[no-any-return]

    called, one, other = graphed(step), agents(), agents()
    for index in range(40):
        assert torch.equal(called(one[index % 4]), step(other[index % 4]))
    assert all(torch.equal(mine.hidden, theirs.hidden) for mine, theirs in zip(one, other, strict=True))
    report = called.report()
    assert report.refusals == () and len(report.recordings) == 4 and report.replays >= 20


def test_batches_that_are_kept_are_batches_once_there_are_many() -> None:
    data = [Batch(torch.full((3,), float(index))) for index in range(20)]
    step = graphed(lambda batch: batch.masked() * 2)
    for batch in data:
        assert torch.equal(step(batch), batch.masked() * 2)
    report = step.report()
    assert report.refusals == () and len(report.recordings) == 1 and report.replays >= 6


def test_what_stays_is_no_batch() -> None:
    """Objects next to a batch that are the same in each call, though they hold no more than it does."""
    settings = types.SimpleNamespace(scale=torch.ones(3))
    step = graphed(lambda batch, settings: batch.masked() * settings.scale)
    found = losses(lambda batch: step(batch, settings), Batch)
    assert all(map(torch.equal, found, losses(lambda batch: batch.masked(), Batch)))
    assert step.report().replays >= 6 and not plain_objects.is_container(settings)


class Asked(Batch):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Noting(Batch):
    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value


class Slotted:
    __slots__ = ("__dict__", "source")

    def __init__(self, source: torch.Tensor) -> None:
        self.source = self.other = source


class Copied(Batch):
    def __copy__(self) -> Any:
        return self


class Closed(Batch):
    def __del__(self) -> None: ...


class Learning(Batch):
    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source)
        self.weight = torch.nn.Parameter(source)


class Holding(Batch):
    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source)
        self.model = torch.nn.Linear(1, 1)


class Back(Batch):
    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source)
        self.itself = self


class Error(Exception):
    def __init__(self, source: torch.Tensor) -> None:
        super().__init__("an error")
        self.source = source


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("kind", [Asked, Noting, Slotted, Copied, Closed, Learning, Holding, Back, Error])
def test_other_objects_stand_for_themselves(kind: Callable[[torch.Tensor], Any]) -> None:
    step = graphed(lambda batch: (batch.source * 2).detach())
    found = losses(step, kind)
    assert all(map(torch.equal, found, losses(lambda batch: (batch.source * 2).detach(), kind)))
    (refusal,) = step.report().refusals
    assert f"is given another {kind.__name__} in each call" in str(refusal)
    assert not step.report().replays and not plain_objects.is_container(kind(torch.ones(3)))


def test_an_object_that_counts_is_taken_apart_and_put_together() -> None:
    x = torch.ones(3)
    assert plain_objects.count_as_containers([Pair(x)], PLAIN)
    tensors: list[torch.Tensor] = []
    key = signature(Pair(x), tensors)
    assert key == signature(Pair(x), []) and len(tensors) == 4
    assert [*names(Pair(x), "b")] == ["b.inner.mask", "b.inner.source", "b.parts[0]", "b.parts[1]['twice']"]
    assert copies(Pair(x))
    changed = Pair(x)
    changed.inner.name = "test"
    assert signature(changed, []) != key
    more: Any = Pair(x)
    more.late = 1
    assert signature(more, []) != key
