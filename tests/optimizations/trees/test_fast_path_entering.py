"""Fast calls prepare for other threads and streams, captures, and calls inside other functions."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, nodes, values
from threads import in_threads

from optimizations.calls import turns
from optimizations.trees import hook, reasons, streams
from tests.optimizations.trees.test_fast_path import W, call, on_fast_path, slow_calls, training_of
from tests.optimizations.trees.test_outliving_results import Outer

__all__ = ["slow_calls"]


def test_first_fast_call_of_a_thread_sets_the_context(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Driver calls fail in a thread without a context."""
    compiled = on_fast_path(cuda_on_cpu, slow_calls)
    made: list[int] = []
    entered: list[int] = []
    enter = streams.CallStreams.enter

    def counted(self: Any, is_backward: bool, node: Any) -> None:
        entered.append(threading.get_ident())
        enter(self, is_backward, node)

    monkeypatch.setattr(streams, "make_context_current", lambda device: made.append(threading.get_ident()))
    monkeypatch.setattr(streams.CallStreams, "enter", counted)

    def serve() -> None:
        for start in range(3):
            call(compiled, W, start)

    threads = in_threads(serve)
    assert made == entered == threads
    assert slow_calls == []


def test_autograd_thread_is_a_known_caller(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """Autograd's threads do not count as callers. If several threads call, nothing is captured again in between."""
    training = training_of(cuda_on_cpu)
    slow_calls.clear()
    callers: list[int] = []

    def backward_then_step() -> None:
        saved = training.forward.functions[0].callers
        (gradient,) = training.backward.function([values(3), forward.pop(), training.w])
        assert torch.equal(gradient, 2 * values(3) + (2 * values(1) + values(2) * W) * W)
        del gradient
        callers.append(len(saved))
        training.step(5)
        callers.append(len(saved))

    torch.compiler.cudagraph_mark_step_begin()
    forward = training.forward.function([values(1), values(2), training.w])
    in_threads(backward_then_step)
    assert slow_calls == []
    assert callers == [1, 2]


def test_fast_call_on_another_stream_waits_for_the_previous(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """Both calls use the same memory."""
    compiled = on_fast_path(cuda_on_cpu, slow_calls)
    for stream, waits in ((1, []), (2, [1]), (2, [1]), (3, [1, 2])):
        cuda_on_cpu.stream = stream
        call(compiled)
        assert cuda_on_cpu.waits == waits
    assert slow_calls == []


@pytest.mark.parametrize("thread", ["this", "another"])
@pytest.mark.parametrize("same_stream", [True, False])
def test_fast_path_runs_no_graph_inside_a_capture(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], thread: str, same_stream: bool
) -> None:
    """A graph cannot be launched there. `same_stream`: the program captures on the stream of the calls before."""
    compiled = on_fast_path(cuda_on_cpu, slow_calls)
    replays = cuda_on_cpu.replays
    stream = cuda_on_cpu.stream
    cuda_on_cpu.stream, cuda_on_cpu.inside_capture = stream if same_stream else 5, True
    if thread == "this":
        call(compiled)
    else:
        in_threads(lambda: call(compiled))
    assert cuda_on_cpu.replays == replays
    assert compiled.slow_reasons() == [reasons.INSIDE_CAPTURE]
    assert list(compiled.uncaptured()) == [reasons.INSIDE_CAPTURE]
    cuda_on_cpu.stream, cuda_on_cpu.inside_capture = stream, False
    slow_calls.clear()
    check(compiled, W, calls=4)
    assert cuda_on_cpu.replays == replays + 4


def test_fast_call_runs_the_function_while_graphs_are_disabled(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """It is part of a step that is captured; a graph cannot be launched there."""
    model = Model(cuda_on_cpu)
    compiled = Compiled(model)
    check(compiled, W, calls=8)
    slow_calls.clear()
    replays, runs = cuda_on_cpu.replays, len(model.runs)
    with hook.at_rest():
        call(compiled)
        assert (cuda_on_cpu.replays, model.runs[runs:]) == (replays, ["plain"])
    call(compiled)
    assert (cuda_on_cpu.replays, len(model.runs)) == (replays + 1, runs + 1)
    assert slow_calls == []


def test_call_inside_of_another_managers_function_takes_no_lock(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """Another thread may hold it and wait for this one's: the call launches no graph."""
    compiled = on_fast_path(cuda_on_cpu, slow_calls)
    turn, replays = compiled.functions[0].turn, cuda_on_cpu.replays
    outer = SimpleNamespace(
        turn=threading.RLock(), run=lambda inputs: call(compiled), runs_inside=lambda direction: None
    )
    turns.run_under(outer, [])
    assert cuda_on_cpu.replays == replays
    assert list(compiled.uncaptured()) == [reasons.INSIDE_FUNCTION]
    outer.turn = turn
    turns.run_under(outer, [])
    call(compiled)
    assert cuda_on_cpu.replays == replays + 2
    assert not turns.RUNNING


def test_calls_during_a_recapture_launch_no_graph(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast call of the inner function would launch its graph during a capture, which does not record it: the
    second capture would have fewer kernels than the first, and all inputs would be copied forever."""
    inner = Compiled(Model(cuda_on_cpu))
    outer = Compiled(Outer(cuda_on_cpu, inner))
    launched: list[Any] = []
    launch = cuda_on_cpu.driver.launch

    def noted(executable: Any) -> Any:
        launched.append(cuda_on_cpu.capturing)
        return launch(executable)

    monkeypatch.setattr(cuda_on_cpu.driver, "launch", noted)
    check(inner, W, calls=12)
    for step in range(20):
        x, y = values(step), values(-3 * step)
        assert torch.equal(outer(x, y, W)[0], 2 * (2 * x + y * W) + y * W), step
        assert torch.equal(inner(y, x, W)[0], 2 * y + x * W), step
    assert launched.count(None) == len(launched) > 20
    assert [report.kernels for report in outer.reports] == [2]
    assert [report.copied_bytes for report in outer.reports] == [0]
    assert len(nodes()) == 2
