"""Numbers among a step's arguments that its code never reads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import batches, loss_of, network

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.unread_arguments import unread_arguments

CALLS = 14


def of_the_caller(text: str) -> int:
    """As libraries for tables take variables of their caller."""
    found: int = sys._getframe(1).f_locals[text[1:]]
    return found


class Loop:
    """A model and what trains it, as classes of training libraries have them."""

    def __init__(self) -> None:
        self.model = network("cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def update(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch))

    def named(self, batch: dict[str, torch.Tensor], *, batch_idx: int = 0, phase: str = "") -> torch.Tensor:
        return self.update(loss_of(self.model, batch))

    def scaled(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch) * (1 + batch_idx % 2))

    def scaled_inside(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        def scale() -> int:
            return 1 + batch_idx % 2

        return self.update(loss_of(self.model, batch) * scale())

    def scaled_by_locals(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        key = "batch" + "_" + "idx"
        return self.update(loss_of(self.model, batch) * (1 + locals()[key] % 2))

    def scaled_by_text(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch) * (1 + eval("batch_idx % 2")))  # noqa: S307

    def scaled_by_a_text(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch) * (1 + of_the_caller("@batch_idx") % 2))

    def short(self, batch: dict[str, torch.Tensor], i: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch))

    def handed_on(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.scaled(batch, batch_idx)

    def handed_to_two(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.nothing(batch, batch_idx)
        return self.scaled(batch, batch_idx=batch_idx)

    def handed_and_read(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx) * (1 + batch_idx % 2)

    def handed_to_what_it_finds(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        chosen = self.scaled if len(batch) else self.training_step
        return chosen(batch, batch_idx)

    def handed_as_another(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.scaled(batch, 1 if batch_idx % 3 else batch_idx)

    def handed_to_another_each_time(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.chosen = self.training_step if batch_idx % 2 else self.scaled
        return self.chosen(batch, batch_idx)

    def handed_in_a_list(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.gathered(batch, batch_idx)

    def gathered(self, batch: dict[str, torch.Tensor], *numbers: int) -> torch.Tensor:
        return self.scaled(batch, *numbers)

    def handed_to_its_own(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        def scale(batch_idx: int) -> int:
            return 1 + batch_idx % 2

        return self.update(loss_of(self.model, batch) * scale(batch_idx))

    def nothing(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None: ...

    def through(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.shared_step(batch, batch_idx, "train")

    def shared_step(self, batch: dict[str, torch.Tensor], batch_idx: int, stage: str) -> torch.Tensor:
        self.nothing(batch, batch_idx)
        return self.training_step(batch=batch, batch_idx=batch_idx)

    def through_the_rest(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.takes_more(batch, batch_idx, epoch=batch_idx)

    def takes_more(self, batch: dict[str, torch.Tensor], *_: Any, **others: Any) -> torch.Tensor:
        return of_a_module(self, batch, i=0)

    def through_a_function(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return of_a_module(self, batch, i=batch_idx)


def of_a_module(loop: Loop, batch: dict[str, torch.Tensor], i: int) -> torch.Tensor:
    return loop.update(loss_of(loop.model, batch))


def run(name: str, call: Callable[[Any, Any, int], torch.Tensor], *, graphed: bool) -> tuple[list[torch.Tensor], Any]:
    loop = Loop()
    step: Any = getattr(loop, name)
    if graphed:
        step = GraphedStep(step, device=CpuDevice())
    losses = [call(step, *batch, index).detach() for index, batch in enumerate(batches("cpu", CALLS))]
    return [*losses, *(parameter.detach() for parameter in loop.model.parameters())], step


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("training_step", lambda step, batch, index: step(batch, index)),
        ("training_step", lambda step, batch, index: step(batch, batch_idx=index)),
        ("training_step", lambda step, batch, index: step(batch=batch, batch_idx=float(index))),
        ("short", lambda step, batch, index: step(batch, index)),
        ("named", lambda step, batch, index: step(batch, batch_idx=index, phase=f"train {index}")),
        ("through", lambda step, batch, index: step(batch, index)),
        ("through", lambda step, batch, index: step(batch, batch_idx=index)),
        ("through_the_rest", lambda step, batch, index: step(batch, index)),
        ("through_a_function", lambda step, batch, index: step(batch, index)),
    ],
)
def test_a_number_that_no_code_reads_makes_no_other_signature(
    name: str, call: Callable[[Any, Any, int], torch.Tensor]
) -> None:
    expected, _ = run(name, call, graphed=False)
    found, step = run(name, call, graphed=True)
    assert all(map(torch.equal, found, expected))
    report = step.report()
    assert report.replays >= CALLS - 5 and len(report.recordings) == 1 and not report.refusals


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize(
    "name",
    [
        *("scaled", "scaled_inside", "scaled_by_locals", "scaled_by_text", "scaled_by_a_text", "handed_on"),
        *("handed_to_two", "handed_and_read", "handed_to_what_it_finds", "handed_as_another", "handed_in_a_list"),
        *("handed_to_another_each_time", "handed_to_its_own"),
    ],
)
def test_a_number_that_code_reads_counts(name: str) -> None:
    def call(step: Any, batch: Any, index: int) -> torch.Tensor:
        given: torch.Tensor = step(batch, index)
        return given

    expected, _ = run(name, call, graphed=False)
    found, _ = run(name, call, graphed=True)
    assert all(map(torch.equal, found, expected))


def test_a_tensor_that_no_code_reads_is_left_as_it_is() -> None:
    unread = unread_arguments(Loop().training_step)
    assert unread is not None and unread.names == {"batch_idx"}
    batch, tensor = {"x": torch.zeros(1)}, torch.zeros(1)
    assert unread.left_out((batch, 3), {}) == ((batch, None), {})
    assert unread.left_out((batch, tensor), {}) == ((batch, tensor), {})
    assert unread.left_out((batch,), {"batch_idx": True}) == ((batch,), {"batch_idx": None})
    assert unread.left_out((), {"batch": 3}) == ((), {"batch": 3})


def test_another_argument_of_the_same_name_is_left() -> None:
    def step(batch: Any, batch_idx: int, /, **others: Any) -> Any:
        return batch, others

    unread = unread_arguments(step)
    assert unread is not None and unread.left_out((1, 2), {"batch_idx": 3}) == ((1, None), {"batch_idx": 3})


def test_code_that_is_exchanged_reads_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(batch: Any, batch_idx: int) -> Any:
        return batch

    def other(batch: Any, batch_idx: int) -> Any:
        return batch_idx

    unread = unread_arguments(step)
    assert unread is not None and unread.left_out((1, 2), {}) == ((1, None), {})
    monkeypatch.setattr(step, "__code__", other.__code__)
    assert unread.left_out((1, 2), {}) == ((1, 2), {})


class Model(torch.nn.Module):
    """As those of Lightning are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("cpu")
        self.numbers: list[Any] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return loss_of(self.inner, batch)

    def read(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return loss_of(self.inner, batch) * (1 + batch_idx % 2)


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()


def trained(change: Callable[[Any, int], None], *, graphed: bool) -> tuple[list[torch.Tensor], Any]:
    """Losses and parameters of a loop that hands the number of a batch on to a module's module."""
    holder = Holder()
    optimizer = torch.optim.SGD(holder.parameters(), lr=0.05)

    def step(batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = holder.model.training_step(batch, batch_idx)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    called: Any = GraphedStep(step, device=CpuDevice()) if graphed else step
    losses = []
    for index, (batch,) in enumerate(batches("cpu", CALLS)):
        change(holder, index)
        losses.append(called(batch, index).detach())
    return [*losses, *(parameter.detach() for parameter in holder.parameters())], called


def of_the_instance(holder: Any, index: int) -> None:
    if index == 9:
        holder.model.training_step = holder.model.read


def of_the_class(holder: Any, index: int) -> None:
    if index == 9:
        holder.model.__class__ = type("Other", (Model,), {"training_step": Model.read})


def of_the_module(holder: Any, index: int) -> None:
    if index == 9:
        holder.model = type("Other", (Model,), {"training_step": Model.read})()


def test_a_number_is_followed_to_the_training_step_of_a_model() -> None:
    expected, _ = trained(lambda holder, index: None, graphed=False)
    found, step = trained(lambda holder, index: None, graphed=True)
    assert all(map(torch.equal, found, expected))
    report = step.report()
    assert report.replays >= CALLS - 5 and len(report.recordings) == 1 and not report.refusals


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("change", [of_the_instance, of_the_class, of_the_module])
def test_a_number_counts_from_when_what_it_is_handed_to_reads_it(change: Callable[[Any, int], None]) -> None:
    torch.manual_seed(0)
    expected, _ = trained(change, graphed=False)
    torch.manual_seed(0)
    found, step = trained(change, graphed=True)
    assert all(map(torch.equal, found, expected))
    assert step.report().replays


def late(number: int) -> int:
    """What numbers decide in calls behind those that are looked at only."""
    return 3 if number >= 9 and number % 2 else 1


class Part:
    """Another object each time would be seen, these stay."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads

    def loss(self, model: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(model, batch)


class Reading(Part):
    def loss(self, model: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(model, batch) * late(batch_idx)


class Exchanging(Loop):
    """Exchanges what numbers are handed on to, in each call, and puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.reading = Part(reads=False), Reading(reads=True)
        self.part = self.plain
        self.kept = {"part": self.plain}
        self.module = Reads()
        self.module.inner = Plain()

    def shared(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.part.loss(self.model, batch, batch_idx)

    def in_turns(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.part = self.reading
        first = self.shared(batch, batch_idx)
        self.part = self.plain
        return self.update(first + self.shared(batch, batch_idx))

    def in_a_loop(self, batch: Any, batch_idx: int) -> torch.Tensor:
        total = torch.zeros(())
        for self.part in (self.reading, self.plain):  # noqa: B020
            total = total + self.shared(batch, batch_idx)
        return self.update(total)

    @contextlib.contextmanager
    def swapped(self, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def in_a_block(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.swapped("part", self.reading):
            return self.update(self.part.loss(self.model, batch, batch_idx))

    def by_its_class(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.plain.__class__ = Reading
        loss = self.shared(batch, batch_idx)
        self.plain.__class__ = Part
        return self.update(loss)

    def by_its_code(self, batch: Any, batch_idx: int) -> torch.Tensor:
        before = Part.loss.__code__
        Part.loss.__code__ = Reading.loss.__code__
        loss = self.shared(batch, batch_idx)
        Part.loss.__code__ = before
        return self.update(loss)

    def by_a_module(self, batch: Any, batch_idx: int) -> torch.Tensor:
        before = self.module.inner
        self.module.add_module("inner", self.module.other)
        loss: torch.Tensor = self.module.inner.loss(self.model, batch, batch_idx)
        self.module.add_module("inner", before)
        return self.update(loss)


class Plain(torch.nn.Module):
    def loss(self, model: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(model, batch)


class Reads(torch.nn.Module):
    inner: Any

    def __init__(self) -> None:
        super().__init__()
        self.other = ReadsLate()


class ReadsLate(Plain):
    def loss(self, model: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(model, batch) * late(batch_idx)


class Averaged(torch.nn.Module):
    """Gives another module than the one that stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.averaged = Plain(), ReadsLate()

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("averaged" if name == "net" else name)


class FunctionWrapper:
    """As libraries of decorators have it: its class is that of what it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    @property
    def __class__(self) -> Any:
        return type(self.wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __call__(self, model: Any, batch: Any, batch_idx: int) -> Any:
        return self.wrapped(model, batch, batch_idx) * late(batch_idx)


class Slotted:
    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return {"found": self.target}[name] if name == "found" else getattr(self.target, name)

    def loss(self, model: Any, batch: Any, batch_idx: int) -> Any:
        return loss_of(model, batch) * late(batch_idx)


class Target:
    def __init__(self) -> None:
        self.loss = lambda model, batch, batch_idx: loss_of(model, batch)


class Wrapping(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.averaged = Averaged()
        self.wrapper = FunctionWrapper(Part(reads=False).loss)
        self.slotted = Slotted(Target())
        self.flag = True
        self.first, self.second = Reading(reads=True), Part(reads=False)

    def by_getattr(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.update(self.averaged.net.loss(self.model, batch, batch_idx))

    def by_a_wrapper(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.update(self.wrapper(self.model, batch, batch_idx))

    def by_slots(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.update(self.slotted.loss(self.model, batch, batch_idx))

    def by_a_helper_of_frames(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch) * late(values_around()[2]))

    def handed_to_a_helper_of_frames(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.by_a_helper_of_frames(batch, batch_idx)

    exec(  # noqa: S102 (more names than one byte counts: jumps lead to prefixes of instructions)
        "def long(self, batch, batch_idx):\n    if not batch:\n"
        + "".join(f"        self.name_{index}\n" for index in range(300))
        + "    loss = (self.first if self.flag else self.second).loss(self.model, batch, batch_idx)\n"
        + "    return self.update(loss)\n"
    )
    long: Any


def values_around() -> list[Any]:
    return list(sys._getframe(1).f_locals.values())


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((Exchanging, name) for name in ("in_turns", "in_a_loop", "in_a_block", "by_its_class", "by_its_code")),
        (Exchanging, "by_a_module"),
        *((Wrapping, name) for name in ("by_getattr", "by_a_wrapper", "by_slots", "long", "by_a_helper_of_frames")),
        (Wrapping, "handed_to_a_helper_of_frames"),
    ],
)
def test_a_number_counts_where_code_is_not_what_it_seems(kind: Callable[[], Any], name: str) -> None:
    def results(*, graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loop = kind()
        step: Any = getattr(loop, name)
        step = GraphedStep(step, device=CpuDevice()) if graphed else step
        losses = [step(batch, index).detach() for index, (batch,) in enumerate(batches("cpu", CALLS))]
        return [*losses, *(parameter.detach() for parameter in loop.model.parameters())]

    assert all(map(torch.equal, results(graphed=True), results(graphed=False)))


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_where_the_program_profiles_what_is_handed_on_counts() -> None:
    def see(frame: Any, event: str, value: Any) -> None: ...

    loop = Loop()
    step: Any = GraphedStep(loop.through, device=CpuDevice())
    sys.setprofile(see)
    try:
        for index, (batch,) in enumerate(batches("cpu", 6)):
            step(batch, index)
        assert sys.getprofile() is see
    finally:
        sys.setprofile(None)
    assert not step.report().replays


def test_profiling_is_off_again_behind_a_call_that_raises() -> None:
    class Failing(Loop):
        def nothing(self, batch: Any, batch_idx: int) -> None:
            raise ValueError("of the program")

    step: Any = GraphedStep(Failing().through, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 6)):
        with pytest.raises(ValueError, match="of the program"):
            step(batch, index)
        assert sys.getprofile() is None


class Keyed:
    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.content[name]


class Absent:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("there is none in this context")


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize(("kind", "replays"), [(Keyed, CALLS - 3), (Absent, 0)])
def test_an_object_that_raises_when_it_is_looked_at_is_no_error(kind: Any, replays: int) -> None:
    loop, kept, known = Loop(), kind(), kind is Keyed

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loop.update(loss_of(loop.model, batch) * (kept.scale if known else 1.0))

    called: Any = GraphedStep(step, device=CpuDevice())
    for (batch,) in batches("cpu", CALLS):
        called(batch)
    report = called.report()
    assert report.replays == replays
    assert bool(report.refusals) is not known
    if not known:
        assert "raises RuntimeError when it is looked at" in report.refusals[0].reason


def test_code_is_given_the_numbers_that_it_does_not_read() -> None:
    """Python may look at them where this does not see it, such as a debugger, or a check of annotations."""
    seen = []

    class Watching(Loop):
        def nothing(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            seen.append(sys._getframe(1).f_locals["batch" + "_idx"])

    loop = Watching()
    step: Any = GraphedStep(loop.through, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", CALLS)):
        step(batch, index)
    assert seen and all(type(one) is int for one in seen)


def test_an_attribute_that_runs_code_is_not_looked_up() -> None:
    looked = []

    class Asked:
        @property
        def found(self) -> Any:
            looked.append("found")
            return Loop()

        def __getattr__(self, name: str) -> Any:
            looked.append(name)
            raise AttributeError(name)

        def by_property(self, batch: Any, batch_idx: int) -> Any:
            return self.found.training_step(batch, batch_idx)

        def by_getattr(self, batch: Any, batch_idx: int) -> Any:
            return self.missing.training_step(batch, batch_idx)

    for step in (Asked().by_property, Asked().by_getattr):
        unread = unread_arguments(step)
        assert unread is not None and unread.left_out((1, 2), {}) == ((1, 2), {})
    assert not looked


def test_what_is_no_function_of_python_has_none() -> None:
    assert unread_arguments(print) is None and unread_arguments(Loop) is None
    assert unread_arguments(lambda *args, **kwargs: None) is None
