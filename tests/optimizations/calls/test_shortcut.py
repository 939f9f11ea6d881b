"""A call skips PyTorch's wrappers, with each reason to take the slow path. Inductor compiles for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import interrupted_after
from torch import nn

import optimizations
from optimizations import torch_internals
from optimizations.calls.shortcut import FULL_CALLS
from optimizations.torch_internals import wrappers
from tests.optimizations.trees.test_new_results import SeesOperators

X = torch.arange(8.0).reshape(2, 4)


pytestmark = [
    pytest.mark.usefixtures("fresh_encore"),
    pytest.mark.skipif(torch_internals.version() > (2, 11), reason="on newer PyTorch all wrappers are called"),
]


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, x + 1


class SlowCalls:
    """Counts the calls that reach Inductor's functions through all wrappers, and those that reach them at all.

    `modes` are the grad mode, view replay and autocast inside of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = self.all = 0
        self.modes: list[tuple[bool, ...]] = []
        owner = torch_internals.CompiledFxGraph
        stock_call, stock_post = owner.__call__, owner.post_compile

        def call(graph: Any, inputs: Any) -> Any:
            self.full += 1
            return stock_call(graph, inputs)

        def post_compile(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            result = stock_post(graph, *arguments, **keywords)
            inner = graph.current_callable

            def counted(inputs: Any) -> Any:
                self.all += 1
                autocast = torch.is_autocast_enabled("cpu")
                self.modes.append((torch.is_grad_enabled(), torch_internals.is_view_replay_enabled(), autocast))
                return inner(inputs)

            graph.current_callable = counted
            return result

        monkeypatch.setattr(owner, "__call__", call)
        monkeypatch.setattr(owner, "post_compile", post_compile)

    def of(self, call: Callable[[], Any], times: int = 3, graphs: int = 1) -> list[bool]:
        """Return for each of several calls whether it took the slow path; each reaches so many of Inductor's graphs."""
        ways = []
        for _ in range(times):
            full, reached = self.full, self.all
            call()
            assert self.all == reached + graphs
            ways.append(self.full > full)
        return ways


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> SlowCalls:
    return SlowCalls(monkeypatch)


def settled(way: SlowCalls, program: Any, x: torch.Tensor = X, **options: Any) -> Callable[[], Any]:
    """A compiled program that has taken the slow path as often as it must."""
    compiled = torch.compile(program, backend="encore", fullgraph=True, options=options or None)
    assert way.of(lambda: compiled(x), FULL_CALLS) == [True] * FULL_CALLS
    return lambda: compiled(x)


def settled_step(way: SlowCalls, trained: bool) -> tuple[Program, Callable[..., Any], Callable[[], Any]]:
    """Return a program, its compiled call, and a call of it with a backward if it is trained, on the fast path."""
    program = Program().requires_grad_(trained)
    run = torch.compile(program, backend="encore", fullgraph=True)

    def step() -> None:
        out, _ = run(X)
        if trained:
            out.sum().backward()

    for _ in range(FULL_CALLS + 1):
        step()
    assert way.of(step, graphs=1 + trained) == [False] * 3
    return program, run, step


def kept() -> str | None:
    (report,) = optimizations.report()
    assert report.shortcut is not None
    return report.shortcut.kept


def test_wrappers_of_other_pytorch_versions_are_all_called(way: SlowCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "KNOWN_VERSION", (2, 10))
    with torch.no_grad():
        assert way.of(settled(way, Program())) == [True] * 3
    assert kept() == f"the wrappers of PyTorch {torch.__version__} are not known"


# Graphs that have a shortcut


def test_lean_off_takes_the_slow_path(way: SlowCalls) -> None:
    with torch.no_grad():
        assert way.of(settled(way, Program(), lean=False)) == [True] * 3
    assert optimizations.report()[0].shortcut is None


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_interrupt_restores_all_modes(way: SlowCalls, grad: bool, trained: bool) -> None:
    with torch.set_grad_enabled(grad):
        program, run, _ = settled_step(way, trained and grad)
        places = 0
        for number in range(100):
            with interrupted_after(number, "calls/trained.py", "calls/shortcut.py") as where:
                try:
                    run(X)
                except KeyboardInterrupt:
                    assert where
            assert (torch.is_grad_enabled(), torch_internals.is_view_replay_enabled()) == (grad, False), where
            if not where:
                break
            places += 1
        assert places >= (2 if grad else 1)
        torch.testing.assert_close(run(X), program(X))


@pytest.mark.parametrize("trained", [True, False])
def test_modes_inside_equal_those_of_the_slow_path(way: SlowCalls, trained: bool) -> None:
    """Gradients are enabled around a trained function even if the caller disabled them; views are tracked, autocast is
    off."""
    seen = {}
    for lean in (True, False):
        torch_internals.reset_dynamo()
        optimizations.reset()
        way.modes.clear()
        program = Program().requires_grad_(trained)

        def inside(x: torch.Tensor, program: nn.Module = program) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                out: tuple[torch.Tensor, torch.Tensor] = program(x)
                return out

        run = torch.compile(inside, backend="encore", fullgraph=True, options={"lean": lean})
        after = []
        for _ in range(FULL_CALLS + 2):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                out, _ = run(X)
                after.append((torch.is_grad_enabled(), torch_internals.is_view_replay_enabled(), out.requires_grad))
        seen[lean] = list(way.modes), after
    assert seen[True] == seen[False]
    assert seen[True][1][-1] == (False, False, trained)


# Conditions that send a call to the slow path


@pytest.mark.parametrize("trained", [True, False])
def test_profiler_and_debugger_calls_go_through_all_layers(
    way: SlowCalls, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    *_, step = settled_step(way, trained)
    with torch.profiler.profile() as profile:
        assert way.of(step, 1, 1 + trained) == [True]
    names = [event.name for event in profile.events()]
    assert sum("AOTDispatcher Runtime Wrapper Prologue" in name for name in names) == 1
    assert sum("Call CompiledFxGraph" in name for name in names) == 1 + trained
    full = way.full
    with monkeypatch.context() as patch:
        patch.setattr(torch_internals.inductor_debug, "RECORD_GRAPH_EXECUTION", True)
        step()
    assert way.full == full + 1 + trained
    assert way.of(step, 1, 1 + trained) == [False]


def test_dispatch_modes_observe_the_same_as_on_the_slow_path(way: SlowCalls) -> None:
    """No wrapper checks dispatch modes; they observe Inductor's function on both paths."""

    seen = []
    program = Program()
    for lean in (True, False):
        torch_internals.reset_dynamo()
        with torch.no_grad():
            call = settled(way, program, lean=lean)
            with SeesOperators() as sees:
                call()
        seen.append(list(map(str, sees.seen)))
    assert seen[0] == seen[1]


# Graphs that write their inputs


class Cached(nn.Module):
    """Writes a buffer and an argument, and reads another argument between them."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x)
        y.mul_(2)
        return self.cache * y


@pytest.mark.parametrize("grad", [False, True])
def test_graph_that_writes_inputs_skips_wrappers_with_versions(way: SlowCalls, grad: bool) -> None:
    program, twin = Cached(), Cached()
    compiled = torch.compile(program, backend="encore", fullgraph=True)
    x, (y, other) = X.clone(), (torch.ones(2, 4) for _ in range(2))
    with torch.set_grad_enabled(grad):
        for step in range(FULL_CALLS + 4):
            before = [tensor._version for tensor in (program.cache, x, y)]
            (full,) = way.of(lambda: compiled(x, y), 1)
            assert full is (step < FULL_CALLS)
            assert [tensor._version for tensor in (program.cache, x, y)] == [before[0] + 1, before[1], before[2] + 1]
            twin(x, other)
            assert torch.equal(program.cache, twin.cache), step
            assert torch.equal(y, other), step
    assert kept() is None


@torch.inference_mode()
def test_inputs_without_version_counters_may_be_written(way: SlowCalls) -> None:
    program = Cached()
    compiled = torch.compile(program, backend="encore", fullgraph=True)
    for step in range(FULL_CALLS + 2):
        y = torch.full((2, 4), 1.0 + step)
        assert way.of(lambda y=y: compiled(X, y), 1) == [step < FULL_CALLS]
        assert torch.equal(y, torch.full((2, 4), 2.0 + 2 * step))
    assert torch.equal(program.cache, (FULL_CALLS + 2) * X)


# Graphs that need the wrappers


# Trained graphs, whose autograd functions call the graphs directly


class Normalized(nn.Module):
    """Writes its running statistics in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(x)
        return normalized * 2


def trained(program: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """The output of a step, its gradients, and the buffers after it."""
    program.zero_grad()
    out = call(x)
    out.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in program.parameters() if parameter.grad is not None]
    return [out.detach().clone(), *gradients, *(buffer.clone() for buffer in program.buffers())]


def test_backward_after_many_forwards_has_eagers_gradients(way: SlowCalls) -> None:
    """The backward is compiled when forwards take the shortcut already."""
    program, eager = Normalized(), Normalized()
    with torch_internals.fresh_cache():  # a backward from a cache is there from the beginning
        run = torch.compile(program, backend="encore", fullgraph=True)
        for _ in range(FULL_CALLS + 1):
            run(X), eager(X)
        full = way.full
        for index in range(FULL_CALLS + 1):
            found, expected = trained(program, run, X + index), trained(eager, eager, X + index)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)
    assert way.full == full + 1, "the first backward; the forward after it finds it compiled"
    assert kept() is None


def test_versions_written_in_training_equal_the_slow_path() -> None:
    counted = {}
    for lean in (True, False):
        torch_internals.reset_dynamo()
        program = Normalized()
        run = torch.compile(program, backend="encore", fullgraph=True, options={"lean": lean})
        versions = []
        for _ in range(FULL_CALLS + 3):
            trained(program, run, X)
            versions.append([buffer._version for buffer in program.buffers()])
        counted[lean] = versions
    assert counted[True] == counted[False]
