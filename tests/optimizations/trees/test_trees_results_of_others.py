"""A function may write a result of another graph, which the program reads afterwards; and results are read on streams
that the program has left."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.driver import floats
from simulated_gpu.runtime import CudaOnCpu, FakeStream
from simulated_gpu.trees import Compiled, Model, check, values
from threads import in_threads

from optimizations.in_place.generated import GeneratedCode
from optimizations.trees import manager
from optimizations.trees.containers import managers
from optimizations.trees.manager import PATIENCE

WEIGHT = values(7)
WRITTEN = (2,)


class Adding(Model):
    """`w += y`, besides what every model does. `captured`: whether a capture of it succeeds."""

    def __init__(self, cuda: CudaOnCpu, *, captured: bool = True, hides_y: bool = False) -> None:
        super().__init__(cuda, hides_y=hides_y)
        self.captured = captured

    def _body(self, x: Any, y: Any, w: Any, out: Any) -> None:
        super()._body(x, y, w, out)
        if self.hides_y:
            y = bytes((ctypes.c_uint8 * 8).from_address(int.from_bytes(y, "little")))
        target, added = (floats(int.from_bytes(one, "little"), 16) for one in (w, y))
        target[:] = [one + other for one, other in zip(list(target), list(added), strict=True)]

    def __call__(self, inputs: list[Any]) -> Any:
        _, y, w = inputs
        captures = self.cuda.capturing is not None
        if captures and not self.captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        returned = super().__call__(inputs)
        if not captures:
            w += y
        return returned


@pytest.mark.parametrize("hides_y", [False, True])
@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_write_to_a_result_of_another_graph_is_kept(
    cuda_on_cpu: CudaOnCpu, hides_y: bool, moving: bool, captured: bool
) -> None:
    """This holds during trials of inputs, after parameters moved, and if the recording fails."""
    first = Compiled(Model(cuda_on_cpu))
    adding = Adding(cuda_on_cpu, captured=captured, hides_y=hides_y)
    second = Compiled(adding, static_inputs=(1,) if moving else (), mutated_input_idxs=WRITTEN)
    parameters = [values(100 * number) for number in range(4)]
    kept = []
    for step in range(40):
        x, y = values(step), parameters[step % 4] if moving else values(2 * step)
        kept.append((x, y))
        (result,) = first.checked(x, values(3 * step), WEIGHT)
        expected = result + y
        second.checked(x, y, result, mark=False)
        assert torch.equal(result, expected), step
        del result
    assert any("could not be recorded" in reason for reason in second.uncaptured()) is not captured


def test_failed_recording_of_several_ranks_raises(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that continued without its graph would meet other ranks' graphs in the same collective."""
    monkeypatch.setattr(manager, "several_ranks", lambda code: code.collective)
    model = Adding(cuda_on_cpu, captured=False)
    model.code = GeneratedCode("it takes part in a collective", collective=True)
    compiled = Compiled(model)
    compiled(values(0), values(1), WEIGHT)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            compiled(values(0), values(1), values(7))
    model.captured = True
    compiled.checked(values(0), values(1), values(7))
    assert compiled.uncaptured() == {}


def test_write_is_not_lost_while_another_input_is_live(cuda_on_cpu: CudaOnCpu) -> None:
    first, other = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu))
    second = Compiled(Adding(cuda_on_cpu), static_inputs=(), mutated_input_idxs=WRITTEN)
    held = []
    for step in range(20):
        x, y = values(step), values(2 * step)
        torch.compiler.cudagraph_mark_step_begin()
        (result,) = first.function([x, y, WEIGHT])
        (added,) = other.function([y, x, WEIGHT])
        expected, amount = 2 * x + y * WEIGHT, 2 * y + x * WEIGHT
        arguments = [x, added, result]
        if step == 15:
            held.append(added)
        del added
        (out,) = second.function(arguments)
        assert torch.equal(out, 2 * x + amount * expected), step
        assert torch.equal(result, expected + amount), step
        del result, out
        held.clear()


def test_stream_is_waited_for_while_results_are_read(cuda_on_cpu: CudaOnCpu) -> None:
    """Note [Results on other streams]."""
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, WEIGHT, calls=20)

    call = functools.partial(called_on, cuda_on_cpu, lambda: compiled.checked(values(1), values(2), WEIGHT))
    first, second = 11, 12
    call(first)
    read_later, waited, _ = call(first)
    assert waited == set()
    _, waited, replays = call(second)
    assert (waited, replays) == ({first}, 0), "the graph would overwrite what is held"
    del read_later  # the program gave the first stream work that reads it before
    assert call(second)[1:] == ({first}, 1)
    for _ in range(3):
        assert call(second)[1:] == (set(), 1)


def called_on(cuda: CudaOnCpu, call: Callable[[], Any], stream: int) -> tuple[Any, set[int], int]:
    """Return its result, the streams it waits for, and its number of replays."""
    cuda.stream = stream
    torch.compiler.cudagraph_mark_step_begin()
    waits, replays = len(cuda.waits), cuda.replays
    returned = call()
    return returned, set(cuda.waits[waits:]), cuda.replays - replays


def test_permanently_live_results_get_their_own_pool(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, WEIGHT, calls=20)

    call = functools.partial(called_on, cuda_on_cpu, lambda: compiled.checked(values(1), values(2), WEIGHT))
    (kept,), _, _ = call(11)
    for _ in range(PATIENCE):
        assert call(12)[1:] == ({11}, 0)
    assert call(12)[1] == {11}, "the pool is left in this call"
    for _ in range(4):
        assert call(12)[1:] == (set(), 1)
    assert torch.equal(kept, 2 * values(1) + values(2) * WEIGHT)


class SavesOne(torch.autograd.Function):
    """A function whose second result is saved for a backward that never runs."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, call: Callable[[], list[torch.Tensor]]) -> torch.Tensor:
        made, saved = call()
        ctx.save_for_backward(saved)
        return made

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[None, None]:
        return None, None


@pytest.mark.parametrize("lean", [True, False])
def test_results_of_a_pending_backward_are_awaited_once(cuda_on_cpu: CudaOnCpu, lean: bool) -> None:
    """A released result keeps what its backward would read, and every call makes new ones."""
    compiled = Compiled(Model(cuda_on_cpu, results=2), outputs=2, is_inference=False, lean=lean)
    leaf = torch.ones(1, requires_grad=True)

    def call(stream: int) -> tuple[set[int], int]:
        inputs = [values(1), values(2), WEIGHT]
        return called_on(cuda_on_cpu, lambda: SavesOne.apply(leaf, lambda: compiled.function(inputs)).shape, stream)[1:]

    for _ in range(20):
        call(11)
    assert call(12) == ({11}, 1)
    for _ in range(4):
        assert call(12) == (set(), 1)


def test_warm_up_error_is_raised_if_the_device_is_lost(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = []

    class Fails(Model):
        def __call__(self, inputs: list[Any]) -> Any:
            lost.append(True)
            raise torch.AcceleratorError("an index is out of range")

    class Lost(FakeStream):
        def wait_stream(self, other: Any) -> None:
            if lost:
                raise torch.AcceleratorError("an earlier call of the device failed")

    compiled = Compiled(Fails(cuda_on_cpu))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Lost())
    with pytest.raises(torch.AcceleratorError, match="an index is out of range"):
        compiled.function([values(1), values(2), WEIGHT])


@pytest.mark.parametrize("captures", [False, True], ids=["", "captures"])
def test_pool_is_not_checked_while_another_thread_captures(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """The device cannot be synchronized then, and memory that a replay may still use is not unmapped."""
    given_back: list[str] = []

    def synchronize(*_: Any) -> None:
        if captures:
            raise torch.AcceleratorError("operation not permitted when stream is capturing")

    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, WEIGHT, calls=4)
    monkeypatch.setattr(manager, "give_back", lambda: given_back.append("memory"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "synchronize", synchronize)
        managers()[0].leave_pool()
    assert given_back == ([] if captures else ["memory"])
    check(compiled, WEIGHT, calls=4)


def graphed(cuda: CudaOnCpu) -> Compiled:
    compiled = Compiled(Model(cuda))
    for step in range(4):
        compiled(values(step), values(2), WEIGHT)
    cuda.waits.clear()
    return compiled


def without_graph(cuda: CudaOnCpu) -> Compiled:
    """A function that gets no graph before its first call."""
    compiled = Compiled(Model(cuda))
    compiled.function._measured[()] = "no graph", "it is small"
    return compiled


@pytest.mark.parametrize("called_before", [False, True])
def test_direct_call_waits_for_graphs(cuda_on_cpu: CudaOnCpu, called_before: bool) -> None:
    small = without_graph(cuda_on_cpu)
    compiled = graphed(cuda_on_cpu)
    if called_before:
        small(values(1), values(2), WEIGHT)
    for stream, waits in ((1, []), (2, [1]), (2, [1])):
        cuda_on_cpu.stream = stream
        small(values(1), values(2), WEIGHT)
        assert cuda_on_cpu.waits == waits
    cuda_on_cpu.stream = 1
    compiled(values(3), values(2), WEIGHT)
    assert cuda_on_cpu.waits == [1, 2], "the graph writes over what the function read"


def test_other_threads_streams_stay_independent(cuda_on_cpu: CudaOnCpu) -> None:
    """A thread that never called the manager's functions does not wait for their streams."""
    small = without_graph(cuda_on_cpu)
    graphed(cuda_on_cpu)
    cuda_on_cpu.stream = 5
    in_threads(lambda: small(values(1), values(2), WEIGHT))
    assert cuda_on_cpu.waits == []
