"""Objects of libraries that count calls, next to what a step uses of them: what no call reads makes no call another."""

from __future__ import annotations

import copy
import gc
import inspect
import operator
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import CALLS, batches, loss_of, network

from optimizations.capture.step import library_counters
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.host_state import Container, HostState
from optimizations.capture.step.library_counters import LibraryCounters, in_both, leave_out, was_read

FIRST = 3  # calls before the one that is captured, and launched: one warms up, two are observed
OBSERVED = 2  # before another recording


@dataclass
class State:
    """Compared by its fields."""

    __module__ = "hypothesis"

    steps: int = 0


class Trainer:
    """As the trainer or accelerator of a library."""

    __module__ = "hypothesis"

    def __init__(self) -> None:
        self.steps, self.epoch, self.weight = 0, 0.0, 1.0
        self.state = State()
        self.ranks = {"layer": 0}

    @property
    def progress(self) -> float:
        return 1.0 + self.steps

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.weight).backward()

    def counts(self) -> None:
        self.steps += 1
        self.epoch += 0.25
        self.state.steps += 1
        self.ranks = {"layer": self.steps}


class Advanced(Trainer):
    """One of its subclasses."""

    __module__ = "hypothesis"


class Asking(Trainer):
    """A class that answers for itself."""

    __module__ = "hypothesis"

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Shared(Trainer):
    """Objects that have all attributes in common."""

    __module__ = "hypothesis"
    _shared: dict[str, Any] = {}  # noqa: RUF012 (shared on purpose)

    def __init__(self) -> None:
        self.__dict__ = self._shared
        super().__init__()


class Flagged(Trainer):
    """An object in which a step leaves a word for its caller."""

    __module__ = "hypothesis"

    def __init__(self) -> None:
        super().__init__()
        self.logs = False


class Bypassing(Trainer):
    """A class whose code asks `object` for attributes."""

    __module__ = "hypothesis"

    @property
    def behind(self) -> int:
        return int(super().__getattribute__("steps"))


class Doubles:
    """Answers for the classes that have it among their bases."""

    __module__ = "hypothesis"

    def __getattribute__(self, name: str) -> Any:
        return 2.0 if name == "weight" else object.__getattribute__(self, name)


class Mixed(Trainer, Doubles):
    """Its other base is watched."""

    __module__ = "hypothesis"


class Holder:
    """Both kinds of object, of which one counts."""

    __module__ = "hypothesis"

    def __init__(self) -> None:
        self.trainer, self.mixed = Trainer(), Mixed()

    def counts(self) -> None:
        self.trainer.counts()


Work = Callable[[Any, torch.Tensor], torch.Tensor]


def trained(
    make: Callable[[], Any],
    work: Work,
    *,
    graphed: bool,
    between: Callable[[int, Any], None] = lambda index, trainer: trainer.counts(),
    compiled: bool = False,
) -> tuple[list[torch.Tensor], Any]:
    """The losses and parameters of a loop in which `trainer` is an argument, and the step."""
    model, trainer = network("cpu"), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call: Any = torch.compile(model, backend="eager") if compiled else model

    def train(trainer: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = work(trainer, loss_of(call, batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    step: Any = GraphedStep(train, device=CpuDevice()) if graphed else train
    found = []
    for index, (batch,) in enumerate(batches("cpu", 3 * CALLS)):
        found.append(step(trainer, batch))
        between(index, trainer)
    return [*found, *(one.detach() for one in model.parameters())], step


def weighted(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * trainer.weight


@pytest.mark.parametrize("kind", [Trainer, Advanced])
def test_a_counter_that_no_call_reads_makes_no_call_another(kind: Callable[[], Any]) -> None:
    def between(index: int, trainer: Any) -> None:
        trainer.counts()
        if index == 2 * CALLS:
            trainer.weight = 2.0

    expected, _ = trained(kind, weighted, graphed=False, between=between)
    found, step = trained(kind, weighted, graphed=True, between=between)
    assert all(map(torch.equal, found, expected))
    report = step.report()
    assert (report.refusals, len(report.recordings)) == ((), 2)
    assert report.replays == 3 * CALLS - FIRST - OBSERVED
    assert "__getattribute__" not in vars(kind) and "__getattribute__" not in vars(State)


def test_one_that_begins_to_count_later_takes_one_more_recording() -> None:
    def between(index: int, trainer: Any) -> None:
        trainer.steps += index > CALLS

    expected, _ = trained(Trainer, weighted, graphed=False, between=between)
    found, step = trained(Trainer, weighted, graphed=True, between=between)
    assert all(map(torch.equal, found, expected))
    report = step.report()
    # One call was looked at before it was known that none reads the number: each was another one until then.
    assert (report.refusals, len(report.recordings)) == ((), 2)
    assert report.replays == 3 * CALLS - FIRST - OBSERVED - 1


def compared(trainer: Any) -> float:
    return 2.0 if trainer.state == State(7) else 1.0


by_attribute_getter = operator.attrgetter("steps")
READ: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "an attribute": (Trainer, lambda trainer: 1.0 + trainer.steps),
    "a property": (Trainer, lambda trainer: trainer.progress),
    "a name that is put together": (Trainer, lambda trainer: getattr(trainer, "ste" + "ps")),
    "attrgetter": (Trainer, by_attribute_getter),
    "a dict that is another one in each call": (Trainer, lambda trainer: trainer.ranks["layer"]),
    "vars": (Trainer, lambda trainer: vars(trainer)["steps"]),
    "a copy": (Trainer, lambda trainer: copy.copy(trainer).steps),
    "fields that are compared": (Trainer, compared),
    "a class that answers itself": (Asking, lambda trainer: trainer.steps),
    "attributes in common, by another": (Shared, lambda trainer: 1.0 + trainer.steps),
    "attributes in common, by their dict": (Shared, lambda trainer: Shared._shared["steps"]),
    "in some calls": (Trainer, lambda trainer: trainer.steps if trainer.epoch % 1 == 0 else 1.0),
}


@pytest.mark.parametrize("name", READ)
def test_a_counter_that_is_read_is_compared(name: str) -> None:
    make, reads = READ[name]

    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * (1.0 + reads(trainer))

    expected, _ = trained(make, work, graphed=False)
    found, _ = trained(make, work, graphed=True)
    assert all(map(torch.equal, found, expected))


RARELY_READ: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "asked of object": (Trainer, lambda trainer: object.__getattribute__(trainer, "steps")),
    "looked up without code": (Trainer, lambda trainer: inspect.getattr_static(trainer, "steps")),
    "a state without the object's word": (Trainer, lambda trainer: type(trainer).__getstate__(trainer)["steps"]),
    "asked of object by the class": (Bypassing, lambda trainer: trainer.behind),
}


@pytest.mark.parametrize("name", RARELY_READ)
def test_a_counter_that_object_is_asked_for_is_compared(name: str) -> None:
    make, reads = RARELY_READ[name]

    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * (2.0 if reads(trainer) == 2 * CALLS else 1.0)

    def between(index: int, trainer: Any) -> None:
        trainer.steps += 1

    expected, _ = trained(make, work, graphed=False, between=between)
    found, _ = trained(make, work, graphed=True, between=between)
    assert all(map(torch.equal, found, expected))


def test_what_a_call_binds_is_bound_in_each() -> None:
    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        trainer.logs = False
        return weighted(trainer, loss)

    left: dict[bool, list[bool]] = {False: [], True: []}
    for graphed, logs in left.items():

        def between(index: int, trainer: Any, logs: list[bool] = logs) -> None:
            logs.append(trainer.logs)
            trainer.logs = index % 5 == 0

        trained(Flagged, work, graphed=graphed, between=between)
    assert left[True] == left[False] == [False] * 3 * CALLS


def test_an_attribute_that_goes_while_another_comes_is_noticed() -> None:
    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * getattr(trainer, "extra", 1.0)

    def between(index: int, trainer: Any) -> None:
        if index < CALLS:
            trainer.steps += 1
        elif index == CALLS:
            del trainer.steps
            trainer.extra = 2.0

    expected, _ = trained(Trainer, work, graphed=False, between=between)
    found, step = trained(Trainer, work, graphed=True, between=between)
    assert all(map(torch.equal, found, expected)) and step.report().replays > CALLS


def test_other_bases_answer_for_objects_of_subclasses() -> None:
    def work(holder: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * holder.trainer.weight * holder.mixed.weight

    expected, _ = trained(Holder, work, graphed=False)
    found, step = trained(Holder, work, graphed=True)
    assert all(map(torch.equal, found, expected)) and step.report().replays == 3 * CALLS - FIRST


def test_code_that_a_library_compiles_meanwhile_sees_the_classes_as_they_are(fresh_compiler: None) -> None:
    compiled = torch.compile(lambda trainer, loss: loss * trainer.weight, backend="eager", fullgraph=True)
    behind = types.SimpleNamespace(calls=bytearray(1))  # what it holds is not seen

    class Compiling(Trainer):
        __module__ = "hypothesis"

        def scaled(self, loss: torch.Tensor) -> torch.Tensor:
            behind.calls[0] += 1
            return loss * self.weight if behind.calls[0] < FIRST else compiled(self, loss)

    def between(index: int, trainer: Any) -> None:
        trainer.steps += 1

    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return trainer.scaled(loss)

    expected, _ = trained(Trainer, weighted, graphed=False, between=between)
    found, _ = trained(Compiling, work, graphed=True, between=between)
    assert all(map(torch.equal, found, expected))


def test_a_dict_of_attributes_that_stands_elsewhere_is_compared() -> None:
    losses = []
    for graphed in (False, True):
        trainer = Trainer()
        attributes = vars(trainer)
        found, _ = trained(
            lambda trainer=trainer: trainer,
            lambda trainer, loss, attributes=attributes: weighted(trainer, loss) * (1 + attributes["steps"]),
            graphed=graphed,
        )
        losses.append(found)
    assert all(map(torch.equal, *losses))


def test_a_counter_that_a_call_changes_is_refused_as_ever() -> None:
    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        trainer.counts()
        return weighted(trainer, loss)

    expected, _ = trained(Trainer, work, graphed=False, between=lambda index, trainer: None)
    found, step = trained(Trainer, work, graphed=True, between=lambda index, trainer: None)
    assert all(map(torch.equal, found, expected))
    assert ".steps changes from 2 to 3" in step.report().refusals[0].reason


def test_all_is_compared_next_to_compiled_code(fresh_compiler: None) -> None:
    def between(index: int, trainer: Any) -> None:
        trainer.steps += 1

    expected, _ = trained(Trainer, weighted, graphed=False, between=between)
    found, step = trained(Trainer, weighted, graphed=True, between=between, compiled=True)
    assert all(map(torch.equal, found, expected))
    assert step.report().replays == 1  # of the call that was captured


def test_what_only_the_captured_call_reads_is_compared() -> None:
    calls = bytearray(1)  # what it holds is not seen

    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return weighted(trainer, loss) if calls[0] < FIRST + 1 else loss * trainer.progress

    _, step = trained(Trainer, work, graphed=True)
    assert calls[0] == 3 * CALLS + 1 and step.report().replays == 0


class Fails(Exception):
    pass


def test_classes_are_as_they_were_behind_an_exception() -> None:
    def work(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        if trainer.epoch == 1.0:
            assert any(name.startswith("__geta") for name in vars(Trainer))  # a step that names it is compared whole
            raise Fails
        return weighted(trainer, loss)

    with pytest.raises(Fails):
        trained(Trainer, work, graphed=True)
    assert "__getattribute__" not in vars(Trainer) and not library_counters._watched


def test_a_class_that_a_call_changes_stays_as_the_call_left_it() -> None:
    class Patched(Trainer):
        __module__ = "hypothesis"

    def own(self: Any, name: str) -> Any:
        return object.__getattribute__(self, name)

    trainer = Patched()
    counters, state = counting(trainer)
    with counters.reading(state):
        del Patched.__getattribute__  # type: ignore[attr-defined]
    with counters.reading(state):
        Patched.__getattribute__ = own  # type: ignore[method-assign]
    assert vars(Patched)["__getattribute__"] is own and "__setattr__" not in vars(Patched)


def test_objects_that_are_gone_are_forgotten() -> None:
    counters = LibraryCounters()
    for _ in range(5):
        counters.look(state_of(*(Trainer() for _ in range(3))))
        gc.collect()
    assert len(counters._last) <= 6


def state_of(*owners: Any) -> HostState:
    found = [Container(vars(one), "trainer", is_attributes=True, owner=one) for one in owners]
    return HostState(containers=found)


def counting(*owners: Any) -> tuple[LibraryCounters, HostState]:
    counters, state = LibraryCounters(), state_of(*owners)
    counters.look(state)
    for one in owners:
        one.counts()
    counters.look(state)
    return counters, state


def test_an_object_and_one_of_its_subclass_are_both_watched() -> None:
    first, second = Trainer(), Advanced()
    counters, state = counting(first, second)
    with counters.reading(state) as unread:
        assert (first.steps, second.epoch) == (1, 0.25)
    assert unread == {id(vars(first)): {"epoch", "ranks"}, id(vars(second)): {"steps", "ranks"}}


def test_another_thread_that_reads_counts_too_and_two_watch_in_turn() -> None:
    trainer = Trainer()
    counters, state = counting(trainer)
    with counters.reading(state) as unread:
        reader = threading.Thread(target=lambda: trainer.steps)
        reader.start()
        reader.join()
        with counters.reading(state) as inner:
            assert trainer.weight == 1.0
        assert inner == {}
    assert unread == {id(vars(trainer)): {"epoch", "ranks"}}


def test_another_object_at_the_same_place_is_not_taken_for_it() -> None:
    trainer = Trainer()
    counters, state = counting(trainer)
    other = Trainer()
    other.__dict__ = state.containers[0].held
    del trainer, state
    counters.look(state_of(other))
    with counters.reading(state_of(other)) as unread:
        pass
    assert unread == {}


def test_what_is_left_out_was_read_by_neither_call() -> None:
    a, b = frozenset("a"), frozenset("ab")
    assert in_both(None, {1: b}) == {1: b}
    assert in_both({1: b, 2: a}, {1: a}) == {1: a}
    assert was_read({1: b}, {1: a}) and was_read({1: a}, {}) and not was_read({1: a}, {1: b})
    assert not was_read({}, {}) and not was_read({1: frozenset()}, {})
    trainer = Trainer()
    state = state_of(trainer)
    leave_out(state, {id(vars(trainer)): a})
    assert state.containers[0].unread == a
    leave_out(state, {})
    assert state.containers[0].unread == frozenset()


class Strange:
    """An object without a `__dict__`, whose class raises what it likes for a name that it does not know."""

    __module__ = "hypothesis"
    __slots__ = ("known",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_what_a_librarys_object_holds_is_looked_at_without_asking_it() -> None:
    """The step counts itself, and that is the reason, not what the object holds."""
    model, trainer = network("cpu"), Trainer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.kept = Strange()  # type: ignore[attr-defined]

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        trainer.backward(loss)
        optimizer.step()
        trainer.counts()
        return loss

    graphed = GraphedStep(step, device=CpuDevice())
    with pytest.warns(UserWarning, match="trainer.steps changes"):
        for (batch,) in batches("cpu", CALLS):
            graphed(batch)
