"""Nodes, end to end: stock's CUDAGraph Trees on host memory, Encore's nodes in them.

Everything is called as Inductor calls it: a function from `EncoreMaker.cudagraphify`, with a list of inputs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, KNOWN, Compiled, Model, check, nodes, values
from threads import in_threads

from optimizations import torch_internals
from optimizations.graph.plan import Choice
from optimizations.graph.pointers import Analysis, InputVerdict, Reason, ReasonCode, UnexplainedWord
from optimizations.in_place import examination, session
from optimizations.in_place.generated import GeneratedCode, Launch
from optimizations.trees import manager, moved_inputs, reasons
from optimizations.trees.containers import managers


@pytest.mark.parametrize("choice", [Choice.AUTO, Choice.HOST, Choice.PRELUDE])
def test_warm_up_recording_and_replays_compute_the_same(cuda_on_cpu: CudaOnCpu, choice: Choice) -> None:
    model, w = Model(cuda_on_cpu), values(7)
    compiled = Compiled(model, choice)
    check(compiled, w)
    assert model.runs == ["plain", "captured", "captured"], "warm-up, recording, one more capture to compare with"
    assert cuda_on_cpu.replays == 7, "one at the recording, one in each later call"
    (node,) = nodes()
    assert node.tracker is not None
    assert node.tracker.indices == [0, 1]
    assert node.non_static_input_idx == [], "nothing is copied"
    assert node.static_input_idxs == [2]
    (report,) = compiled.reports
    assert (report.copied_bytes, report.pointer_bytes) == (0, 16)
    assert [(one.name, one.indirect) for one in report.inputs] == [("x", True), ("y", True)]


def test_unmoved_inputs_update_no_node(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w)
    x, y = values(1), values(2)
    for _ in range(2):
        compiled(x, y, w)
    cuda_on_cpu.driver.calls.clear()
    x.fill_(4.0)
    compiled.checked(x, y, w)
    assert cuda_on_cpu.driver.calls == []


def test_callers_tensors_are_not_retained(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    for start in range(4):
        x, y = values(start), values(start)
        alive = weakref.ref(x)
        compiled(x, y, w)
        del x, y
        assert alive() is None, start


@pytest.mark.parametrize("several", [False, True])
def test_input_that_is_returned_is_copied(cuda_on_cpu: CudaOnCpu, several: bool) -> None:
    code = dataclasses.replace(KNOWN, is_partition=several)
    model, w = Model(cuda_on_cpu, returns_x=True, code=code), values(7)
    compiled = Compiled(model, outputs=2)
    kept = []
    for step in range(10):
        x, y = values(step), values(2 * step)
        kept.append((x, y))
        out, same = compiled.checked(x, y, w)
        assert torch.equal(same, x)
        if several and step > 0:
            assert same is x, "the caller's own tensor, which a later part of the program may write"
        del out, same
    (node,) = nodes()
    assert node.non_static_input_idx == [0]
    assert node.tracker is not None
    assert node.tracker.indices == [1]
    assert "an output shares its memory" in compiled.reports[0].inputs[0].reasons[0]


@pytest.mark.parametrize("offset", [0, 1])
def test_returned_view_of_an_input_is_in_its_memory(cuda_on_cpu: CudaOnCpu, offset: int) -> None:
    """A later partition may write it."""

    class ReturnsView(Model):
        def __call__(self, inputs: list[Any]) -> list[Any]:
            out, x = super().__call__(inputs)
            return [out, x[3:]]

    model = ReturnsView(cuda_on_cpu, returns_x=True, code=dataclasses.replace(KNOWN, is_partition=True))
    compiled, w = Compiled(model, outputs=2), values(7)
    for step in range(5):
        x = values(step, offset)
        view = compiled.checked(x, values(1), w)[1]
        view.add_(1)
        assert torch.equal(x[3:], values(step + 1)[3:]), step
    assert model.runs.count("plain") == 1


@pytest.mark.parametrize("reused", [frozenset({0}), None])
def test_input_memory_that_became_a_result_is_returned(cuda_on_cpu: CudaOnCpu, reused: frozenset[int] | None) -> None:
    """Inductor lets a partition write a result over an input that is dead. The caller's tensor is not written."""
    code = GeneratedCode(None, reused=reused, is_partition=True)
    model, w = Model(cuda_on_cpu, writes_x=True, returns_x=True, code=code), values(7)
    compiled = Compiled(model, outputs=2)
    kept = []
    for step in range(10):
        x, y = values(step), values(2 * step)
        kept.append((x, y))
        out, result = compiled.checked(x, y, w)
        assert torch.equal(result, values(step) + 1), step
        del out, result


def test_output_in_memory_of_a_dead_input_is_not_the_input(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu, reuses_x=True)), values(7)
    check(compiled, w, calls=10)


def test_failed_recording_costs_only_the_graph(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu, writes_w=True), values(7)

    def fails(inputs: list[Any]) -> list[Any]:
        if cuda_on_cpu.capturing is not None:
            inputs.clear()
            raise RuntimeError("These storage data ptrs are not allocated in pool")
        return model(inputs)

    compiled = Compiled(fails)
    for step in range(5):
        before = w.clone()
        compiled.checked(values(step), values(2 * step), w)
        assert torch.equal(w, before + 1), "once a call"
    ((reason, calls),) = compiled.uncaptured().items()
    assert calls == 4
    assert "not allocated in pool" in reason
    assert cuda_on_cpu.ended == [one.cuda_graphs_thread_pool for one in managers()], "the allocator was told"


@pytest.mark.parametrize("failures", [2, 3])
def test_capture_that_another_thread_ends_is_repeated(cuda_on_cpu: CudaOnCpu, failures: int) -> None:
    model, w, left = Model(cuda_on_cpu), values(7), [failures]

    def ends(inputs: list[Any]) -> list[Any]:
        if cuda_on_cpu.capturing is not None and left[0]:
            left[0] -= 1
            inputs.clear()
            raise RuntimeError("operation failed due to a previous error during capture")
        return model(inputs)

    compiled = Compiled(ends)
    compiled.checked(values(1), values(2), w)

    def serve() -> None:
        for step in range(8):
            compiled.checked(values(step), values(2 * step), w)

    threads = in_threads(serve)
    assert len(compiled.reports) == (failures < manager.FAILURES_OF_THREADS)
    assert sum(compiled.uncaptured().values()) == (failures if compiled.reports else 8)
    assert cuda_on_cpu.have_handles == set(threads), "a thread's first capture may not make one"


@pytest.mark.parametrize("failing", [1, 2])
def test_failed_pool_check_costs_only_the_graph(
    failing: int, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first check runs before a warm-up, on what earlier functions left, the second on its results."""
    model, w = Model(cuda_on_cpu, writes_w=True), values(7)
    compiled, checks = Compiled(model, mutated_input_idxs=(2,)), []

    def check_memory_pool(*arguments: Any) -> None:
        checks.append(arguments)
        if len(checks) == failing:
            raise RuntimeError("These storage data ptrs are not allocated in pool")

    monkeypatch.setattr(torch_internals.cudagraph_trees, "check_memory_pool", check_memory_pool)
    held = None
    with torch_internals.inductor_config.patch("triton.slow_path_cudagraph_asserts", True):
        for step in range(6):
            before = w.clone()
            out = compiled.checked(values(step), values(2 * step), w)[0].clone()
            assert torch.equal(w, before + 1), "once a call"
            held = (out, out.clone()) if step == 0 else held
    assert held is not None
    assert torch.equal(*held)
    assert len(checks) >= failing
    (calls,) = [calls for reason, calls in compiled.uncaptured().items() if "not allocated in pool" in reason]
    if failing == 1:
        assert calls == 1, "another function may have left it there"
        assert "captured" in model.runs
    else:
        assert calls == 6
        assert model.runs == ["plain"] * 6


@pytest.mark.usefixtures("weights_let_go")
@pytest.mark.parametrize("shared", [False, True])
def test_parameter_that_is_written_is_never_copied(cuda_on_cpu: CudaOnCpu, shared: bool) -> None:
    """Parameters in its memory are not copied either. Calls that match none of a few recordings run uncaptured."""
    compiled = Compiled(Model(cuda_on_cpu, writes_w=True), mutated_input_idxs=(2,), static_inputs=(1, 2))
    kept = []
    for step in range(40):
        both = aligned(2 * COUNT).copy_(torch.arange(2 * COUNT) + step)
        w, y = both[:COUNT], both[COUNT:] if shared else values(3 * step)
        kept.append((w, y))
        before = w.clone()
        compiled.checked(values(step), y, w)
        assert torch.equal(w, before + 1), step
    assert len(compiled.reports) == moved_inputs.MOST_RECORDINGS
    assert all(2 not in {one.index for one in report.inputs} for report in compiled.reports)
    assert any(1 in {one.index for one in report.inputs} for report in compiled.reports) is not shared
    assert set(compiled.uncaptured()) == {reasons.INPUT_KEEPS_MOVING}


@pytest.mark.usefixtures("weights_let_go")
def test_written_parameter_is_recorded_while_replays_pay(cuda_on_cpu: CudaOnCpu) -> None:
    """A new cache for each prompt is read and written once for each token; a later prompt's may lie where one lay."""
    model = Model(cuda_on_cpu, writes_w=True)
    compiled = Compiled(model, mutated_input_idxs=(2,), static_inputs=(1, 2))
    y, caches = values(1), [values(2 + number) for number in range(moved_inputs.MOST_RECORDINGS + 6)]

    def generate(cache: torch.Tensor) -> None:
        for token in range(moved_inputs.REPLAYS_OF_USEFUL_RECORDINGS + 2):
            x, before = values(token), cache.clone()
            (out,) = compiled(x, y, cache)
            assert torch.equal(out, 2 * x + y * before) and torch.equal(cache, before + 1)

    for cache in caches:
        generate(cache)
    recorded = model.runs.count("captured")
    assert len(compiled.reports) == len(caches)
    for cache in caches:
        generate(cache)
    assert model.runs.count("captured") == recorded
    assert not compiled.functions[0].uncaptured()


def test_parameter_is_not_copied_where_memory_is_short(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cuda_on_cpu.tools), "free_bytes", lambda tools: 4 * COUNT)
    compiled = Compiled(Model(cuda_on_cpu))
    for swap in range(moved_inputs.MOST_RECORDINGS + 4):
        check(compiled, values(7 + swap), calls=1)
        cuda_on_cpu.memory["kept"].append(values(swap))
    assert len(compiled.reports) <= moved_inputs.MOST_RECORDINGS
    assert all(len(report.inputs) == 2 for report in compiled.reports)


def test_failure_after_the_capture_costs_only_indirection(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in (
        (examination, "find_pointer_uses"),
        (examination, "make_plan"),
        (examination, "displace"),
        (examination, "read_graph"),
        (session, "AppliedPlan"),
    ):
        with monkeypatch.context() as patch:

            def broken(*arguments: Any, **keywords: Any) -> Any:
                raise ZeroDivisionError("a defect of Encore's")

            patch.setattr(owner, name, broken)
            compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
            check(compiled, w)
            assert "ZeroDivisionError" in str(compiled.reports[0].off), name
            assert compiled.reports[0].copied_bytes == 2 * COUNT * 4, name


def test_no_memory_for_a_second_capture_copies_everything(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu), values(7)

    def short_of_memory(inputs: list[Any]) -> list[Any]:
        if cuda_on_cpu.capturing is not None and cuda_on_cpu.captures == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(inputs)

    compiled = Compiled(short_of_memory)
    check(compiled, w)
    (node,) = nodes()
    assert node.tracker is None
    assert node.non_static_input_idx == [0, 1]
    assert "out of memory" in str(compiled.reports[0].off)


def test_generators_are_registered_with_the_replayed_graph(cuda_on_cpu: CudaOnCpu) -> None:
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


def test_input_that_is_never_aligned_is_copied(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w, calls=2)
    (node,) = nodes()
    node.session.use.replays = -8  # work begins after some calls
    for step in range(40):
        compiled.checked(values(step, offset=1), values(-step), w)
    (report,) = compiled.reports
    assert (report.stage, report.off, report.waiting) == ("done", None, None)
    assert [one.indirect for one in report.inputs] == [False, True]
    assert report.inputs[0].reasons == (session.NOT_READABLE,)


# Inputs named in generated code are read in place without a proof; other uses are compared or copied.


def test_function_with_unknown_calls_is_captured_once(cuda_on_cpu: CudaOnCpu) -> None:
    model, w = Model(cuda_on_cpu, code=GeneratedCode("it calls a custom operator, mine::op")), values(7)
    compiled = Compiled(model)
    check(compiled, w)
    assert model.runs == ["plain", "captured"]
    assert "mine::op" in str(compiled.reports[0].off)
    assert compiled.reports[0].copied_bytes == 2 * COUNT * 4


USED_BY_PRODUCTS = {
    "triton_uses": {0: 1, 2: 1},
    "launches": (Launch("body", (0, 2)),),
    "products": frozenset({0, 1, 2}),
}
"""A product reads y as well."""

LAUNCHED = {"triton_uses": {0: 1, 1: 1, 2: 1}, "launches": (Launch("body", (0, 1, 2)),)}


@pytest.mark.parametrize("opaque", [None, "it takes part in a collective, _c10d_functional::all_reduce_"])
def test_named_inputs_are_read_in_place_without_a_capture(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, opaque: str | None
) -> None:
    """Nothing is captured or tried out, so it holds next to collectives too."""
    model, w = Model(cuda_on_cpu, code=GeneratedCode(opaque, **LAUNCHED)), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=8)
    assert model.runs == ["plain", "captured"]
    (report,) = compiled.reports
    assert (report.copied_bytes, report.pointer_bytes) == (0, 16)
    assert [one.indirect for one in report.inputs] == [True, True]


@pytest.mark.parametrize("opaque", [None, "it takes part in a collective, _c10d_functional::all_reduce_"])
def test_inputs_with_other_uses_are_compared_or_copied(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, opaque: str | None
) -> None:
    """y has a use that is not an argument of a Triton kernel: a second capture finds it, where there may be one."""
    code = GeneratedCode(opaque, **USED_BY_PRODUCTS)
    model, w = Model(cuda_on_cpu, code=code), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=14)
    (report,) = compiled.reports
    if opaque is None:
        assert model.runs == ["plain", "captured", "captured"]
        assert [one.indirect for one in report.inputs] == [True, True]
    else:
        assert model.runs == ["plain", "captured"]
        assert [one.indirect for one in report.inputs] == [True, False]
        assert "all_reduce_" in report.inputs[1].reasons[0]
        assert report.copied_bytes == COUNT * 4


def test_input_of_another_operator_is_copied(cuda_on_cpu: CudaOnCpu) -> None:
    """Its address is found in the graph, but a library may have it in memory as well."""
    compiled, w = Compiled(Model(cuda_on_cpu, code=GeneratedCode(None, products=frozenset({0})))), values(7)
    check(compiled, w, calls=12)
    (report,) = compiled.reports
    assert [one.indirect for one in report.inputs] == [True, False]
    assert report.inputs[1].reasons == (session.OTHER_USES,)


def test_named_inputs_need_no_comparison(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unexplained padding prevents in-place reading of all inputs but those whose uses are named."""

    made: list[int] = []

    def doubtful(*captures: Any, further: Sequence[Any], **options: Any) -> Analysis:
        made.append(len(further))
        reason = (Reason(ReasonCode.UNEXPLAINED, "a word changed"),)
        return Analysis(tuple(InputVerdict(index, (), reason) for index in (0, 1)), (UnexplainedWord(0, 0, 0),))

    monkeypatch.setattr(examination, "find_pointer_uses", doubtful)
    code = GeneratedCode(None, **USED_BY_PRODUCTS)
    model, w = Model(cuda_on_cpu, code=code), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=10)
    assert made == list(range(7)), "a control, a repeat and a third capture, and each again, one after another"
    assert model.runs == ["plain", "captured", *["captured"] * 7]
    (report,) = compiled.reports
    assert [one.indirect for one in report.inputs] == [True, False]
    assert report.inputs[1].reasons == ("a word changed",)
