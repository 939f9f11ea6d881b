"""Large inputs named in generated code, and weights whose data is replaced, are read where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import Capturable, CompiledOnCpu
from simulated_gpu.driver import Function, Node, word
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, Compiled, Model, check, nodes, values
from torch import nn

import optimizations
from optimizations import torch_internals
from optimizations.concurrency.branches import BRANCHES, CHAIN
from optimizations.graph.memory import MemoryRanges
from optimizations.graph.records import MemoryRange
from optimizations.in_place import without_placeholder as chooser
from optimizations.in_place.generated import GeneratedCode, Launch
from optimizations.in_place.without_placeholder import without_placeholder
from tests.optimizations.concurrency.test_branches import TwoKernels, called, faster
from tests.optimizations.trees.test_node import LAUNCHED
from tests.optimizations.trees.test_parameters import Net

__all__ = ["faster"]

CODE = GeneratedCode(None, **LAUNCHED)
NOTHING = MemoryRanges(())


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of the tests count as large."""
    monkeypatch.setattr(chooser, "LEAST_BYTES", COUNT * 4)


def placeholders(cuda: CudaOnCpu) -> int:
    return len(cuda.memory["placeholders"])


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("selection", ["off", "rule"])
def test_large_named_inputs_get_no_placeholder(
    cuda_on_cpu: CudaOnCpu, large: None, monkeypatch: pytest.MonkeyPatch, lean: bool, selection: Any
) -> None:
    monkeypatch.setattr("optimizations.selection.COPY_BYTES_PER_US", 1.0)
    monkeypatch.setattr("optimizations.selection.MOST_TINY_KERNELS", -1)
    model, w = Model(cuda_on_cpu, code=CODE), values(7)
    compiled = Compiled(model, lean=lean, selection=selection)
    check(compiled, w, calls=6)
    (report,) = compiled.reports
    assert placeholders(cuda_on_cpu) == 0 and model.runs == ["plain", "captured"]
    assert (report.stage, report.total_copied_bytes) == ("done", 0)
    assert [(one.indirect, one.has_placeholder) for one in report.inputs] == [(True, False)] * 2
    assert report.moves == 4, "it follows the inputs from the first replay on"


def test_stocks_pool_check_passes(cuda_on_cpu: CudaOnCpu, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock checks by default that every ordinary input is in the pool. A caller's tensor is not there."""
    checked = []

    def check_memory_pool(device: int, pool: Any, live: Any) -> None:
        checked.append(pool)
        blocks = [*cuda_on_cpu.memory["placeholders"], *cuda_on_cpu.memory[tuple(pool)]]
        if not {one.data_ptr() for one in live if one()} <= {one.data_ptr() for one in blocks}:
            raise RuntimeError("These storage data ptrs are not allocated in the pool but should be")

    monkeypatch.setattr(torch_internals.cudagraph_trees, "check_memory_pool", check_memory_pool)
    model = Model(cuda_on_cpu, code=CODE)
    compiled = Compiled(model)
    with torch_internals.inductor_config.patch("triton.slow_path_cudagraph_asserts", True):
        check(compiled, values(7), calls=4)
    assert checked and model.runs == ["plain", "captured"]
    assert [one.has_placeholder for one in compiled.reports[0].inputs] == [False, False]


@pytest.mark.parametrize("lean", [True, False])
def test_unaligned_input_is_cloned_for_its_call(cuda_on_cpu: CudaOnCpu, large: None, lean: bool) -> None:
    model, w = Model(cuda_on_cpu, code=CODE), values(7)
    compiled = Compiled(model, lean=lean)
    check(compiled, w, calls=3)
    for step in range(4):
        x, y = values(step, offset=step % 2), values(-step)
        kept = x.clone()
        (out,) = compiled(x, y, w)
        assert torch.equal(out, 2 * x + y * w) and torch.equal(x, kept), step
    (report,) = compiled.reports
    assert report.total_copied_bytes == 2 * COUNT * 4 and placeholders(cuda_on_cpu) == 0
    assert model.runs == ["plain", "captured"]


def test_result_of_the_graph_as_input_is_cloned(cuda_on_cpu: CudaOnCpu, large: None) -> None:
    """It lies in memory that the graph writes."""
    model, w = Model(cuda_on_cpu, code=CODE), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=3)
    node = nodes()[0]
    (memory,) = cuda_on_cpu.memory[tuple(node.cuda_graphs_pool)]
    memory.copy_(torch.arange(memory.numel()))
    x, y = memory[:COUNT], values(1)
    expected = 2 * x + y * w
    (out,) = compiled(x, y, w)
    assert torch.equal(out, expected)


def test_recording_that_cannot_be_patched_is_made_again(
    cuda_on_cpu: CudaOnCpu, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph has other kernels than the generated code. Its recording runs the call that was recorded."""
    code = GeneratedCode(None, triton_uses=LAUNCHED["triton_uses"], launches=(Launch("other", (0, 1, 2)),))
    model, w = Model(cuda_on_cpu, code=code), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=6)
    assert model.runs == ["plain", *["captured"] * 3], "recorded, recorded again, compared"
    assert placeholders(cuda_on_cpu) == 2, "of the second recording"
    assert all(one.has_placeholder for one in compiled.reports[-1].inputs)


@pytest.mark.parametrize("winner", [BRANCHES, CHAIN])
def test_race_of_branches_uses_moved_inputs(
    cuda_on_cpu: CudaOnCpu, large: None, faster: list[str], winner: str
) -> None:
    """The race instantiates the graph again, which then holds the addresses of the recording."""
    faster[0] = winner
    launches = (Launch("body", (0, 1, 2)),) * 2
    code = GeneratedCode(None, triton_uses={0: 2, 1: 2, 2: 2}, launches=launches)
    compiled, w = Compiled(TwoKernels(cuda_on_cpu, code=code), outputs=2, concurrency="auto"), values(7)
    called(compiled, w, 5)
    (during,) = compiled.reports
    assert during.stage == "racing" and all(one.indirect for one in during.inputs)
    called(compiled, w, 25)
    (report,) = compiled.reports
    assert report.concurrency is not None and report.concurrency.decision == winner
    assert report.stage == "done" and placeholders(cuda_on_cpu) == 0


def test_recording_without_placeholders_is_in_no_race_of_copies(cuda_on_cpu: CudaOnCpu, large: None) -> None:
    """With `selection="measure"` copies are an alternative, which needs placeholders."""
    model, w = Model(cuda_on_cpu, code=CODE), values(7)
    compiled = Compiled(model, selection="measure")
    check(compiled, w, calls=3)
    assert placeholders(cuda_on_cpu) == 2


def test_inputs_are_referenced_until_the_recording_has_run(cuda_on_cpu: CudaOnCpu, large: None) -> None:
    model, w = Model(cuda_on_cpu, code=CODE), values(7)
    compiled = Compiled(model)
    check(compiled, w, calls=1)
    torch.compiler.cudagraph_mark_step_begin()
    (out,) = compiled.function([values(1), values(2), w])  # nothing else holds these two
    assert torch.equal(out, 2 * values(1) + values(2) * w)


def chosen(
    code: GeneratedCode = CODE, inputs: Any = None, written: MemoryRanges = NOTHING, selects: bool = False
) -> Any:
    given = inputs or [values(1), values(2), values(3)]
    return without_placeholder(code, given, (0, 1), lambda: written, selects=selects)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, large: None) -> None:
    monkeypatch.setattr(chooser, "ineligible_reason", lambda value: None)


X, Y, Z, BLOCK = values(1), values(2), values(3), aligned(2 * COUNT)
IN_Y = MemoryRanges([MemoryRange(address=Y.data_ptr() + 8, size_bytes=4)])
FEW_USES = GeneratedCode(None, triton_uses={0: 2, 1: 2})
CHOICES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "named inputs": ({}, [0, 1]),
    "a collective": ({"code": GeneratedCode(None, collective=True, **LAUNCHED)}, []),
    "other uses of y": ({"code": GeneratedCode(None, triton_uses={0: 1, 2: 1}, launches=LAUNCHED["launches"])}, []),
    "more nodes than the CPU sets": ({"code": GeneratedCode(None, triton_uses={0: 3, 1: 3, 2: 1})}, []),
    "a result in x": ({"code": GeneratedCode(None, reused=frozenset({0}), **LAUNCHED)}, [1]),
    "x is written": ({"code": GeneratedCode(None, written=frozenset({0}), **LAUNCHED)}, [1]),
    "y in written memory": ({"inputs": [X, Y, Z], "written": IN_Y}, [0]),
    "x is unaligned": ({"inputs": [values(1, offset=1), Y, Z]}, [1]),
    "x and y overlap": ({"inputs": [BLOCK[:COUNT], BLOCK[4 : COUNT + 4], Z]}, []),
    "y overlaps a weight": ({"inputs": [X, BLOCK[:COUNT], BLOCK[COUNT - 1 :]]}, [0]),
    "copies are cheap": ({"code": FEW_USES, "selects": True}, []),
    "one copy is not": ({"code": FEW_USES, "selects": True, "inputs": [torch.empty(10 * 2**20), Y, Z]}, [0]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_chooser_takes_inputs_whose_uses_are_all_known(on_gpu: None, case: str) -> None:
    arguments, expected = CHOICES[case]
    assert chosen(**arguments) == expected


def test_chooser_keeps_small_placeholders(monkeypatch: pytest.MonkeyPatch, on_gpu: None) -> None:
    monkeypatch.setattr(chooser, "LEAST_BYTES", COUNT * 4 + 1)
    assert chosen() == []


# Weights whose data is replaced in place, in whole programs: new addresses and metadata.


class Shifted(nn.Module):
    """Its weight lies as weights do in a vector of several: where no kernel wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(aligned(16, offset=16).copy_(torch.arange(16.0)).view(4, 4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.shift.sum()


def given_data(net: Shifted, step: int, size: int) -> torch.Tensor:
    """The data that the buffer has now, at an address of its own."""
    data = aligned(size).copy_(torch.arange(size) + step)
    net.shift.set_(data)
    return data


@pytest.mark.usefixtures("weights_let_go")
def test_weight_next_to_an_unmoved_one_is_copied(compiled_on_cpu: CompiledOnCpu) -> None:
    net, kept = Shifted(), []
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(24):
            kept.append(given_data(net, step, 4))
            x = torch.full((3, 4), 0.01 * step)
            torch.testing.assert_close(run(x), net(x))
    assert sum(compiled_on_cpu.captures) < 8


@pytest.mark.usefixtures("weights_let_go")
def test_weight_whose_address_is_hidden_is_copied(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel holds the address in an unknown form. Detecting this takes eight captures, once."""
    hiding = Function("hiding", (8,), lambda hidden: None)
    compiled_on_cpu.cuda.driver.add_function(hiding)
    captured = Capturable.__call__

    def hides_an_address(function: Capturable, inputs: list[Any]) -> Any:
        cuda = compiled_on_cpu.cuda
        if cuda.capturing is not None:
            weight = next(one for one in inputs if one.shape == (4, 4))
            cuda.driver.add_node(cuda.capturing.graph, Node("KERNEL", hiding, [word(3 * weight.data_ptr())]))
        return captured(function, inputs)

    monkeypatch.setattr(Capturable, "__call__", hides_an_address)
    net, kept = Net(), []
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(40):
            kept.append(net.first.data)
            net.first.data = aligned(16).view(4, 4).fill_(0.01 * step)
            for x in torch.full((2, 3, 4), 0.1 * step):
                torch.testing.assert_close(run(x), net(x))
    (report,) = optimizations.report()
    assert len(report.recordings) == 3
    assert not any(one.indirect for one in report.recordings[-1].inputs if one.data_bytes == 64)
    assert sum(compiled_on_cpu.captures) <= 3 * (1 + 8)


class Two(nn.Module):
    """Each weight is used by an operator that the generated code calls, so that only a trial can tell how."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(aligned(16).view(4, 4).copy_(torch.eye(4) / 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first).clone() @ self.second


@pytest.mark.usefixtures("weights_let_go")
@pytest.mark.parametrize("then", [("second",), ("first", "second")])
def test_weight_that_moves_after_another_is_copied_at_once(
    compiled_on_cpu: CompiledOnCpu, then: tuple[str, ...]
) -> None:
    net, kept = Two(), []
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(40):
            for name in ("first",) if step < 12 else then:
                weight = net.get_parameter(name)
                kept.append(weight.data)
                weight.data = aligned(16).view(4, 4).fill_(0.01 * step)
            for x in torch.full((2, 3, 4), 0.1 * step):
                torch.testing.assert_close(run(x), net(x))
            if step == 11:
                (report,) = optimizations.report()
                assert [len(one.inputs) for one in report.recordings] == [1, 1, 2]
    (report,) = optimizations.report()
    assert [len(one.inputs) for one in report.recordings] == [1, 1, 2, 3]
