"""Nodes and managers, end to end: stock's CUDAGraph Trees on host memory, Encore's nodes in them.

Everything is called as Inductor calls it: a function from `EncoreMaker.cudagraphify`, with a list of inputs.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from simulated_cuda import Function, Node, floats, word
from simulated_work import aligned

from optimizations import torch_internals
from optimizations.capture.trees import manager
from optimizations.capture.trees.containers import managers, others_have_managers, shut_down
from optimizations.capture.trees.function import forget_recordings
from optimizations.capture.trees.maker import EncoreMaker
from optimizations.capture.trees.node import EncoreNode
from optimizations.indirection.plan import Choice
from optimizations.report.recordings import RecordingReport
from suite.measure import copies

__all__ = ["cuda_on_cpu"]

COUNT = 16


def values(start: float, offset: int = 0) -> torch.Tensor:
    return aligned(COUNT, offset).copy_(torch.arange(COUNT) + start)


class Model:
    """out = 2 * x + y * w, `w` at a fixed address; then, as told, x += 1, or x is returned as well."""

    def __init__(self, cuda: CudaOnCpu, *, writes_x: bool = False, returns_x: bool = False) -> None:
        self.cuda = cuda
        self.writes_x = writes_x
        self.returns_x = returns_x
        self.runs: list[str] = []
        self.body = Function("body", (8, 8, 8, 8), self._body)
        cuda.driver.add_function(self.body)

    def _body(self, x: bytes, y: bytes, w: bytes, out: bytes) -> None:
        at = [floats(int.from_bytes(pointer, "little"), COUNT) for pointer in (x, y, w, out)]
        one, other, weight = (list(memory) for memory in at[:3])
        at[3][:] = [2 * a + b * c for a, b, c in zip(one, other, weight, strict=True)]
        if self.writes_x:
            at[0][:] = [value + 1 for value in one]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        x, y, w = inputs
        inputs.clear()
        if self.cuda.capturing is None:
            self.runs.append("plain")
            out = 2 * x + y * w
            if self.writes_x:
                x += 1
        else:
            self.runs.append("captured")
            out = self.cuda.allocate(COUNT)
            pointers = [word(tensor.data_ptr()) for tensor in (x, y, w, out)]
            self.cuda.driver.add_node(self.cuda.capturing.graph, Node("KERNEL", self.body, pointers))
        return [out, x] if self.returns_x else [out]


class Compiled:
    """A function as Inductor would hold it, and the reports of its recordings."""

    def __init__(
        self, model: Callable[..., Any], choice: Choice = Choice.HOST, outputs: int = 1, **keywords: Any
    ) -> None:
        self.reports: list[RecordingReport] = []
        placeholders = [torch_internals.cudagraph_utils.PlaceholderInfo(name, None, [], None) for name in "xyw"]
        settings = {"is_backward": False, "is_inference": True, "stack_traces": [None] * outputs, **keywords}
        self.function = EncoreMaker(choice, self.reports.append).cudagraphify(
            model, (2,), device_index=0, placeholders=placeholders, constants=(), **settings
        )

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """A call of a new iteration: results are copied, as a caller that keeps them would."""
        torch.compiler.cudagraph_mark_step_begin()
        return [result.clone() for result in self.function(list(inputs))]


def nodes() -> list[EncoreNode]:
    return [node for one in managers() for node in one.nodes()]


def check(compiled: Compiled, w: torch.Tensor, calls: int = 8) -> None:
    """Results over calls at ever new addresses."""
    kept = []
    for step in range(calls):
        x, y = values(step), values(-3 * step)
        kept.append((x, y))
        result = compiled(x, y, w)[0]
        assert torch.equal(result, 2 * x + y * w), step


@pytest.mark.parametrize("choice", [Choice.AUTO, Choice.HOST, Choice.PRELUDE])
def test_warm_up_recording_and_replays_compute_the_same(cuda_on_cpu: CudaOnCpu, choice: Choice) -> None:
    model, w = Model(cuda_on_cpu), values(7)
    compiled = Compiled(model, choice)
    check(compiled, w)
    assert model.runs == ["plain", "captured", "captured"], "warm-up, scout, recording"
    assert cuda_on_cpu.replays == 7, "one at the recording, one in each later call"
    (node,) = nodes()
    assert node.follower is not None
    assert node.follower.indices == [0, 1]
    assert node.non_static_input_idx == [], "nothing is copied"
    assert node.static_input_idxs == [2]
    (report,) = compiled.reports
    assert (report.copied_bytes, report.pointer_bytes) == (0, 16)
    assert [(one.name, one.indirect) for one in report.inputs] == [("x", True), ("y", True)]


def test_the_suite_counts_pointers_instead_of_data(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w)
    elsewhere = values(4), values(5)  # alive, or their memory could be that of the next inputs
    compiled(*elsewhere, w)
    x, y, misaligned = values(1), values(2), values(3, offset=1)
    with copies.counting() as count:
        compiled(x, y, w)
    assert (count.copied_bytes, count.pointer_bytes) == (0, 16)
    with copies.counting() as count:
        compiled(x, y, w)
    assert (count.copied_bytes, count.pointer_bytes) == (0, 0)
    with copies.counting() as count:
        compiled(misaligned, y, w)
    assert (count.copied_bytes, count.pointer_bytes) == (COUNT * 4, 8)


def test_moved_inputs_do_not_record_anew_and_moved_parameters_do(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu), values(7)
    compiled = Compiled(model)
    check(compiled, w)
    assert len(compiled.reports) == 1
    other = values(11)
    check(compiled, other)
    assert len(compiled.reports) == 2
    check(compiled, w)
    assert len(compiled.reports) == 2, "both recordings are kept"


def test_unmoved_inputs_set_nothing(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    x, y = values(1), values(2)
    for _ in range(3):
        compiled(x, y, w)
    cuda_on_cpu.driver.calls.clear()
    x.fill_(4.0)
    (result,) = compiled(x, y, w)
    assert torch.equal(result, 2 * x + y * w)
    assert cuda_on_cpu.driver.calls == []


def test_placeholders_of_inputs_read_in_place_are_freed(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizations.recording import session as recording

    buffers: list[Any] = []
    make = recording.outside_placeholders

    def watched(inputs: Any) -> Any:
        made = make(inputs)
        buffers.extend(weakref.ref(one.buffer) for one in made.values())
        return made

    monkeypatch.setattr(recording, "outside_placeholders", watched)
    check(Compiled(Model(cuda_on_cpu)), values(7))
    assert len(buffers) == 2
    assert [buffer() for buffer in buffers] == [None, None]


def test_the_callers_tensors_are_not_kept(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    for start in range(4):
        x, y = values(start), values(start)
        alive = weakref.ref(x)
        compiled(x, y, w)
        del x, y
        assert alive() is None, start


def test_an_input_that_is_returned_is_copied(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu, returns_x=True), values(7)
    compiled = Compiled(model, outputs=2)
    kept = []
    for step in range(6):
        x, y = values(step), values(2 * step)
        kept.append((x, y))
        out, same = compiled(x, y, w)
        assert torch.equal(out, 2 * x + y * w)
        assert torch.equal(same, x)
    (node,) = nodes()
    assert node.non_static_input_idx == [0]
    assert node.follower is not None
    assert node.follower.indices == [1]
    assert "an output shares its memory" in compiled.reports[0].inputs[0].reasons[0]


@pytest.mark.parametrize("offset", [0, 1])
def test_a_mutated_input_is_captured_and_the_caller_sees_it(cuda_on_cpu: CudaOnCpu, offset: int) -> None:
    """Also where the caller's tensor is misaligned, so that the graph writes a copy of it."""
    model, w = Model(cuda_on_cpu, writes_x=True), values(7)
    compiled = Compiled(model, mutated_input_idxs=(0,))
    kept = []
    for step in range(6):
        x, y = values(step, offset), values(2 * step)
        kept.append((x, y))
        before = x.clone()
        (out,) = compiled(x, y, w)
        assert torch.equal(out, 2 * before + y * w), step
        assert torch.equal(x, before + 1), step
    assert model.runs == ["plain", "captured", "captured"]
    assert compiled.reports[0].inputs[0].mutated


def test_a_mutated_input_that_cannot_be_read_in_place_is_left_to_stock(cuda_on_cpu: CudaOnCpu) -> None:
    """Recorded once, right in that call too, and then run without a graph, as stock does from the start."""
    model, w = Model(cuda_on_cpu, writes_x=True, returns_x=True), values(7)
    compiled = Compiled(model, outputs=2, mutated_input_idxs=(0,))
    kept = []
    for step in range(5):
        x, y = values(step), values(2 * step)
        kept.append((x, y))
        before = x.clone()
        out, same = compiled(x, y, w)
        assert torch.equal(out, 2 * before + y * w), step
        assert torch.equal(x, before + 1), step
        assert torch.equal(same, before + 1), step
    assert model.runs == ["plain", "captured", "captured", "plain", "plain", "plain"]
    assert len(compiled.reports) == 1


def test_a_mutated_input_in_the_pool_is_left_to_stock(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu, writes_x=True), values(7)
    compiled = Compiled(model, mutated_input_idxs=(0,))
    for step in range(3):
        compiled(values(step), values(step), w)
    (pool,) = {tuple(one.cuda_graphs_thread_pool) for one in managers()}
    own, y = cuda_on_cpu.memory[pool][0], values(5)
    own.copy_(values(50))
    before = own.clone()
    (out,) = compiled(own, y, w)
    assert torch.equal(out, 2 * before + y * w)
    assert torch.equal(own, before + 1)
    assert model.runs[-1] == "plain"


def test_without_memory_for_a_second_capture_everything_is_copied(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu), values(7)

    def short_of_memory(inputs: list[Any]) -> list[Any]:
        if cuda_on_cpu.capturing is not None and cuda_on_cpu.captures == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(inputs)

    compiled = Compiled(short_of_memory)
    check(compiled, w)
    (node,) = nodes()
    assert node.follower is None
    assert node.non_static_input_idx == [0, 1]
    assert "out of memory" in str(compiled.reports[0].off)


def test_generators_are_registered_with_the_graph_that_is_replayed(cuda_on_cpu: CudaOnCpu) -> None:
    model, w, generator = Model(cuda_on_cpu), values(7), torch.Generator()

    def with_generator(inputs: list[Any]) -> list[Any]:
        assert isinstance(inputs.pop(), torch.Generator)
        return model(inputs)

    compiled = Compiled(with_generator)
    for step in range(3):
        x, y = values(step), values(step)
        (out,) = compiled.function([x, y, w, generator])
        assert torch.equal(out, 2 * x + y * w)
        torch.compiler.cudagraph_mark_step_begin()
    (node,) = nodes()
    assert (node.graph, generator) in cuda_on_cpu.generators


def test_forward_and_backward_share_a_manager_and_their_trees(cuda_on_cpu: CudaOnCpu) -> None:
    forward_model, backward_model, w = Model(cuda_on_cpu), Model(cuda_on_cpu), values(7)
    forward = Compiled(forward_model, is_inference=False)
    backward = Compiled(backward_model, is_inference=False, is_backward=True)
    kept = []
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x, y, tangent = values(step), values(step + 1), values(step + 2)
        kept.append((x, y, tangent))
        (saved,) = forward.function([x, y, w])
        expected = 2 * x + y * w
        assert torch.equal(saved, expected), step
        (grad,) = backward.function([tangent, saved, w])
        assert torch.equal(grad, 2 * tangent + expected * w), step
        del saved, grad
    assert len(managers()) == 1
    assert [report.direction for report in (*forward.reports, *backward.reports)] == ["forward", "backward"]


def test_stocks_container_is_left_alone(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7))
    assert torch_internals.cudagraph_trees.get_manager(0, create_if_none_exists=False) is None
    assert isinstance(manager.container(0).tree_manager, manager.EncoreManager)


def test_each_thread_has_managers_of_its_own(cuda_on_cpu: CudaOnCpu) -> None:
    here = manager.container(0)
    there: list[Any] = []
    thread = threading.Thread(target=lambda: there.append(manager.container(0)))
    thread.start()
    thread.join()
    assert there[0] is not here
    assert manager.container(0) is here


def test_a_reset_of_the_compiler_waits_for_no_other_threads_graphs_and_ends_none(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w)
    assert not others_have_managers(), "the graphs are this thread's"
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(others_have_managers()))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_managers_end_comes_with_the_last_function(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w)
    container = manager.container(0)
    assert container.tree_manager is not None
    gc.collect()
    gc.disable()
    try:
        del compiled
        assert container.tree_manager is None
    finally:
        gc.enable()


def test_after_a_shutdown_nothing_is_left_and_functions_record_again(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w)
    (node,) = nodes()
    held = [weakref.ref(thing) for thing in (node, node.graph, node.follower)]
    gc.collect()
    gc.disable()
    try:
        del node
        shut_down()
        forget_recordings()
        assert [thing() for thing in held] == [None, None, None]
    finally:
        gc.enable()
    assert managers() == []
    check(compiled, w)
    assert len(compiled.reports) == 2
