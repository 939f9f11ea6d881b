"""A function is not recorded for excluded sizes, gets aligned inputs where it runs, and is recorded without loops."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, KNOWN, Compiled, Model, nodes, values

import optimizations
from optimizations import torch_internals
from optimizations.torch_internals.stock_trees import InputIndices
from optimizations.uncollected import uncollected


@pytest.mark.parametrize(("sizes", "captured"), [((4,), [4]), (((4, 7),), [4, 7])])
def test_excluded_sizes_run_uncaptured(cuda_on_cpu: CudaOnCpu, sizes: Any, captured: list[int]) -> None:
    model = Model(cuda_on_cpu)

    def scaled(inputs: list[Any]) -> list[Any]:
        x = inputs[-1]
        inputs.clear()
        return model([x, x, x])

    compiled = Compiled(scaled, static_inputs=())
    with torch_internals.inductor_config.patch({"triton.cudagraph_capture_sizes": sizes}):
        for given in (captured, [9, *captured[1:]]):
            for step in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                x = values(step)
                (result,) = compiled.function([*given, x])
                assert torch.equal(result, 2 * x + x * x)
                del result
    assert "captured" in model.runs and model.runs[-3:] == ["plain"] * 3
    assert len(compiled.functions) == 1


def test_misaligned_inputs_are_aligned_where_the_function_runs(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor checks no alignment on a CPU, so the test passes input 0 as one to check."""
    monkeypatch.setattr(torch_internals.cudagraph_trees, "get_input_idxs_to_check", lambda inputs, static: [0])
    seen: list[int] = []

    def writes(inputs: list[Any]) -> list[Any]:
        (tensor,) = inputs
        inputs.clear()
        seen.append(tensor.data_ptr() % 16)
        tensor.add_(1)
        return []

    compiled = Compiled(writes, static_inputs=(), mutated_input_idxs=(0,))
    tensor = aligned(8, offset=1)
    compiled.function([tensor])
    compiled.function([tensor])
    assert seen == [0, 0]
    assert torch.equal(tensor, torch.full((8,), 2.0)), "what was written into the copy is the caller's"


class Wide:
    """A function of a number and many parameters, whose capture needs no kernel."""

    code = KNOWN

    def __init__(self, cuda: CudaOnCpu) -> None:
        self.cuda = cuda

    def __call__(self, inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [torch.zeros(COUNT) if self.cuda.capturing is None else self.cuda.allocate(COUNT)]


IN_STOCKS_PLACE = ("__contains__", "_is_cuda_graph_recorded_tensor", "_is_alias_of_live_recorded_tensor")
"""Stock calls these for each input; each takes the same time for many inputs as for few."""


def calls_of_encore(compiled: Compiled, inputs: list[Any]) -> Counter[str]:
    """Return how often a call enters each function, loop or generator of Encore's."""
    package, entered = str(Path(optimizations.__file__).parent), Counter[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name not in IN_STOCKS_PLACE:
            entered[f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"] += 1

    torch.compiler.cudagraph_mark_step_begin()
    before = sys.getprofile()
    with uncollected():  # a collection calls Encore, too
        sys.setprofile(note)
        try:
            compiled.function(inputs)
        finally:
            sys.setprofile(before)
    return entered


def test_recordings_call_nothing_for_each_parameter(cuda_on_cpu: CudaOnCpu) -> None:
    """Neither the warm-up and the recording for another size of a function, nor the first two replays."""
    calls = []
    for count in (20, 60):
        compiled = Compiled(Wide(cuda_on_cpu), static_inputs=tuple(range(count)), inputs=count + 1)
        parameters = [values(index) for index in range(count)]
        for _ in range(4):
            calls_of_encore(compiled, [*parameters, 3])
        calls.append([calls_of_encore(compiled, [*parameters, 5]) for _ in range(4)])
        assert len(compiled.reports) == 2
    assert all(type(node.static_input_idxs) is InputIndices for node in nodes())
    for few, many in zip(*calls, strict=True):
        assert few.total() > 10
        assert few == many


@pytest.mark.parametrize("kept", [False, True])
def test_recorded_results_are_found_by_address(cuda_on_cpu: CudaOnCpu, kept: bool) -> None:
    """As stock finds them, in the path and among the recording's own, alive or not."""
    stock, calls = torch_internals.cudagraph_trees.CUDAGraphNode, [Compiled(Model(cuda_on_cpu)) for _ in range(3)]
    w = values(7)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        results = [w]
        for compiled in calls:
            results.append(compiled.function([values(1), results[-1], w])[0])
            if not kept:
                del results[:-1]
    path = [*nodes()[-1]._path_from_root]
    assert len(path) == 3
    metadata = [node.outputs_metadata[0] for node in path]
    for node in path:
        for tensor in [w, *(node._reconstruct_from_tensor_metadata(one) for one in metadata)]:
            for name in ("_is_cuda_graph_recorded_tensor", "_is_alias_of_live_recorded_tensor"):
                assert getattr(node, name)(tensor) == getattr(stock, name)(node, tensor)
