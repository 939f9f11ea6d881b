"""Histories that nobody needs are let go of wherever a model is, and none that somebody needs."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import optimizations
from optimizations import torch_internals
from optimizations.calls import bound
from optimizations.trees import manager, reasons
from optimizations.trees.containers import managers, thread_containers
from tests.optimizations.trees.test_parameters import Net, values


class Sees(TorchFunctionMode):
    """Keeps what it sees of the program's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.seen.append(function)
        return function(*arguments, **(keywords or {}))


class SeesOperators(TorchDispatchMode):
    """The same for operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.seen.append(function)
        return function(*arguments, **(keywords or {}))


meanwhile: list[Callable[[], object]] = []
"""What `runs_something` runs, once."""


@torch.library.custom_op("histories::runs_something", mutates_args=())
def runs_something(x: torch.Tensor) -> torch.Tensor:
    """An operator of the program's own."""
    if meanwhile:
        meanwhile.pop()()
    return x.clone()


@runs_something.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


runs_something.register_autograd(lambda context, gradient: gradient)


class Program:
    """A model whose result was let go of before its backward, and another model, to let go of.

    Attributes:
        failed: what Python could not raise where it happened.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", self.failed.append)
        self.net = Net()
        self.model = torch.compile(self.net, backend="encore")
        self.others = [dropped_later()]
        for step in range(5):
            self.call(values(step))
        assert histories() == 1

    def call(self, x: torch.Tensor) -> torch.Tensor:
        """The model's result in an iteration of its own."""
        torch.compiler.cudagraph_mark_step_begin()
        result: torch.Tensor = self.model(x)
        return result

    def drop(self, *_: Any) -> None:
        """Let go of the other model."""
        self.others.pop()


def dropped_later() -> nn.Module:
    model = Net()
    compiled = torch.compile(model, backend="encore")
    with torch.no_grad():
        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(values(step))
    return model


def histories() -> int:
    """Results of recordings that refer to a backward."""
    return sum(
        one is not None and one.grad_fn is not None
        for manager in managers()
        for node in manager.nodes()
        for one in node.cached_tensor_outputs
    )


def plainly(program: Program) -> None:
    program.drop()


def without_gradients(program: Program) -> None:
    with torch.no_grad():
        program.drop()


def in_inference_mode(program: Program) -> None:
    with torch.inference_mode():
        program.drop()


def in_an_operator(program: Program) -> None:
    meanwhile.append(program.drop)
    runs_something(torch.ones(1, requires_grad=True))


def in_a_gradient(program: Program) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        program.drop()
        return x.sum()

    torch.func.grad(function)(torch.ones(2))


def in_a_nested_transform(program: Program) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        program.drop()
        return x.sum()

    found = torch.func.vmap(torch.func.grad(function))(torch.ones(2, 2))
    assert torch.equal(found, torch.ones(2, 2))


def in_a_mode(program: Program) -> None:
    with Sees() as mode:
        program.drop()
    assert mode.seen == []


def in_a_dispatch_mode(program: Program) -> None:
    with SeesOperators() as mode:
        program.drop()
    assert mode.seen == []


def in_a_fake_mode(program: Program) -> None:
    with torch_internals.FakeTensorMode():
        program.drop()


def between_graphs(program: Program) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        program.drop()
        return y * 2

    torch.compile(function, backend="encore")(torch.ones(2))


def in_a_backward(program: Program) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(program.drop)
    y.sum().backward()


def in_a_saved_tensor_hook(program: Program) -> None:
    def pack(x: torch.Tensor) -> torch.Tensor:
        program.drop()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.ones(2, requires_grad=True).sin()


def as_a_saved_tensor_is_read(program: Program) -> None:
    def unpack(x: torch.Tensor) -> torch.Tensor:
        program.drop()
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        y = torch.ones(2, requires_grad=True).sin()
    y.sum().backward()


def in_a_function(program: Program) -> None:
    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            program.drop()
            return x.clone()

    Drops.apply(torch.ones(2, requires_grad=True))


def in_the_backward_of_a_function(program: Program) -> None:
    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            program.drop()
            return gradient

    Drops.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_a_thread(program: Program) -> None:
    thread = threading.Thread(target=program.drop)
    thread.start()
    thread.join()


def in_a_finalizer(program: Program) -> None:
    class Finalized:
        def __del__(self) -> None:
            program.drop()

    del Finalized().__dict__


def by_a_collection(program: Program) -> None:
    cycle: list[Any] = [program.others.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()


PLACES = [
    plainly,
    without_gradients,
    in_inference_mode,
    in_an_operator,
    in_a_gradient,
    in_a_nested_transform,
    in_a_mode,
    in_a_dispatch_mode,
    in_a_fake_mode,
    between_graphs,
    in_a_backward,
    in_a_saved_tensor_hook,
    as_a_saved_tensor_is_read,
    in_a_function,
    in_the_backward_of_a_function,
    in_a_thread,
    in_a_finalizer,
    by_a_collection,
]


@pytest.mark.parametrize("place", PLACES)
def test_unneeded_history_goes_with_its_model(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch, place: Callable[[Program], None]
) -> None:
    program = Program(monkeypatch)
    place(program)
    assert program.others == program.failed == []
    assert histories() == 0


@pytest.mark.parametrize("place", PLACES)
def test_the_history_of_a_result_that_somebody_holds_stays(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch, place: Callable[[Program], None]
) -> None:
    program = Program(monkeypatch)
    x, other = values(7).requires_grad_(), values(7).requires_grad_()
    result = program.call(x)
    part = result[1:]
    del result
    place(program)
    assert program.others == program.failed == []
    part.square().sum().backward()
    Net()(other)[1:].square().sum().backward()
    assert torch.equal(x.grad, other.grad)


@contextmanager
def before_line(number: int, action: Callable[[], object], *files: str) -> Iterator[list[str]]:
    """Does something before the number-th line of these files that is run; yields where that was."""
    where: list[str] = []
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if where or not any(file in frame.f_code.co_filename for file in files):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                sys.settrace(None)
                action()
                return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(before)


def model_gone() -> None:
    """What is done when a model is let go of."""
    for callback in bound._when_gone:
        callback()


def found_held() -> int:
    """Calls that went another way because somebody holds a result."""
    reports = optimizations.report()
    held = sum(one.calls for report in reports for one in report.full_ways if one.reason == reasons.RESULTS_HELD)
    return held + sum(one.calls for report in reports for one in report.uncaptured)


@pytest.mark.parametrize("lean", [True, False])
def test_model_freed_at_any_line_of_a_call_changes_nothing(compiled_on_cpu: CompiledOnCpu, lean: bool) -> None:
    files = ("optimizations/trees", "optimizations/calls", "inductor/cudagraph_trees.py")
    net, twin = Net(), Net()
    model = torch.compile(net, backend="encore", options={"lean": lean})
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        model(values(step))
    before, line, where = found_held(), 0, ["nowhere yet"]
    while where:
        torch.compiler.cudagraph_mark_step_begin()
        model(values(line))  # let go of: a history that nobody needs
        torch.compiler.cudagraph_mark_step_begin()
        x, other = values(line + 1).requires_grad_(), values(line + 1).requires_grad_()
        with before_line(line, model_gone, *files) as where:
            result = model(x)
        result.sum().backward()
        del result
        twin(other).sum().backward()
        assert torch.equal(x.grad, other.grad), where
        del x  # its gradient is a result, too
        assert found_held() == before, where
        line += 1
    assert line > 100


class Runs(nn.Module):
    """Runs something of the program's own in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return runs_something(x * self.first) * self.second


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("call", range(5))
def test_model_freed_during_a_call_takes_histories_at_its_end(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch, call: int, in_thread: bool
) -> None:
    """In a warm-up, a capture and replays."""
    program = Program(monkeypatch)
    runs = torch.compile(Runs(), backend="encore")
    inside: list[bool] = []
    forget = manager.EncoreManager.forget_all_histories

    def forgets(manager: manager.EncoreManager) -> None:
        inside.append(compiled_on_cpu.cuda.capturing is not None or running)
        forget(manager)

    def goes() -> None:
        nonlocal running
        running = True
        (in_a_thread if in_thread else plainly)(program)
        running = False

    running = False
    monkeypatch.setattr(manager.EncoreManager, "forget_all_histories", forgets)
    for _ in range(call):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            runs(values(1))
    program.call(values(3))
    meanwhile.append(goes)
    torch.compiler.cudagraph_mark_step_begin()
    with torch.no_grad():
        assert torch.equal(runs(values(2)), values(2))
    assert program.others == program.failed == []
    assert inside and not any(inside)
    assert histories() == 0


def test_objects_held_by_a_freed_model_are_checked_next_call(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    model = torch.compile(nn.Linear(4, 4), backend="encore")  # saves nothing in the pool
    gone, kept = dropped_later(), dropped_later()
    together: list[Any] = []
    for step in range(6):
        together.clear()
        torch.compiler.cudagraph_mark_step_begin()
        together.append(model(values(step)))
    together += [gone, together]
    del together, gone
    gc.collect()
    assert histories() == 1
    looked: list[Any] = []
    forget = manager.EncoreManager.forget_all_histories
    monkeypatch.setattr(manager.EncoreManager, "forget_all_histories", lambda one: (looked.append(one), forget(one)))
    for step in range(2):
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            torch.compile(kept, backend="encore")(values(step))
        assert histories() == 0
        assert len(looked) == 1
    assert failed == []


@pytest.mark.parametrize("lean", [True, False])
def test_a_result_is_not_held_by_its_history_in_inference_mode(compiled_on_cpu: CompiledOnCpu, lean: bool) -> None:
    model, evaluated = (torch.compile(net, backend="encore", options={"lean": lean}) for net in (Net(), Runs()))
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        model(values(step))
        with torch.inference_mode():
            torch.compiler.cudagraph_mark_step_begin()
            evaluated(values(step))
    uncaptured = [one.reason for report in optimizations.report() for one in report.uncaptured]
    assert uncaptured == []


def test_a_finalizer_may_end_all_graphs(compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = False

    class Ends:
        def __del__(self) -> None:
            if ending:
                optimizations.reset()

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.ends = Ends()
            return x.clone()

    program = Program(monkeypatch)
    for step in range(4):
        program.call(Keeps.apply(values(step).requires_grad_()))
    assert histories() == 1
    ending = True
    program.drop()
    assert program.failed == []
    assert managers() == []
    assert torch.equal(program.call(values(4)), Net()(values(4)))


def test_managers_are_listed_while_threads_begin() -> None:
    own, begun = thread_containers(), []

    def begins() -> None:
        thread = threading.Thread(target=lambda: begun.append(thread_containers()))
        thread.start()
        thread.join()

    for line in range(20):
        with before_line(line, begins, "trees/containers.py", "weakrefset.py"):
            managers()
        assert own not in begun
        assert line > 1 or begun
        begun.clear()
