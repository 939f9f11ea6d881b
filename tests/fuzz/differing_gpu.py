"""A GPU for FX graphs, played by the CPU, which differs from it where real ones do.

* A transfer makes a copy, where on one device it would make an alias.
* Floating-point arithmetic comes out otherwise, in the last place.
* It has no kernel for products of integer matrices.
* An index out of range ends it, and cannot be caught as the CPU's error.
* Copies into pinned memory land late: at the latest when something reads the memory in stream order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx
from simulated_gpu.placement import OnCpu

from optimizations.placement import feeds, guards, staging
from optimizations.placement.observe import Observation
from optimizations.written_operands import tensors_in

ARITHMETIC = frozenset(
    ("add", "sub", "mul", "truediv", "sin", "sum", "cumsum", "matmul", "linspace", "floor", "iadd", "add_", "mul_")
)


class DeviceLost(RuntimeError):
    """An assertion failed on the device."""


class OnDifferingGpu(OnCpu):
    """Run a graph for the GPU on CPU tensors; `observation` has by node names where each value is."""

    def __init__(self, graph_module: torch.fx.GraphModule, observation: Observation) -> None:
        super().__init__(graph_module, observation)
        self.extra_traceback = False

    def run_node(self, n: torch.fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        on_gpu = any(facts.device.type == "cuda" for facts in self.observation.tensors.get(n.name, ()))
        given = [tensor for operand in n.all_input_nodes for tensor in tensors_in(self.env[operand])]
        if on_gpu and name == "matmul" and not all(tensor.is_floating_point() for tensor in given):
            raise DeviceLost("no kernel for products of integer matrices")
        if on_gpu and Landing.current is not None:
            for tensor in given:
                Landing.current.land(tensor.data_ptr())
        try:
            value = super().run_node(n)
        except IndexError as error:
            raise (DeviceLost(str(error)) if on_gpu else error) from None
        return _otherwise(value) if on_gpu and isinstance(value, torch.Tensor) and name in ARITHMETIC else value


def _otherwise(value: torch.Tensor) -> torch.Tensor:
    """`value`, a little off, in the same memory."""
    if value.dtype in (torch.float32, torch.float64):
        value.copy_(torch.nextafter(value, torch.full_like(value, float("inf"))))
    return value


class Landing:
    """Pinned tensors, and the values that are on their way into them."""

    current: Landing | None = None

    def __init__(self) -> None:
        self.pinned: dict[int, torch.Tensor] = {}
        self.coming: dict[int, torch.Tensor] = {}

    def pin(self, tensor: torch.Tensor) -> None:
        self.pinned[tensor.data_ptr()] = tensor

    def send(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        self.coming[tensor.data_ptr()] = values

    def land(self, address: int) -> None:
        values = self.coming.pop(address, None)
        if values is not None:
            self.pinned[address].copy_(values)

    def land_all(self) -> None:
        for address in list(self.coming):
            self.land(address)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Placement sees these tensors as pinned, and copies from them in stream order land what is on its way."""
        stock: Callable[..., None] = staging.copy_in_stream_order

        def is_pinned(tensor: torch.Tensor) -> bool:
            return tensor.data_ptr() in self.pinned

        def copy(destination: torch.Tensor, source: torch.Tensor, *, wait: bool) -> None:
            self.land(source.data_ptr())
            stock(destination, source, wait=wait)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Landing, "current", self))
            for module in (feeds, guards, staging):
                stack.enter_context(mock.patch.object(module, "is_pinned", is_pinned))
            for module in (feeds, staging):
                stack.enter_context(mock.patch.object(module, "copy_in_stream_order", copy))
            yield


def shared(values: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return which tensors share memory, so that a write to one changes the other."""
    storages = [value.untyped_storage().data_ptr() if value.numel() else -1 - i for i, value in enumerate(values)]
    return [(one, other) for other in range(len(values)) for one in range(other) if storages[one] == storages[other]]
