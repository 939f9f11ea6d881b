"""Define the interface of a node updater.

An updater says which pointers it can replace and what it needs to know of a node, and attaches to a graph. Each is a
module of this package with the name that `options.Choice` has for it. It holds an `APPLIER`, which `applied` finds
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimizations.compiled_cache import CompiledCache
from optimizations.graph.editing import EditableGraph
from optimizations.graph.plan import PlannedNode, PlansNodes
from optimizations.graph.records import KernelNode
from optimizations.graph.tensor_map import ReplaceAddress

BuildKernel = Callable[[str, CompiledCache], bytes]
"""Gives the cubin of one of Encore's own kernels for a target (`sm_90`), from the cache or compiled."""


class ApplierGpu(Protocol):
    """Define the facts about a GPU that decide whether an updater can be used. `device.DeviceTools` has them."""

    @property
    def target(self) -> str:
        """Return what to compile for, such as `sm_90`."""

    @property
    def cache(self) -> CompiledCache:
        """Return the cache of compiled kernels on disk."""

    def driver_version(self) -> int:
        """Return the driver's version as `cuDriverGetVersion` gives it: 12040 is CUDA 12.4."""

    def table_refusal(self) -> str | None:
        """Return why there cannot be a pointer table; None where its kernels are built."""


class ApplierTools(Protocol):
    """Define the tools of a device and of the captured function that updaters use."""

    device: torch.device
    replace_address: ReplaceAddress | None

    def is_current(self) -> bool:
        """Return whether the device is the current one."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is the current one."""

    def still_read(self, memory: Iterable[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        """Keep this memory from reuse until the work now on the stream (None: the current one) is done."""

    def table_function(self, capacity: int) -> Any:
        """Return the kernel that writes up to `capacity` words of a pointer table, loaded."""

    def own_function(self, build: BuildKernel, name: str) -> Any:
        """Return the kernel `name` of what `build` gives, loaded."""

    def rewritten_function(self, parameters: Sequence[int], record: KernelNode) -> Any:
        """Return the Triton kernel of this node with these parameters dereferenced, loaded."""


@dataclass(frozen=True, slots=True)
class AddressPlace:
    """Hold a cell, `size_bytes` long, for the address of `input` plus `delta`."""

    input: int
    delta: int
    size_bytes: int
    cell: AddressCell


class AddressCell(Protocol):
    """Define a place for an address: assigning to `value` writes it."""

    value: Any


class NodeUpdate(Protocol):
    """Define a node that can be set again and again."""

    @property
    def places(self) -> Iterable[AddressPlace]:
        """Return everything that depends on an address."""

    def set(self, executable: Any) -> None:
        """Give what the cells hold now to the node in `executable`."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Hold the changes that an updater made to a graph.

    Attributes:
        updates: nodes that the host sets when an input has moved.
        first: handles of nodes that it added, to run before everything that was captured, in this order.
        device_updatable: the graph now holds device-updatable nodes, and must be uploaded before its first launch.
        failure: what went wrong on the device in an earlier launch, or None; waits for the device.
        memory: of the device, what the graph reads besides the table; to be kept as long as the graph.
    """

    updates: Sequence[NodeUpdate] = ()
    first: Sequence[Any] = ()
    device_updatable: bool = False
    failure: Callable[[], str | None] | None = None
    memory: Sequence[torch.Tensor] = ()


class Applier(PlansNodes, Protocol):
    """Define a node updater, which writes the addresses of moved inputs into the nodes of a graph."""

    def unavailable(self, gpu: ApplierGpu) -> str | None:
        """Return why it cannot be used on this GPU; None where it can. May compile kernels."""

    def attach(
        self, target: EditableGraph, nodes: Sequence[PlannedNode], table_address: int, tools: ApplierTools
    ) -> Attached:
        """Change `target`, which is not instantiated yet, so that these nodes get their addresses.

        Args:
            nodes: what its `planned` returned.
            table_address: where the pointer table is; 0 where no node of the plan needs one.

        Raises:
            CudaCallFailed, AddressRefused: the graph cannot be changed as planned.
        """
