"""Callers get new tensors from inference and forwards on every call; a backward's are made again once changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from binding_programs import WeightedSine
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, values
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import optimizations
from optimizations.trees.containers import managers
from tests.optimizations.trees.test_parameters import Net
from tests.optimizations.trees.test_parameters import values as rows

W = values(7)

CHANGES: list[Callable[[torch.Tensor], Any]] = [
    lambda y: y.t_() if y.ndim > 1 else y.unsqueeze_(0).t_(),
    lambda y: y.unsqueeze_(0),
    lambda y: y.requires_grad_(),
    lambda y: y.mul_(torch.ones(1, requires_grad=True)),
    lambda y: y.set_(torch.zeros(2, 3)),
    lambda y: setattr(y, "data", torch.zeros(2, 3)),
    lambda y: setattr(y, "data", y.data[:1]),
    lambda y: setattr(y, "__class__", type("Sub", (torch.Tensor,), {})),
]

ATTACHED: list[Callable[[torch.Tensor], Any]] = [
    lambda y: setattr(y, "name_of_the_callers_own", 1),
    lambda y: setattr(y, "grad", torch.zeros_like(y)),
    lambda y: (y.requires_grad_(), y.sum().backward(), y.requires_grad_(False)),
    lambda y: (y.requires_grad_(), y.register_hook(torch.neg), y.detach_()),
    lambda y: REFERENCES.append(weakref.ref(y)),
]
REFERENCES: list[Any] = []
if hasattr(torch.Tensor, "rename_"):  # PyTorch 2.13 removed names of dimensions
    CHANGES.append(lambda y: y.rename_(*"abc"[: y.ndim]))


def settled(cuda: CudaOnCpu, **options: Any) -> Compiled:
    compiled = Compiled(Model(cuda), **options)
    check(compiled, W, calls=8)
    return compiled


def result_of(compiled: Compiled, start: float) -> torch.Tensor:
    """Return the result object of a call, with correct values."""
    return compiled.checked(values(start), values(start + 1), W)[0]


def assert_new(result: torch.Tensor) -> None:
    """Check that nothing of an earlier caller's is left in a result."""
    assert type(result) is torch.Tensor and result.shape == W.shape and result.stride() == W.stride()
    assert not (result.requires_grad or vars(result) or result._backward_hooks or result.grad is not None)
    assert weakref.getweakrefcount(result) == 0


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize(
    ("direction", "change"),
    [
        *((direction, change) for direction in ("inference", "forward", "backward") for change in CHANGES),
        *(("backward", change) for change in ATTACHED),
    ],
)
def test_change_of_a_result_does_not_persist(
    cuda_on_cpu: CudaOnCpu, lean: bool, direction: str, change: Callable[[torch.Tensor], Any]
) -> None:
    is_backward = direction == "backward"
    compiled = settled(cuda_on_cpu, lean=lean, is_inference=direction == "inference", is_backward=is_backward)
    replays = cuda_on_cpu.replays
    for start in range(4):
        result = result_of(compiled, start)
        assert_new(result)
        reference = weakref.ref(result)
        change(result)
        del result
        assert is_backward or reference() is None, "nothing else holds what a caller gets"
        del reference
    assert cuda_on_cpu.replays == replays + 4


class Sees:
    """A mode that lists what it observes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def see(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.seen.append(function)
        return function(*arguments, **(keywords or {}))


class SeesFunctions(Sees, TorchFunctionMode):
    __torch_function__ = Sees.see


class SeesOperators(Sees, TorchDispatchMode):
    __torch_dispatch__ = Sees.see


@pytest.mark.parametrize("mode", [SeesFunctions, SeesOperators])
def test_dispatch_modes_do_not_observe_result_creation(cuda_on_cpu: CudaOnCpu, mode: Any) -> None:
    compiled = settled(cuda_on_cpu)
    node = managers()[0].current_node
    with mode() as sees:
        results = node.results.of_call([])
        sees.seen.clear()
        again = node.results.of_call([])
        assert sees.seen == []
    assert type(again[0]) is torch.Tensor and again[0] is not results[0]
    result_of(compiled, 3)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_results_of_calls_inside_transforms_are_plain(cuda_on_cpu: CudaOnCpu, transform: Any) -> None:
    compiled = settled(cuda_on_cpu)
    node = managers()[0].current_node
    inside: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.extend(node.results.of_call([]))
        return x.sum()

    transform(function)(torch.ones(2))
    assert type(inside[0]) is torch.Tensor
    assert not torch._C._functorch.is_functorch_wrapped_tensor(inside[0])
    del inside[:]
    result_of(compiled, 3)


@pytest.mark.parametrize("lean", [True, False])
def test_dropped_forward_does_not_block_other_models(compiled_on_cpu: CompiledOnCpu, lean: bool) -> None:
    model, evaluated = (torch.compile(net, backend="encore", options={"lean": lean}) for net in (Net(), WeightedSine()))
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        model(rows(step))
        with torch.inference_mode():
            torch.compiler.cudagraph_mark_step_begin()
            evaluated(rows(step))
    uncaptured = [one.reason for report in optimizations.report() for one in report.uncaptured]
    assert all("kernels" in one for one in uncaptured), "selection alone"
