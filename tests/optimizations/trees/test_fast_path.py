"""The fast path is taken exactly where a call matches the previous one.

Note [Full ways]. Counted is `CUDAGraphTreeManager._run`, which every call on stock's path enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, Training, check, nodes, values
from torch.autograd import forward_ad

from optimizations import torch_internals
from optimizations.graph.plan import Choice
from optimizations.in_place import budget
from optimizations.trees import manager, reasons
from optimizations.trees.containers import managers

W = values(7)


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the functions of calls on stock's path. Note [Full ways]."""
    seen: list[Any] = []
    stock = manager.EncoreManager._run

    def run(self: Any, inputs: list[Any], function_id: Any) -> Any:
        seen.append(function_id)
        return stock(self, inputs, function_id)

    monkeypatch.setattr(manager.EncoreManager, "_run", run)
    return seen


def on_fast_path(cuda: CudaOnCpu, slow_calls: list[Any], **keywords: Any) -> Compiled:
    """Return a function whose next call of a new iteration takes the fast path."""
    compiled = Compiled(Model(cuda), **keywords)
    check(compiled, W, calls=8)
    slow_calls.clear()
    compiled.slow_reasons()
    return compiled


def call(compiled: Compiled, w: torch.Tensor = W, start: float = 3) -> None:
    compiled.checked(values(start), values(-2 * start), w)


VALUES_OF_Y = values(5)


def test_fast_path_skips_stocks_run(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    compiled = on_fast_path(cuda_on_cpu, slow_calls)
    replays = cuda_on_cpu.replays
    check(compiled, W, calls=20)
    assert slow_calls == []
    assert cuda_on_cpu.replays == replays + 20
    (node,) = nodes()
    assert compiled.reports[0].replays == node.replays == 26
    assert compiled.reports[0].steady_replays == 25
    assert compiled.slow_reasons() == []


def test_copies_skip_stocks_loop_unless_it_is_wrapped(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = on_fast_path(cuda_on_cpu, slow_calls, choice=Choice.OFF)
    stock = torch_internals.cudagraph_trees.CUDAGraphNode
    called: list[Any] = []
    copy = stock._copy_inputs_and_remove_from_src
    with monkeypatch.context() as patch:
        patch.setattr(stock, "_copy_inputs_and_remove_from_src", lambda *given: (called.append(given), copy(*given)))
        call(compiled, start=4)
    call(compiled, start=5)
    assert slow_calls == [] and len(called) == 1
    (node,) = nodes()
    assert node.copied_per_replay > 0


def test_table_is_written_once_after_an_input_moved(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Compiled(Model(cuda_on_cpu), choice=Choice.PRELUDE)
    check(compiled, W, calls=12)
    (node,) = nodes()
    tracker, settled = node.tracker, []
    settle = tracker._pointers.settle
    monkeypatch.setattr(tracker._pointers, "settle", lambda: (settled.append(1), settle()))
    slow_calls.clear()
    found = []
    for x in [values(1)] * 4 + [values(2)] * 3:
        compiled(x, VALUES_OF_Y, W)
        assert not tracker.pending
        found.append(len(settled))
    assert slow_calls == []
    assert found == [0, 1, 1, 1, 1, 2, 2], "by the call after the one that moved it"


def test_calls_before_the_fast_path_are_counted(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W, calls=12)
    (function,) = compiled.functions
    ways = {way.reason: way.calls for way in function.slow_calls()}
    assert next(iter(ways)) == reasons.NOT_EXECUTING, "the first reason first"
    (report,) = compiled.reports
    assert sum(ways.values()) == 11 - report.steady_replays, "the first call of all is made by who records"


def test_lean_off_uses_stocks_run(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    compiled = on_fast_path(cuda_on_cpu, slow_calls, lean=False)
    check(compiled, W, calls=4)
    assert len(slow_calls) >= 4
    assert compiled.slow_reasons() == [], "no option requested the fast path"
    assert not any(node.takes_fast_path for node in nodes())
    assert compiled.reports[0].steady_replays == 0


def test_loop_without_live_results_takes_the_fast_path(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """Stock ends the path of an iteration where all results are dead and no recording follows."""
    first, second = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu))

    def iteration(start: int, rounds: int, keep: int = -1) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        kept = []
        for place in range(rounds):
            for compiled in (first, second):
                x, y = values(start + place), values(start - 2 * place)
                (result,) = compiled.checked(x, y, W, mark=False)
                if place == keep:
                    kept.append((result, 2 * x + y * W))
                del result
        assert all(torch.equal(result, expected) for result, expected in kept)

    for start in range(40):
        iteration(start, 4)
    slow_calls.clear()
    recorded, replays = len(list(nodes())), cuda_on_cpu.replays
    for start in range(5):
        iteration(start, 7)  # another number of rounds than before
    assert slow_calls == []
    assert (len(list(nodes())), cuda_on_cpu.replays) == (recorded, replays + 5 * 2 * 7)
    iteration(1, 7, keep=2)
    assert slow_calls, "what is held must not be written over"
    iteration(2, 7)


def test_moved_parameter_takes_the_slow_path(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    compiled = on_fast_path(cuda_on_cpu, slow_calls)
    call(compiled, values(5))
    assert slow_calls
    assert compiled.slow_reasons() == [reasons.FIXED_INPUT_MOVED]


def test_recordings_of_two_parameter_sets_alternate_fast(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    compiled, weights = Compiled(Model(cuda_on_cpu)), [values(5), values(6)]
    for step in range(20):
        call(compiled, weights[step % 2], step)
    slow_calls.clear()
    for step in range(20):
        call(compiled, weights[step % 2], step)
    assert slow_calls == []
    assert len(compiled.reports) == 2


@pytest.mark.usefixtures("weights_let_go")
def test_ordinary_parameters_are_replayed_on_the_fast_path(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    """They are copied where their address is hidden, and otherwise read in place."""
    for hides_y, static in ((True, (1, 2)), (False, (2,))):
        compiled = Compiled(Model(cuda_on_cpu, hides_y=hides_y), static_inputs=static)
        parameters = [values(3 * swap) for swap in range(12)]
        for step in range(264):
            if step == 240:
                slow_calls.clear()
            parameter = parameters[step % 12]
            compiled.checked(values(step), *((parameter, W) if hides_y else (W, parameter)))
        assert slow_calls == []
        assert len(compiled.reports) == 3


def test_pending_work_takes_the_slow_path(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", 12)
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W, calls=10)
    assert compiled.reports[0].copied_bytes == 2 * W.nbytes, "not looked at yet"
    waited = len(slow_calls)
    check(compiled, W, calls=20)
    assert compiled.reports[0].copied_bytes == 0
    assert len(slow_calls) > waited
    assert reasons.WORK_IS_DUE in compiled.slow_reasons()


@pytest.mark.parametrize("option", ["fast_path_cudagraph_asserts", "force_cudagraph_sync", "force_cudagraphs_warmup"])
def test_inductors_debugging_options_disable_the_fast_path(cuda_on_cpu: CudaOnCpu, option: str) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, W)
    (node,) = nodes()
    assert node.takes_fast_path
    with torch_internals.inductor_config.patch({f"triton.{option}": True}):
        node.expect_again()
    assert not node.takes_fast_path


def _leave_pool(_: Any) -> None:
    for one in managers():
        one.leave_pool()


def _change_state(_: Any) -> None:
    for node in nodes():
        node.takes_fast_path = False


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_leave_pool, reasons.NOT_EXECUTING), (_change_state, reasons.NOT_RECORDED)],
)
def test_changed_recording_takes_the_slow_path(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], change: Callable[[Any], None], reason: str
) -> None:
    compiled = on_fast_path(cuda_on_cpu, slow_calls)
    change(compiled)
    call(compiled)
    assert compiled.slow_reasons() == [reason]
    assert slow_calls


def training_of(cuda: CudaOnCpu) -> Training:
    """A training loop whose next step takes the fast path."""
    training = Training(Model(cuda), Model(cuda))
    for step in range(12):
        training.step(step)
    return training


def test_forward_without_backward_is_slow_without_step_marks(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    training = training_of(cuda_on_cpu)
    training.step(1, backward=False)
    slow_calls.clear()
    training.step(2, mark=False)
    assert slow_calls
    assert reasons.OTHER_ORDER in training.forward.slow_reasons(), "no iteration began"


def test_forward_with_pending_backward_is_slow(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = torch_internals.cudagraph_trees
    monkeypatch.setattr(trees.MarkStepBox, "mark_step_counter", 0)
    training = Training(Model(cuda_on_cpu), Model(cuda_on_cpu))

    def step(start: float, *, backward: bool = True) -> None:
        trees.GenerationTracker.generation += 1
        training.step(start, backward=backward, mark=False)

    for start in range(12):
        step(start)
    slow_calls.clear()
    step(12)
    step(13, backward=False)
    assert slow_calls == []
    step(14)
    assert slow_calls
    assert reasons.BACKWARD_PENDING in training.forward.slow_reasons()


def test_live_saved_result_after_the_backward_is_slow(cuda_on_cpu: CudaOnCpu, slow_calls: list[Any]) -> None:
    training = training_of(cuda_on_cpu)
    slow_calls.clear()
    (saved,) = training.step(1, look=list)
    expected = 2 * values(1) + values(2) * W
    assert slow_calls == []
    training.step(4)
    assert training.forward.functions[0].uncaptured(), "the next step ran without graphs"
    assert reasons.KEPT in training.forward.slow_reasons()
    assert torch.equal(saved, expected)


@pytest.mark.parametrize("lean_on", [True, False])
def test_forward_mode_derivative_is_refused_as_by_stock(
    cuda_on_cpu: CudaOnCpu, slow_calls: list[Any], lean_on: bool
) -> None:
    """A graph that reads the input in place would return a result without a derivative."""
    compiled = on_fast_path(cuda_on_cpu, slow_calls, lean=lean_on)
    replays = cuda_on_cpu.replays
    with forward_ad.dual_level():
        for place in (0, 1):
            inputs = [values(1), values(2), W]
            inputs[place] = forward_ad.make_dual(inputs[place], values(5))
            with pytest.raises(NotImplementedError, match="forward AD"):
                compiled(*inputs)
        assert cuda_on_cpu.replays == replays
        call(compiled)  # inputs without one
    assert compiled.slow_reasons() == ([reasons.FORWARD_MODE] if lean_on else [])
    slow_calls.clear()
    check(compiled, W, calls=4)
    assert not slow_calls or not lean_on
