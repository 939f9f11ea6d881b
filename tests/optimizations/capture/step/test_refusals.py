"""Unrepeatable work is refused with a reason and a line, and the program runs as without Encore."""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import itertools
import linecache
import random
import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interrupts import interrupted_after
from simulated_gpu.operators import CpuDevice, CpuGraph
from step_parts import CALLS, Graph, assert_as_eager, batches, loss_of, network, training_step
from step_refusals import REFUSED, Refused, trained
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from optimizations import torch_internals
from optimizations.capture.callables.graph_callables import GraphedCallables, graph_callables
from optimizations.capture.step.call_recorder import CallRecorder
from optimizations.capture.step.graphed_step import GraphedStep, graph_step
from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.options import StepOptions

CHANGED = re.compile(r"(\S+)(, which changes| changes from| has \d| is bound| is set)")
"""What a reason says of a value, which the line in the refusal names, or its owner."""


def run(made: Refused, step: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    random.seed(3)
    for index, batch in enumerate(made.batches or batches("cpu")):
        step(*batch)
        made.between(index)
    return [parameter.detach() for parameter in made.model.parameters()]


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unrepeatable_step_is_refused_and_runs_uncaptured(name: str) -> None:
    eager = REFUSED[name]("cpu")
    expected = run(eager, eager.step)
    made, device = REFUSED[name]("cpu"), CpuDevice()
    step = GraphedStep(made.step, device=device)
    found = run(made, step)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    (refusal, *_) = step.report().refusals
    assert made.words in refusal.reason
    assert made.advice in refusal.advice
    assert refusal.advice
    if made.line:
        assert refusal.source_line is not None
        assert "step_refusals.py:" in refusal.source_line or "step_parts.py:" in refusal.source_line
        if changed := CHANGED.search(refusal.reason):
            file, number = refusal.source_line.partition(" in ")[0].rsplit(":", 1)
            text = linecache.getline(file, int(number))
            assert [name for name in re.findall(r"[a-z]\w+", changed.group(1)) if name in text], refusal
    assert sum(graph.replays for graph in device.graphs) == 0


def test_refusal_is_a_warning_with_the_steps_name() -> None:
    made = REFUSED["item"]("cpu")
    step = GraphedStep(made.step, device=CpuDevice())
    with pytest.warns(UserWarning, match=r"item.*runs without a CUDA graph: it reads a value"):
        run(made, step)


class Counted:
    """A training loop with Python state that a capture must not change twice."""

    def __init__(self) -> None:
        self.model = network("cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.train = training_step(self.model, self.optimizer)
        self.calls: list[int] = []
        self.breaks_in_call: int | None = None
        self.number = 0

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls.append(self.number)
        loss = self.train(batch).detach()
        if self.number == self.breaks_in_call:
            self.breaks_in_call = None
            raise torch.OutOfMemoryError("no memory")
        self.calls.pop()
        return loss


WAITING: list[CpuDevice] = []


@torch.library.custom_op("encore_tests::waits_for_the_gpu", mutates_args=())
def waits_for_the_gpu(x: torch.Tensor) -> torch.Tensor:
    if WAITING[0].is_capturing():
        raise RuntimeError("operation not permitted when stream is capturing")
    return x * 2


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_failing_line_in_a_capture_is_named() -> None:
    """Nothing indicates the failure before the line runs."""
    device = CpuDevice()
    WAITING[:] = [device]
    step = GraphedStep(lambda x: waits_for_the_gpu(x + 1) - 1, device=device)
    for number in range(5):
        assert torch.equal(step(torch.full((3,), float(number))), torch.full((3,), 2.0 * number + 1))
    (refusal,) = step.report().refusals
    assert "could not be captured (RuntimeError: operation not permitted when stream is cap" in refusal.reason
    assert "graph_callables" in refusal.advice
    assert refusal.source_line is not None and "test_refusals.py:" in refusal.source_line


def test_python_changes_of_a_failed_capture_are_undone() -> None:
    made = Counted()
    device = CpuDevice()
    step = GraphedStep(made.step, device=device, ignore=("self.breaks_in_call",))
    calls = batches("cpu")
    for batch in calls[:3]:
        step(*batch)
    made.breaks_in_call = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The capture raises and is put back; the call that follows runs the same Python, and raises for good.
        with pytest.raises(torch.OutOfMemoryError):
            step(*calls[3])
    assert made.calls == [0]  # once, not twice
    assert device.captures == 1


def test_programs_own_exception_does_not_refuse_the_step() -> None:
    """It is raised where the call would be captured, and in calls before and after."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failing = {"now": False}

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if failing["now"]:
            raise ValueError("a bad batch")
        optimizer.step()
        return loss

    graphed = GraphedStep(step, device=CpuDevice())
    for index, batch in enumerate(batches("cpu", 14)):
        failing["now"] = index in (1, 4, 8)
        with pytest.raises(ValueError, match="a bad batch") if failing["now"] else contextlib.nullcontext():
            graphed(*batch)
    assert graphed.report().refusals == () and graphed.report().replays == 14 - 1 - 3 - 2


def test_tensor_changes_of_a_failed_capture_are_undone() -> None:
    model = network("cpu")
    weight, hidden = model[0].weight, array.array("i", [0])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch).detach()
        if hidden[0]:  # what no watch sees
            weight.data = weight.data * 2
            weight.requires_grad_(False)
        return loss

    graphed = GraphedStep(step, device=CpuDevice())
    calls = batches("cpu", 4)
    with torch.no_grad():
        for batch in calls[:3]:
            graphed(*batch)
        hidden[0], expected = 1, weight.detach().clone() * 2
        graphed(*calls[3])  # the capture comes to another end than what was observed, and the call runs as it is
    assert graphed.report().replays == 0
    assert torch.equal(weight, expected) and not weight.requires_grad


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("error", [KeyError("the reason"), KeyboardInterrupt()])
def test_failing_end_of_a_capture_does_not_hide_its_cause(error: BaseException) -> None:
    """The driver raises at the end of a capture that was invalidated, whatever is being raised then."""
    made = Counted()
    device = CpuDevice()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if device.is_capturing():
            device.fail_with = torch.AcceleratorError("operation failed due to a previous error during capture")
            raise error
        return made.step(batch)

    graphed = GraphedStep(step, device=device)
    calls = batches("cpu")
    for batch in calls[:3]:
        graphed(*batch)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else contextlib.nullcontext():
        for batch in calls[3:6]:
            graphed(*batch)
        assert "KeyError: 'the reason'" in graphed.report().refusals[0].reason


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_autograd_state_of_another_stream_names_the_remedy() -> None:
    device = CpuDevice()
    graphed = GraphedStep(Counted().step, device=device)
    for index, batch in enumerate(batches("cpu")):
        if index == 3:
            device.fail_with = torch.AcceleratorError(
                "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
            )
        graphed(*batch)
    (refusal,) = graphed.report().refusals
    assert "default stream" in refusal.reason and "detach()" in refusal.advice


def test_interrupted_capture_restores_the_state() -> None:
    made = Counted()
    device = CpuDevice()
    step = GraphedStep(made.step, device=device)
    calls = batches("cpu")
    for batch in calls[:3]:
        step(*batch)
    weights = [parameter.detach().clone() for parameter in made.model.parameters()]
    slopes = [parameter.grad for parameter in made.model.parameters()]
    device.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        step(*calls[3])
    assert made.calls == []
    assert all(parameter.grad is slope for parameter, slope in zip(made.model.parameters(), slopes, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, made.model.parameters(), strict=True))
    step(*calls[3])  # recorded and launched now
    assert step.report().replays == 1
    assert made.calls == []


class Kept:
    flag = 0


class Derived(Kept):
    pass


class InASlot:
    __slots__ = ("flag",)

    def __init__(self) -> None:
        self.flag = 0


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("kept", [Kept(), Derived, InASlot()], ids=["attribute", "base class", "slot"])
def test_failed_capture_restores_a_value_that_it_changed(kept: Any) -> None:
    """The call that runs in its place begins with the value from before."""
    fails, begins = array.array("i", [0]), array.array("i", [0])

    def step(x: torch.Tensor) -> torch.Tensor:
        begins[0] = kept.flag
        owner = Kept if isinstance(kept, type) else kept
        owner.flag = 1
        if fails[0]:
            fails[0] = 0
            raise torch.OutOfMemoryError("no memory")
        found = x * 2
        owner.flag = 0
        return found

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(5):
        fails[0] = index == 3
        assert torch.equal(graphed(torch.ones(2)), torch.full((2,), 2.0))
        assert begins[0] == kept.flag == Kept.flag == 0
    assert "flag" not in vars(Derived) and len(graphed.report().refusals) == 1


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(CpuDevice, "give_back", KeyboardInterrupt), (CpuGraph, "replay", torch.OutOfMemoryError)],
)
def test_call_that_fails_before_its_launch_keeps_no_results(
    owner: type, name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients add up."""

    def fail(*arguments: Any) -> None:
        raise error

    def program(graph: Graph) -> Iterator[Any]:
        model: Any = network("cpu")

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        def kept() -> list[Any]:
            return [parameter.grad for parameter in model.parameters()]

        call = graph(step)
        for index, batch in enumerate(batches("cpu")):
            if index == 3 and isinstance(call, GraphedStep):
                before = kept()
                with monkeypatch.context() as patched, pytest.raises(error):
                    patched.setattr(owner, name, fail)
                    call(*batch)
                assert all(now is then for now, then in zip(kept(), before, strict=True))
                del before
            yield call(*batch)
            yield from (parameter.grad for parameter in model.parameters())

    assert assert_as_eager(program).replays == CALLS - 3


@pytest.mark.parametrize("closes", [True, False])
def test_interrupted_step_releases_its_lock(closes: bool) -> None:
    """A lock that stayed locked would let all later calls run uncaptured and `reset` wait forever."""
    graphed = GraphedStep(lambda x: x * 2, device=CpuDevice())
    x = torch.ones(3)
    for _ in range(5):
        graphed(x)
    moments = 0
    for number in itertools.count():
        with contextlib.suppress(KeyboardInterrupt), interrupted_after(number, "step/graphed_step.py") as where:
            graphed(x)
        if not where:
            break
        moments += 1
        replays = graphed.report().replays
        assert torch.equal(graphed(x), x * 2) and graphed.report().replays == replays + 1, where
    assert moments >= 2
    (graphed.close if closes else graphed.reset)()


def test_calls_in_other_threads_do_not_refuse_the_step() -> None:
    made = Counted()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seeding = threading.Thread(target=torch.manual_seed, args=(1,))
        seeding.start()
        seeding.join()
        return made.train(batch)

    graphed = GraphedStep(step, device=CpuDevice())
    for batch in batches("cpu"):
        graphed(*batch)
    assert graphed.report().refusals == ()
    assert graphed.report().replays == 6


def test_gradients_before_a_recording_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, device = Counted(), CpuDevice()
    step = GraphedStep(made.step, device=device)
    alive: list[bool] = []
    storages: list[Any] = []

    def give_back() -> None:
        alive.extend(storage() is not None and storage().nbytes() > 0 for storage in storages)

    monkeypatch.setattr(device, "give_back", give_back)
    calls = batches("cpu")
    for batch in calls[:3]:
        step(*batch)
    storages += [weakref.ref(parameter.grad.untyped_storage()) for parameter in made.model.parameters()]
    step(*calls[3])
    gc.collect()
    assert step.report().replays == 1
    assert all(storage() is None for storage in storages)
    assert alive == [False] * len(storages), "after the capture"


def test_step_without_a_gpu_runs_uncaptured_with_a_warning() -> None:
    step = graph_step(trained(network("cpu")))
    with pytest.warns(UserWarning, match="works on no tensor of a GPU"):
        step(*batches("cpu")[0])


def test_gpu_of_a_step_is_that_of_its_batch() -> None:
    """What the step reaches may be on another GPU in this call alone. A capture there would hold no kernels."""
    with FakeTensorMode():
        batch, reached = torch.empty(2, device="cuda:1"), torch.empty(2, device="cuda:0")
    recorder = CallRecorder(lambda batch: batch, None, StepOptions())
    assert recorder._find_device([batch, reached]) is None
    assert recorder.device is not None and recorder.device.index == 1


def test_unknown_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs uncaptured; `graph_callables`, which captures at once, raises."""
    monkeypatch.setattr(torch_internals, "SUPPORTED", ("1.0", "2.0"))
    reference, made = Counted(), Counted()
    step = GraphedStep(made.step, device=CpuDevice())
    expected = rf"PyTorch {re.escape(torch.__version__)} is not supported: Encore knows PyTorch 1\.0 up to"
    with pytest.warns(UserWarning, match=expected):
        for batch in batches("cpu")[:3]:
            assert torch.equal(step(*batch), reference.step(*batch))
    assert step.report().recordings == () and step.report().calls == 3
    with pytest.raises(torch_internals.UnsupportedTorch, match=expected):
        graph_callables(nn.Linear(2, 2), (torch.ones(1, 2),))


def test_step_made_by_a_library_is_watched() -> None:
    """Its code is not read, but the variables around it are known."""
    source = (
        "def make_step(model, optimizer, loss_of, settings):\n"
        "    def train(batch):\n"
        "        optimizer.zero_grad()\n"
        "        loss = loss_of(model, batch) * settings['scale']\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        return loss\n"
        "    return train\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, "/somewhere/lib/python3/site-packages/trainers/__init__.py", "exec"), scope)  # noqa: S102

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        model, settings = network("cpu"), {"scale": 1.0}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = graph(scope["make_step"](model, optimizer, loss_of, settings))
        for index, batch in enumerate(batches("cpu", 12)):
            if index == 5:
                settings["scale"] = 2.0
                optimizer.param_groups[0]["lr"] = 0.01
            yield step(*batch)

    report = assert_as_eager(program)
    assert report.refusals == () and len(report.recordings) == 2


def test_step_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a function, not int"):
        GraphedStep(3)  # type: ignore[arg-type]


def yields(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield batch * 2


async def is_awaited(batch: torch.Tensor) -> torch.Tensor:
    return batch * 2


@pytest.mark.filterwarnings("ignore:.*without a CUDA graph")
@pytest.mark.parametrize("later", [yields, is_awaited])
def test_deferred_work_is_refused_for_its_result(later: Any) -> None:
    step = GraphedStep(later, device=CpuDevice())
    (result, *others) = [step(torch.ones(2)) for _ in range(8)]
    found = list(result) if later is yields else [asyncio.run(result)]
    assert torch.equal(found[0], torch.full((2,), 2.0)) and step.report().replays == 0
    for one in others:
        one.close()
    assert "returns something else than a tensor" in step.report().refusals[0].reason
    with pytest.raises(StepRefused, match=r"callable 1 returns a (generator|coroutine)"):
        GraphedCallables([later], [(torch.ones(2),)], device=CpuDevice())


@pytest.mark.parametrize("name", ["reset", "close"])
def test_running_step_cannot_free_its_own_graphs(name: str) -> None:
    held: dict[str, Any] = {}

    def step(batch: dict[str, torch.Tensor]) -> None:
        getattr(held["step"], name)()

    held["step"] = GraphedStep(step, device=CpuDevice())
    with pytest.raises(RuntimeError, match=rf"{name}\(\) was called while .* runs; call it after the step"):
        held["step"](*batches("cpu", 1)[0])
    getattr(held["step"], name)()


def test_cast_kept_from_an_earlier_call_is_refused() -> None:
    """Autocast casts the weights in the first call of a region and keeps that, whatever the optimizer writes."""

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        model = network("cpu")
        step = graph(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("ignore")
            yield from (step(*batch) for batch in batches("cpu", 9))

    report = assert_as_eager(program)
    assert any("as autocast keeps it" in one.reason for one in report.refusals) and not report.replays
