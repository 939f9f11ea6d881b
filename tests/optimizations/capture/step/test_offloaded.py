"""Gradients from before a recording, which leave the device's memory where the step throws them away unread."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted_behind
from simulated_gpu.operators import CpuDevice, CpuGraph
from step_parts import batches, loss_of, network
from torch.utils import dlpack

from optimizations.capture.step import offloaded
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.host_memory import spare_host_bytes
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.offloaded import OffloadedGradients
from optimizations.graph.driver import CudaCallFailed

Hold = Callable[[torch.Tensor], Any]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients are set aside, by recording that is tried."""
    found: list[int] = []
    stock = OffloadedGradients.take

    def take(self: OffloadedGradients, gradients: Any) -> Any:
        placed = stock(self, gradients)
        found.append(sum(one is not other for one, other in zip(gradients, placed, strict=True)))
        return placed

    monkeypatch.setattr(OffloadedGradients, "take", take)
    return found


class Training:
    """A model, its optimizer, and a step. `read` is what the step does with each gradient before it drops them."""

    def __init__(self, read: Hold | None = None, *, to_none: bool = True, zeroes: bool = True) -> None:
        self.model = network("cpu")
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        model = self.model

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            for parameter in model.parameters():
                if read is not None and parameter.grad is not None:
                    read(parameter.grad)
            if zeroes:
                optimizer.zero_grad(set_to_none=to_none)
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            return loss

        self.step = step

    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]


def alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def compare(
    mine: Training,
    theirs: Training,
    step: GraphedStep,
    between: Callable[[Training], None] = lambda training: None,
    calls: int = 8,
) -> None:
    """All calls must leave the losses, weights and gradients of eager."""
    for index, batch in enumerate(batches("cpu", calls)):
        assert torch.equal(step(*batch), theirs.step(*batch)), index
        same = [*zip(mine.model.parameters(), theirs.model.parameters(), strict=True)]
        assert all(torch.equal(one, other) for one, other in same), index
        assert all(map(alike, mine.gradients(), theirs.gradients())), index
        between(mine)
        between(theirs)


def test_gradients_have_no_memory_while_the_step_is_captured(taken: list[int]) -> None:
    held: list[weakref.ref[Any]] = []

    class Looks(CpuDevice):
        @contextlib.contextmanager
        def capturing(self, graph: CpuGraph, pool: Any, generators: Any = ()) -> Iterator[None]:
            held.extend(weakref.ref(one) for one in waiting())
            assert self.given_back == 2, "before the first call, and before the capture"
            with super().capturing(graph, pool, generators):
                yield

    def waiting() -> list[torch.Tensor]:
        """Gradients from before: tensors of some elements, with a storage of none."""
        found = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.layout is torch.strided]
        return [one for one in found if one.numel() and not one.untyped_storage().nbytes()]

    def borrowed() -> int:
        """Tensors that look like gradients and whose memory is somebody else's, as that of stand-ins is."""
        shapes = {parameter.shape for parameter in mine.model.parameters()}
        found = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.layout is torch.strided]
        return sum(one.shape in shapes and not one.untyped_storage().resizable() for one in found)

    mine, device = Training(), Looks()
    gc.collect()  # what tests before this one left may go in the midst of it
    before = borrowed()
    step = GraphedStep(mine.step, device=device)
    compare(mine, Training(), step)
    assert taken == [4] and len(held) == 4
    assert borrowed() == before
    assert (device.captures, step.report().replays, step.report().refusals) == (1, 5, ())
    assert [one() for one in held] == [None] * 4, "they are gone"


@pytest.mark.parametrize(
    "hold",
    [
        lambda gradient: gradient,
        lambda gradient: gradient.view(-1),
        lambda gradient: gradient.detach(),
        lambda gradient: gradient.untyped_storage(),
        dlpack.to_dlpack,
        weakref.ref,
        lambda gradient: torch.ones_like(gradient, requires_grad=True) * gradient,
        lambda gradient: setattr(gradient, "note", "kept"),
    ],
    ids=["itself", "a view", "an alias", "its storage", "a capsule", "a weak reference", "a history", "a note on it"],
)
def test_what_somebody_else_holds_stays(hold: Hold, taken: list[int]) -> None:
    held: list[Any] = []

    def between(training: Training) -> None:
        one = training.gradients()[0]
        assert one is not None
        if calls[0] % 2 == 0:  # of the graphed one
            held[:] = [hold(one)]
        calls[0] += 1

    calls = [0]
    mine = Training()
    step = GraphedStep(mine.step, device=CpuDevice())
    compare(mine, Training(), step, between)
    assert step.report().replays >= 3  # every second call runs uncaptured while one is held
    assert all(found == 0 for found in taken) or taken == [3]


def test_gradient_held_only_at_recording_keeps_its_memory(taken: list[int]) -> None:
    mine = Training()
    held: list[Any] = []
    history: list[torch.Tensor] = []
    step = GraphedStep(mine.step, device=CpuDevice())
    for index, batch in enumerate(batches("cpu", 6)):
        if index == 3:
            held = [(one, one.clone()) for one in mine.gradients()[1:3] if one is not None]
            history = [torch.ones(16, 8, requires_grad=True) * one for one in mine.gradients()[:1] if one is not None]
        step(*batch)
    assert history and taken == [1] and step.report().replays == 3
    assert all(torch.equal(one, copy) for one, copy in held)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Training(lambda gradient: gradient.sum()),
        lambda: Training(to_none=False),
        lambda: Training(zeroes=False),
    ],
    ids=["read before", "set to zero", "added to"],
)
def test_gradients_that_the_step_needs_are_left_alone(make: Callable[[], Training], taken: list[int]) -> None:
    mine, device = make(), CpuDevice()
    step = GraphedStep(mine.step, device=device)
    compare(mine, make(), step)
    assert taken == []
    assert (device.captures, step.report().replays) == (1, 5)


def test_a_gradient_that_two_parameters_have_is_left_alone(taken: list[int]) -> None:
    mine = Training()
    first, _, third, _ = [*mine.model.parameters()]
    step = GraphedStep(mine.step, device=CpuDevice())
    for index, batch in enumerate(batches("cpu", 6)):
        if index == 3:
            shared = torch.zeros(first.numel())
            first.grad, third.grad = shared[: first.numel()].view_as(first), shared[: third.numel()].view_as(third)
            del shared
        step(*batch)
    assert taken == [2] and step.report().replays == 3


def test_there_has_to_be_room_in_host_memory(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    monkeypatch.setattr(offloaded, "spare_host_bytes", lambda: 100)
    mine = Training()
    step = GraphedStep(mine.step, device=CpuDevice())
    compare(mine, Training(), step)
    assert taken == [0] and step.report().replays == 5


def test_host_memory_that_is_not_there_after_all_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    def full(storages: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(offloaded, "_copies_of", full)
    mine = Training()
    step = GraphedStep(mine.step, device=CpuDevice())
    compare(mine, Training(), step)
    assert taken == [0] and step.report().replays == 5


def about_to_record() -> tuple[Training, CpuDevice, GraphedStep, list[Any]]:
    """A step whose next call is recorded, and six batches, of which it has seen three."""
    mine, device = Training(), CpuDevice()
    step = GraphedStep(mine.step, device=device, on_refusal="raise")
    given = list(batches("cpu", 6))
    for batch in given[:3]:
        step(*batch)
    return mine, device, step, given


@pytest.mark.parametrize("error", [RuntimeError("for some reason"), KeyboardInterrupt(), KeyError("own")], ids=repr)
def test_failed_recording_leaves_tensors_and_values(error: BaseException, taken: list[int]) -> None:
    mine, device, step, given = about_to_record()
    values = [one.clone() for one in mine.gradients() if one is not None]
    places = [*map(id, mine.gradients())]
    versions = [one._version for one in mine.gradients() if one is not None]
    device.fail_with = error
    with pytest.raises(StepRefused if type(error) is RuntimeError else type(error)):
        step(*given[3])
    assert taken == [4] and device.captures == 1
    found = [one for one in mine.gradients() if one is not None]
    assert [*map(id, found)] == places and [one._version for one in found] == versions
    assert all(map(torch.equal, found, values))


def test_interrupted_undo_of_a_capture_loses_no_gradient() -> None:
    files = ("step/offloaded.py", "step/gradients.py", "step/graphed_step.py", "step/call_recorder.py")
    given = batches("cpu", 4)
    for number in range(200):
        mine, device = Training(), CpuDevice()
        step = GraphedStep(mine.step, device=device)
        for batch in given[:3]:
            step(*batch)
        values = [one.clone() for one in mine.gradients() if one is not None]
        where: list[str] = []
        with contextlib.ExitStack() as stack:

            class Late(CpuGraph):
                """Interrupts come when it is freed, and from then on until the call has ended."""

                def reset(self) -> None:
                    nonlocal where
                    super().reset()
                    where = stack.enter_context(interrupted_behind(number, *files))  # noqa: B023

            device.new_graph = Late  # type: ignore[method-assign]
            device.fail_with = KeyboardInterrupt()
            with contextlib.suppress(KeyboardInterrupt):
                step(*given[3])
        found = [one for one in mine.gradients() if one is not None]
        assert [one.untyped_storage().nbytes() for one in found] == [4 * one.numel() for one in values], number
        assert all(map(torch.equal, found, values)), (number, where)
        if not where:
            break
    assert number > 20


def test_stand_in_after_a_failed_capture_cannot_be_read() -> None:
    """Its memory is gone. A traceback may hold it."""
    kept: list[torch.Tensor] = []

    class Fails(CpuDevice):
        @contextlib.contextmanager
        def capturing(self, graph: CpuGraph, pool: Any, generators: Any = ()) -> Iterator[None]:
            with super().capturing(graph, pool, generators):
                kept.extend(one for one in mine.gradients() if one is not None)
                kept.extend(one.data for one in kept[:])
                raise KeyboardInterrupt

    mine = Training()
    step = GraphedStep(mine.step, device=Fails())
    given = batches("cpu", 4)
    for batch in given[:3]:
        step(*batch)
    with pytest.raises(KeyboardInterrupt):
        step(*given[3])
    assert len(kept) == 8
    for one in kept:
        with pytest.raises(RuntimeError, match=r"read \.grad again"):
            one.sum()
    assert all(one.sum().isfinite() for one in mine.gradients() if one is not None)


def test_failed_capture_runs_uncaptured_with_old_gradients(taken: list[int]) -> None:
    mine, device = Training(), CpuDevice()
    step = GraphedStep(mine.step, device=device)
    given = iter(batches("cpu", 8))
    other = Training()
    for index in range(8):
        batch = next(given)
        if index == 3:
            device.fail_with = RuntimeError("for some reason")
            with pytest.warns(UserWarning, match="for some reason"):
                found = step(*batch)
        else:
            found = step(*batch)
        assert torch.equal(found, other.step(*batch))
    assert taken == [4] and step.report().replays == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_code_that_refuses_stand_ins_is_captured(compiled: bool, taken: list[int]) -> None:
    """Nobody sees what it is given. Where none is compiled, the exception cannot be about that."""
    mine, other, device = Training(), Training(), CpuDevice()
    called: Any = torch.compile(mine.model, backend="eager") if compiled else mine.model

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        mine.model.zero_grad()
        loss = loss_of(called, batch)
        loss.backward()
        return loss

    graphed = GraphedStep(step, device=device)
    for index, (batch,) in enumerate(batches("cpu", 9)):
        device.fail_with = ValueError("cannot be accessed") if taken == [] and index >= 3 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = graphed(batch)
        other.model.zero_grad()
        expected = loss_of(other.model, batch)
        expected.backward()
        assert torch.equal(found, expected)
        assert all(map(alike, mine.gradients(), other.gradients()))
    assert taken == [4] and device.captures == (2 if compiled else 1)
    assert bool(graphed.report().replays) is compiled
    assert bool(graphed.report().refusals) is not compiled


class Switches(CpuDevice):
    """Something that nobody sees is another thing while a capture is under way, for the first `times`."""

    times = 1

    @contextlib.contextmanager
    def capturing(self, graph: CpuGraph, pool: Any, generators: Any = ()) -> Iterator[None]:
        before = sys.getswitchinterval()
        with super().capturing(graph, pool, generators):
            sys.setswitchinterval(0.25 if self.captures <= self.times else before)
            try:
                yield
            finally:
                sys.setswitchinterval(before)


def reads(gradient: torch.Tensor) -> None:
    if sys.getswitchinterval() == 0.25:
        gradient.mul_(2)


def reads_and_hides_it(gradient: torch.Tensor) -> None:
    with contextlib.suppress(Exception):
        reads(gradient)


@pytest.mark.parametrize("read", [reads, reads_and_hides_it])
def test_captured_call_that_reads_gradients_has_them(read: Hold, taken: list[int]) -> None:
    mine, device = Training(read), Switches()
    step = GraphedStep(mine.step, device=device)
    compare(mine, Training(), step)
    assert taken == [4] and device.captures == 2
    assert (step.report().replays, step.report().refusals) == (5, ())


def test_step_that_keeps_captured_gradients_gets_those(taken: list[int]) -> None:
    held: list[Any] = []

    class Keeps(CpuDevice):
        @contextlib.contextmanager
        def capturing(self, graph: CpuGraph, pool: Any, generators: Any = ()) -> Iterator[None]:
            with super().capturing(graph, pool, generators):
                if self.captures == 1:
                    held.append(mine.gradients()[0])
                yield

    mine, device = Training(), Keeps()
    step = GraphedStep(mine.step, device=device)
    compare(mine, Training(), step)
    assert held and taken == [4] and device.captures == 2 and step.report().replays == 5


@pytest.mark.parametrize("captures", [2, 3])
def test_nothing_of_a_failed_capture_is_alive_in_the_next_one(captures: int) -> None:
    """Nor does it lie in the cache of the allocator."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    given_back: list[int] = []

    class Counts(CpuDevice):
        @contextlib.contextmanager
        def capturing(self, graph: CpuGraph, pool: Any, generators: Any = ()) -> Iterator[None]:
            alive.append(sum(one() is not None for one in made))
            given_back.append(self.given_back)
            with super().capturing(graph, pool, generators):
                yield
                made.extend(weakref.ref(one) for one in mine.gradients() if one is not None)

        def mentions(self, graph: CpuGraph, memory: Any, but: Any = ()) -> bool:
            return bool(memory) and self.captures < captures

        def read(self, graph: CpuGraph) -> Any:
            raise CudaCallFailed("cuGraphGetNodes", 1, "which words are left over is not told")

    mine, device = Training(), Counts()
    step = GraphedStep(mine.step, device=device)
    gc.disable()
    try:
        compare(mine, Training(), step)
    finally:
        gc.enable()
    assert alive == [0] * captures
    assert given_back == [*range(2, 2 + captures)]
    assert step.report().replays == 5


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_come_back_once_there_is_memory(
    times: int, monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    stock, left = OffloadedGradients.restore, [times]

    def restore(self: OffloadedGradients) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("no memory")
        stock(self)

    monkeypatch.setattr(OffloadedGradients, "restore", restore)
    mine, device, step, given = about_to_record()
    values = [one.clone() for one in mine.gradients() if one is not None]
    device.fail_with = RuntimeError("for some reason")
    with pytest.raises(StepRefused if times == 1 else torch.OutOfMemoryError):
        step(*given[3])
    assert taken == [4]
    found = [one for one in mine.gradients() if one is not None]
    assert len(found) == (4 if times == 1 else 0)
    assert all(map(torch.equal, found, values[: len(found)]))


def files(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "texts", "expected"),
    [
        ("0::/\n", {}, 2048_000),
        ("0::/job/task\n", {"job/memory.max": "900000\n", "job/memory.current": "700000\n"}, 2048_000),
        (
            "0::/job/task\n",
            {
                "job/task/memory.max": "max\n",
                "job/task/memory.current": "1\n",
                "job/memory.max": "900000\n",
                "job/memory.current": "700000\n",
                "job/memory.stat": "anon 600000\ninactive_file 50000\n",
            },
            250_000,
        ),
        (
            "4:cpuset:/\n3:memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "1000\n",
                "memory/job/memory.usage_in_bytes": "3000\n",
                "memory/job/memory.stat": "total_inactive_file 500\n",
            },
            0,
        ),
    ],
)
def test_host_memory_is_what_machine_and_cgroups_leave(
    groups: str, texts: dict[str, str], expected: int, tmp_path: Path
) -> None:
    files(tmp_path / "proc", {"meminfo": "MemTotal: 9 kB\nMemAvailable: 2000 kB\n", "self/cgroup": groups})
    files(tmp_path / "cgroup", texts)
    found = spare_host_bytes(processes=tmp_path / "proc", root=tmp_path / "cgroup")
    assert found == expected


def test_host_memory_that_nobody_tells_of_is_none(tmp_path: Path) -> None:
    assert spare_host_bytes(processes=tmp_path) == 0
    assert spare_host_bytes() > 0
