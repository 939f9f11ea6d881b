"""A function is not recorded for excluded sizes, and gets aligned inputs where it really runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, values

from optimizations import torch_internals


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
