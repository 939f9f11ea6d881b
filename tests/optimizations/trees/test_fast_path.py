"""The fast path is taken exactly where a call matches the previous one, in any thread and on any stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, Training, check, nodes, settle, slow_reasons, values
from threads import in_threads
from torch.autograd import forward_ad

from optimizations import torch_internals
from optimizations.calls import turns
from optimizations.graph.plan import Choice
from optimizations.in_place import budget
from optimizations.trees import hook, manager, reasons, streams
from optimizations.trees.containers import managers
from tests.optimizations.trees.test_referenced_results import Outer

W = values(7)


def on_fast_path(cuda: CudaOnCpu, **keywords: Any) -> Compiled:
    """Return a function whose next call of a new iteration takes the fast path."""
    compiled = Compiled(Model(cuda), **keywords)
    check(compiled, W, calls=8)
    compiled.slow_reasons()
    return compiled


def call(compiled: Compiled, w: torch.Tensor = W, start: float = 3) -> None:
    compiled.checked(values(start), values(-2 * start), w)


def test_fast_path_skips_stocks_run(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = on_fast_path(cuda_on_cpu)
    replays = cuda_on_cpu.replays
    with monkeypatch.context() as patch:
        patch.setattr(manager.EncoreManager, "_run", None)
        check(compiled, W, calls=20)
    assert cuda_on_cpu.replays == replays + 20
    (node,) = nodes()
    assert compiled.reports[0].replays == node.replays == 26
    assert compiled.reports[0].steady_replays == 25
    assert compiled.slow_reasons() == []


def test_copies_skip_stocks_loop_unless_it_is_wrapped(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = on_fast_path(cuda_on_cpu, choice=Choice.OFF)
    stock = torch_internals.cudagraph_trees.CUDAGraphNode
    called: list[Any] = []
    copy = stock._copy_inputs_and_remove_from_src
    with monkeypatch.context() as patch:
        patch.setattr(stock, "_copy_inputs_and_remove_from_src", lambda *given: (called.append(given), copy(*given)))
        call(compiled, start=4)
    call(compiled, start=5)
    assert compiled.slow_reasons() == [] and len(called) == 1
    (node,) = nodes()
    assert node.copied_per_replay > 0


def test_table_is_written_once_after_an_input_moved(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(Model(cuda_on_cpu), choice=Choice.PRELUDE)
    check(compiled, W, calls=12)
    (node,) = nodes()
    tracker, settled = node.tracker, []
    settle = tracker._pointers.settle
    monkeypatch.setattr(tracker._pointers, "settle", lambda: (settled.append(1), settle()))
    compiled.slow_reasons()
    found, y = [], values(5)
    for x in [values(1)] * 4 + [values(2)] * 3:
        compiled(x, y, W)
        assert not tracker.pending
        found.append(len(settled))
    assert compiled.slow_reasons() == []
    assert found == [0, 1, 1, 1, 1, 2, 2], "by the call after the one that moved it"


def test_calls_before_the_fast_path_are_counted(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W, calls=12)
    (function,) = compiled.functions
    ways = {way.reason: way.calls for way in function.slow_calls()}
    assert next(iter(ways)) == reasons.NOT_EXECUTING, "the first reason first"
    (report,) = compiled.reports
    assert sum(ways.values()) == 11 - report.steady_replays, "the first call of all is made by who records"


def test_loop_without_live_results_takes_the_fast_path(cuda_on_cpu: CudaOnCpu) -> None:
    """Stock ends the path of an iteration where all results are dead and no recording follows."""
    both = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu))

    def iteration(start: int, rounds: int = 4, keep: int = -1) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        kept = []
        for place in range(rounds):
            for compiled in both:
                x, y = values(start + place), values(start - 2 * place)
                (result,) = compiled.checked(x, y, W, mark=False)
                if place == keep:
                    kept.append((result, 2 * x + y * W))
                del result
        assert all(torch.equal(result, expected) for result, expected in kept)

    settle(iteration, *both)
    recorded, replays = len(nodes()), cuda_on_cpu.replays
    for start in range(5):
        iteration(start, 7)  # another number of rounds than before
    assert slow_reasons(*both) == []
    assert (len(nodes()), cuda_on_cpu.replays) == (recorded, replays + 5 * 2 * 7)
    iteration(1, 7, keep=2)
    assert slow_reasons(*both), "what is held must not be written over"
    iteration(2, 7)


@pytest.mark.usefixtures("weights_let_go")
@pytest.mark.parametrize("hides_y", [True, False])
def test_ordinary_parameters_are_replayed_on_the_fast_path(cuda_on_cpu: CudaOnCpu, hides_y: bool) -> None:
    """They are copied where their address is hidden, and otherwise read in place."""
    compiled = Compiled(Model(cuda_on_cpu, hides_y=hides_y), static_inputs=(1, 2) if hides_y else (2,))
    parameters = [values(3 * swap) for swap in range(12)]

    def swapped(step: int) -> None:
        parameter = parameters[step % 12]
        compiled.checked(values(step), *((parameter, W) if hides_y else (W, parameter)))

    settle(swapped, compiled, calls=240)
    for step in range(24):
        swapped(step)
    assert compiled.slow_reasons() == []
    assert len(compiled.reports) == 3


def test_pending_work_takes_the_slow_path(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", 12)
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W, calls=4)
    compiled.slow_reasons()
    check(compiled, W, calls=6)
    (report,) = compiled.reports
    assert (report.stage, report.copied_bytes) == ("waiting", 2 * W.nbytes), "not examined yet"
    assert compiled.slow_reasons() == []
    check(compiled, W, calls=20)
    assert compiled.reports[0].copied_bytes == 0
    assert reasons.WORK_IS_DUE in compiled.slow_reasons()


@pytest.mark.parametrize("option", ["fast_path_cudagraph_asserts", "force_cudagraph_sync", "force_cudagraphs_warmup"])
def test_inductors_debugging_options_disable_the_fast_path(cuda_on_cpu: CudaOnCpu, option: str) -> None:
    compiled = on_fast_path(cuda_on_cpu)
    (node,) = nodes()
    assert node.takes_fast_path
    with torch_internals.inductor_config.patch({f"triton.{option}": True}):
        node.expect_again()
    assert not node.takes_fast_path
    call(compiled)


def _leave_pool() -> None:
    for one in managers():
        one.leave_pool()


def _change_state() -> None:
    for node in nodes():
        node.takes_fast_path = False


@pytest.mark.parametrize(
    ("change", "reason"), [(_leave_pool, reasons.NOT_EXECUTING), (_change_state, reasons.NOT_RECORDED)]
)
def test_changed_recording_takes_the_slow_path(cuda_on_cpu: CudaOnCpu, change: Callable[[], None], reason: str) -> None:
    compiled = on_fast_path(cuda_on_cpu)
    change()
    call(compiled)
    assert compiled.slow_reasons() == [reason]


def training_of(cuda: CudaOnCpu) -> Training:
    """A training loop whose next step takes the fast path."""
    training = Training(Model(cuda), Model(cuda))
    settle(training.step, *training.both, calls=12)
    return training


def test_forward_without_backward_is_slow_without_step_marks(cuda_on_cpu: CudaOnCpu) -> None:
    training = training_of(cuda_on_cpu)
    training.step(1, backward=False)
    training.step(2, mark=False)
    assert reasons.OTHER_ORDER in training.forward.slow_reasons(), "no iteration began"


def test_forward_with_pending_backward_is_slow(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = torch_internals.cudagraph_trees
    monkeypatch.setattr(trees.MarkStepBox, "mark_step_counter", 0)
    training = Training(Model(cuda_on_cpu), Model(cuda_on_cpu))

    def step(start: float, *, backward: bool = True) -> None:
        trees.GenerationTracker.generation += 1
        training.step(start, backward=backward, mark=False)

    settle(step, *training.both, calls=12)
    step(13, backward=False)
    assert slow_reasons(*training.both) == []
    step(14)
    assert reasons.BACKWARD_PENDING in training.forward.slow_reasons()


def test_live_saved_result_after_the_backward_is_slow(cuda_on_cpu: CudaOnCpu) -> None:
    training = training_of(cuda_on_cpu)
    (saved,) = training.step(1, look=list)
    expected = 2 * values(1) + values(2) * W
    assert slow_reasons(*training.both) == [reasons.INPUT_STILL_HELD], "of the backward"
    training.step(4)
    assert training.forward.uncaptured(), "the next step ran without graphs"
    assert reasons.KEPT in training.forward.slow_reasons()
    assert torch.equal(saved, expected)


@pytest.mark.parametrize("lean_on", [True, False])
@pytest.mark.parametrize("calls", [1, 8])
def test_forward_mode_derivative_is_refused_as_by_stock(cuda_on_cpu: CudaOnCpu, lean_on: bool, calls: int) -> None:
    """A graph that reads the input in place would return a result without a derivative, and so would a recording that
    fails, as the generated code drops it."""
    compiled = Compiled(Model(cuda_on_cpu), lean=lean_on)
    check(compiled, W, calls)
    compiled.slow_reasons()
    replays = cuda_on_cpu.replays
    with forward_ad.dual_level():
        for place in (0, 1):
            inputs = [values(1), values(2), W]
            inputs[place] = forward_ad.make_dual(inputs[place], values(5))
            with pytest.raises(NotImplementedError, match="forward AD"):
                compiled(*inputs)
        assert cuda_on_cpu.replays == replays
        call(compiled)  # inputs without one
    assert (reasons.FORWARD_MODE in compiled.slow_reasons()) is lean_on
    check(compiled, W, calls=4)
    assert calls == 1 or compiled.slow_reasons() == []
    assert len(compiled.reports) == 1 and not compiled.uncaptured()


# Calls of other threads and streams, in captures, and inside of other functions.


def test_first_fast_call_of_a_thread_sets_the_context(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver calls fail in a thread without a context."""
    compiled = on_fast_path(cuda_on_cpu)
    made: list[int] = []
    entered: list[int] = []
    enter = streams.CallStreams.enter

    def counted(self: Any, is_backward: bool, node: Any) -> None:
        entered.append(threading.get_ident())
        enter(self, is_backward, node)

    monkeypatch.setattr(streams, "make_context_current", lambda device: made.append(threading.get_ident()))
    monkeypatch.setattr(streams.CallStreams, "enter", counted)
    threads = in_threads(lambda: [call(compiled, W, start) for start in range(3)] and None)
    assert made == entered == threads
    assert compiled.slow_reasons() == []


def test_autograd_thread_is_a_known_caller(cuda_on_cpu: CudaOnCpu) -> None:
    """Autograd's threads do not count as callers. If several threads call, nothing is captured again in between."""
    training = training_of(cuda_on_cpu)
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
    assert slow_reasons(*training.both) == []
    assert callers == [1, 2]


def test_fast_call_on_another_stream_waits_for_the_previous(cuda_on_cpu: CudaOnCpu) -> None:
    """Both calls use the same memory."""
    compiled = on_fast_path(cuda_on_cpu)
    for stream, waits in ((1, []), (2, [1]), (2, [1]), (3, [1, 2])):
        cuda_on_cpu.stream = stream
        call(compiled)
        assert cuda_on_cpu.waits == waits
    assert compiled.slow_reasons() == []


@pytest.mark.parametrize("thread", ["this", "another"])
@pytest.mark.parametrize("same_stream", [True, False])
def test_fast_path_runs_no_graph_inside_a_capture(cuda_on_cpu: CudaOnCpu, thread: str, same_stream: bool) -> None:
    """A graph cannot be launched there. `same_stream`: the program captures on the stream of the calls before."""
    compiled = on_fast_path(cuda_on_cpu)
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
    check(compiled, W, calls=4)
    assert cuda_on_cpu.replays == replays + 4


def test_fast_call_runs_the_function_while_graphs_are_disabled(cuda_on_cpu: CudaOnCpu) -> None:
    """It is part of a step that is captured; a graph cannot be launched there."""
    model = Model(cuda_on_cpu)
    compiled = Compiled(model)
    check(compiled, W, calls=8)
    compiled.slow_reasons()
    replays, runs = cuda_on_cpu.replays, len(model.runs)
    with hook.at_rest():
        call(compiled)
        assert (cuda_on_cpu.replays, model.runs[runs:]) == (replays, ["plain"])
    call(compiled)
    assert (cuda_on_cpu.replays, len(model.runs)) == (replays + 1, runs + 1)
    assert compiled.slow_reasons() == []


def test_call_inside_of_another_managers_function_takes_no_lock(cuda_on_cpu: CudaOnCpu) -> None:
    """Another thread may hold it and wait for this one's: the call launches no graph."""
    compiled = on_fast_path(cuda_on_cpu)
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
