"""Steady calls of recordings that are patched: for which inputs they are not, and what is done for each launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.driver import Function, floats
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, KNOWN, Compiled, Model, check, nodes, values
from simulated_gpu.work import aligned

from optimizations.in_place import addresses
from optimizations.trees import reasons
from optimizations.trees.containers import managers
from tests.optimizations.trees.test_lean import call, full_ways, slow_reasons

__all__ = ["full_ways"]


class MadeForStrides(Model):
    """Its kernel reads `w` by the strides that it has when it is captured, as one of Inductor's does."""

    def __init__(self, cuda: CudaOnCpu) -> None:
        super().__init__(cuda, code=KNOWN)
        self.dense = self.body
        self.strided = Function("strided", (8, 8, 8, 8), self._strided)
        cuda.driver.add_function(self.strided)

    def _strided(self, x: bytes, y: bytes, w: bytes, out: bytes) -> None:
        every = torch.tensor(list(floats(int.from_bytes(w, "little"), 2 * COUNT))[::2])
        self._body(x, y, every.data_ptr().to_bytes(8, "little"), out)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.body = self.dense if inputs[2].is_contiguous() else self.strided
        return super().__call__(inputs)


def strided() -> torch.Tensor:
    return aligned(2 * COUNT)[::2].copy_(values(9))


def unaligned() -> torch.Tensor:
    return values(9, offset=1)


def patched(cuda: CudaOnCpu) -> tuple[Compiled, list[torch.Tensor]]:
    """A function whose recording is patched for ever new weights, which it may write."""
    compiled, weights = Compiled(MadeForStrides(cuda), mutated_input_idxs=(2,)), [values(step) for step in range(12)]
    for _ in range(4):
        for w in weights:
            check(compiled, w, calls=2)
    compiled.functions[0]._full_ways.clear()
    return compiled, weights


@pytest.mark.usefixtures("weights_let_go")
@pytest.mark.parametrize(
    ("weight", "reason"), [(strided, reasons.OTHER_GEOMETRY), (unaligned, reasons.FIXED_INPUT_MOVED)]
)
def test_steady_call_does_not_patch_an_unreadable_weight(
    cuda_on_cpu: CudaOnCpu, full_ways: list[Any], weight: Callable[[], torch.Tensor], reason: str
) -> None:
    """Kernels rely on the strides and the alignment that they were recorded with."""
    compiled, weights = patched(cuda_on_cpu)
    full_ways.clear()
    call(compiled, weights[5])
    assert full_ways == []
    for calls in [calls for one in managers() for found in one.fast_calls._calls.values() for calls in found.values()]:
        calls[:] = [one for one in calls if one.tracker is not None and one.tracker.fixed]
        assert len(calls) == 1
    call(compiled, weight())
    assert slow_reasons(compiled) == [reason]


@pytest.mark.usefixtures("weights_let_go")
def test_written_node_is_not_written_again_without_a_move(
    cuda_on_cpu: CudaOnCpu, full_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, weights = patched(cuda_on_cpu)
    (tracker,) = [one.tracker for one in nodes() if one.tracker is not None and one.tracker.fixed]
    settled: list[int] = []
    settle = tracker._pointers.settle

    def noted() -> None:
        settled.append(1)
        settle()

    monkeypatch.setattr(tracker._pointers, "settle", noted)
    full_ways.clear()
    x, y = values(1), values(2)
    found = []
    for w in [weights[5]] * 4 + [weights[6]] * 3:
        assert torch.equal(compiled(x, y, w)[0], 2 * x + y * w)
        assert not tracker.pending
        found.append(len(settled))
    assert full_ways == []
    assert found == [0, 1, 1, 1, 1, 2, 2], "once, by the call behind the one that moved"


@pytest.mark.usefixtures("weights_let_go")
def test_addresses_of_weights_are_compared_once_in_a_call(
    cuda_on_cpu: CudaOnCpu, full_ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a thousand of them."""
    compiled, weights = patched(cuda_on_cpu)
    call(compiled, weights[5])
    compared: list[list[int]] = []
    equal = addresses._data_ptrs_equal

    def noted(inputs: Any, expected: Any, indices: list[int]) -> bool:
        compared.append(indices)
        return bool(equal(inputs, expected, indices))

    monkeypatch.setattr(addresses, "_data_ptrs_equal", noted)
    full_ways.clear()
    call(compiled, weights[5])
    assert full_ways == []
    assert sorted(compared) == [[0, 1], [2]]
