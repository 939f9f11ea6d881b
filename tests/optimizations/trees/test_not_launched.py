"""Calls whose recording cannot be replayed run without it and raise no error."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from binding_programs import WeightedSine
from interrupts import interrupted_after
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.driver import fails
from simulated_gpu.runtime import CudaOnCpu, FakeGraph
from simulated_gpu.trees import Compiled, Model, Training, check, nodes, values

from optimizations import torch_internals
from optimizations.graph.editing import EditableGraph
from optimizations.graph.plan import Choice
from optimizations.in_place.session import Session
from optimizations.trees.manager import EncoreManager
from optimizations.trees.reasons import INSIDE_CAPTURE, NotLaunched


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_unchanged_addresses_disable_indirection(cuda_on_cpu: CudaOnCpu, which: int, lean: bool) -> None:
    """Two functions, of which the second reads the first one's result in graph memory and another input in place."""
    functions = [Compiled(Model(cuda_on_cpu), lean=lean) for _ in range(2)]
    w = values(7)

    def step(number: int, *failing: str) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        made, expected = values(number), values(number)
        for index, compiled in enumerate(functions):
            y = values(number + index)
            with fails(cuda_on_cpu.driver, *(failing if index == which else ())):
                (made,) = compiled.function([made, y, w])
            expected = 2 * expected + y * w
            assert torch.equal(made, expected), number

    def in_place(compiled: Compiled) -> bool:
        return any(one.indirect for one in compiled.reports[-1].inputs)

    for number in range(10):
        step(number)
    assert all(map(in_place, functions))
    step(10, "cuGraphExecKernelNodeSetParams")
    for number in range(11, 20):
        step(number, "cuGraphExecKernelNodeSetParams")
    captures = cuda_on_cpu.captures
    for number in range(20, 30):
        step(number)
    assert cuda_on_cpu.captures == captures, "what was recorded again serves"
    report = functions[which].reports[-1]
    assert report.replays >= 10 and report.off is not None
    assert "an address in its graph could not be changed: CudaCallFailed: cuGraphExecKernelNodeSetP" in report.off
    assert [in_place(compiled) for compiled in functions] == [index != which for index in range(2)]
    assert functions[which].uncaptured() == {report.off: 1}


def after_an_end_while_the_graph_is_changed(cuda_on_cpu: CudaOnCpu, lean: bool, ended: list[str]) -> Compiled:
    """A program that continues after `ended` interrupts a call has correct results, and copies its inputs."""
    compiled, w, kept = Compiled(Model(cuda_on_cpu), Choice.PRELUDE, lean=lean), values(7), []
    raised = 0
    for number in range(30):
        kept.append((values(number), values(-3 * number)))
        try:
            compiled.checked(*kept[-1], w)
        except KeyboardInterrupt:
            raised += 1
    assert raised == ended.count("interrupt") and ended
    assert not any(one.indirect for one in compiled.reports[-1].inputs)
    return compiled


@pytest.mark.parametrize("lean", [True, False])
def test_nodes_added_before_an_interrupt_are_not_added_again(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, lean: bool
) -> None:
    ended: list[str] = []
    begin_with, graphs = EditableGraph.begin_with, []

    def interrupted(self: EditableGraph, added: Any) -> None:
        graphs.append(self)
        if len(graphs) > 1:
            raise RuntimeError("what was added before would write to memory that is free")
        begin_with(self, added)
        ended.append("interrupt")
        raise KeyboardInterrupt

    monkeypatch.setattr(EditableGraph, "begin_with", interrupted)
    after_an_end_while_the_graph_is_changed(cuda_on_cpu, lean, ended)
    assert (len(graphs), len(ended)) == (1, 1)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("ends", [["interrupt"], ["out of memory"], ["out of memory", "interrupt"]])
def test_partially_updated_graph_is_not_launched(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, lean: bool, ends: list[str]
) -> None:
    """With both, memory is short while the graph is instantiated again, its recording is given up, and the program is
    interrupted before that call finds the recording of no use."""
    ended: list[str] = []
    instantiate, give_up = FakeGraph.instantiate, Session._give_up

    def fail(self: FakeGraph) -> None:
        again = self.executable is not None and not ended
        if self.executable is not None:
            self.executable = None  # PyTorch lets go of the one there was first
        if again and ends[0] == "out of memory":
            ended.append("out of memory")
            raise torch.OutOfMemoryError("for this test")
        instantiate(self)
        if again:
            ended.append("interrupt")
            raise KeyboardInterrupt

    def interrupted(self: Session, reason: str) -> None:
        give_up(self, reason)
        if ended != ends:
            ended.append("interrupt")
            raise KeyboardInterrupt

    monkeypatch.setattr(FakeGraph, "instantiate", fail)
    monkeypatch.setattr(Session, "_give_up", interrupted)
    compiled = after_an_end_while_the_graph_is_changed(cuda_on_cpu, lean, ended)
    assert ended == ends
    assert len(compiled.functions) == len(nodes()) == 1


def test_postponed_work_does_not_wait_for_the_next_recording(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program references a result that the graph to be recorded would overwrite."""
    compiled, other = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu))
    weights = [values(7), values(8), values(9)]
    check(compiled, weights[0])
    followed = EncoreManager._not_recorded_again

    def held(manager: EncoreManager, inputs: list[Any], function_id: Any) -> Any:
        if manager.current_node is not None:
            raise NotLaunched(manager.current_node, "held")
        return followed(manager, inputs, function_id)

    for _ in range(2):
        (kept,) = other.checked(values(1), values(2), weights[0])
        monkeypatch.setattr(EncoreManager, "_not_recorded_again", held)
        compiled.checked(values(3), values(4), weights[1], mark=False)
        monkeypatch.setattr(EncoreManager, "_not_recorded_again", followed)
        del kept
    check(compiled, weights[2])
    check(other, weights[1])


@pytest.mark.parametrize("lean", [True, False])
def test_functions_run_without_graphs_in_the_programs_capture(cuda_on_cpu: CudaOnCpu, lean: bool) -> None:
    """Run a forward and its backward on the program's capturing stream, before, between and after replays."""
    forward, backward = Model(cuda_on_cpu), Model(cuda_on_cpu)
    training = Training(forward, backward, lean=lean)
    step = training.step

    def capture(number: int) -> tuple[int, int]:
        before = cuda_on_cpu.replays + cuda_on_cpu.captures, len(forward.runs) + len(backward.runs)
        stream, cuda_on_cpu.stream, cuda_on_cpu.inside_capture = cuda_on_cpu.stream, 5, True
        for _ in range(2):
            step(number)
        cuda_on_cpu.stream, cuda_on_cpu.inside_capture = stream, False
        after = cuda_on_cpu.replays + cuda_on_cpu.captures, len(forward.runs) + len(backward.runs)
        return after[0] - before[0], after[1] - before[1]

    for number in range(4):
        assert capture(100 + number) == (0, 4), "each function runs as it is"
        step(number)
    for number in range(8):
        step(number)
    waits = list(cuda_on_cpu.waits)
    replays, runs = cuda_on_cpu.replays, len(forward.runs)
    assert capture(200) == (0, 4)
    cuda_on_cpu.stream = 9
    step(9)
    assert cuda_on_cpu.waits == [*waits, 1], "the stream of the calls before the capture"
    cuda_on_cpu.stream = 1
    for number in range(10, 14):
        step(number)
    assert (cuda_on_cpu.replays - replays, len(forward.runs) - runs) == (10, 2)
    assert training.forward.uncaptured()[INSIDE_CAPTURE] == 10


FILES = (
    *("/fast_path.py", "/liveness.py", "/results.py", "/manager.py", "/node.py", "/trained.py", "/grad_mode.py"),
    *("/shortcut.py", "/pyfunctorch.py", "/contextlib.py"),
)
"""Files that a call with gradients passes through, from the function to the launch."""


def settings() -> tuple[object, ...]:
    """Return this thread's settings for autograd recording and dispatch modes."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch_internals.is_view_replay_enabled(),
        torch_internals.len_torch_dispatch_stack(),
    )


def gradient(program: WeightedSine, call: Any, x: torch.Tensor) -> torch.Tensor:
    program.zero_grad()
    call(x).square().sum().backward()
    assert program.weight.grad is not None
    return program.weight.grad


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_interrupted_call_restores_settings(compiled_on_cpu: CompiledOnCpu, marks: bool, backward: bool) -> None:
    """A guard that restores a mode when the traceback is freed would set a wrong one."""
    program, eager = WeightedSine(), WeightedSine()
    call = torch.compile(program, backend="encore")
    places = 0
    for number in range(-10, 1000):
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        x = torch.full((2, 4), float(number))
        where: list[str] = []
        before = settings()
        if number >= 0:
            with contextlib.suppress(KeyboardInterrupt), interrupted_after(number, *FILES) as where:
                result = call(x)
                if backward:
                    result.sum().backward()
            assert settings() == before, where
        for factor in (1, 2):
            torch.testing.assert_close(gradient(program, call, factor * x), gradient(eager, eager, factor * x))
        if number >= 0 and not where:
            break
        places += number >= 0
    assert places > 10
    assert compiled_on_cpu.cuda.replays
