"""Define the places of a graph that hold addresses, and the tools of a device that node updaters use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimizations.compiled_cache import CompiledCache
from optimizations.graph.tensor_map import ReplaceAddress

BuildKernel = Callable[[str, CompiledCache], bytes]
"""Gives the cubin of one of Encore's own kernels for a target (`sm_90`), from the cache or compiled."""


class UpdaterTools(Protocol):
    """Define the tools of a device that node updaters use."""

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
