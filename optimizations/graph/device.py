"""Provide the driver, the node updaters and Encore's own kernels of one GPU."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.compiled_cache import CompiledCache, default_directory
from optimizations.graph import table
from optimizations.graph.driver import LoadedModules, check
from optimizations.graph.plan import Available
from optimizations.graph.prelude import against_prelude
from optimizations.graph.prelude_check import failed_prelude
from optimizations.graph.protocol import BuildKernel
from optimizations.graph.records import CapturedGraph, KernelNode
from optimizations.graph.tensor_map import ReplaceAddress, driver_replace_address
from optimizations.one_line import one_line

TENSOR_MAP_CAPABILITY = (9, 0)
"""First compute capability with tensor maps."""


class DeviceTools:
    """Hold the tools of one GPU. Kernels are built and loaded when they are first needed.

    Args:
        driver: the module `cuda.bindings.driver`.
        target: what to compile for, such as `sm_90`.
        replace_address: how a tensor map's address is replaced; None where the GPU has no tensor maps.
    """

    def __init__(
        self,
        driver: Any,
        device: torch.device,
        target: str,
        cache: CompiledCache,
        replace_address: ReplaceAddress | None,
    ) -> None:
        self.driver = driver
        self.device = device
        self.replace_address = replace_address
        self.target = target
        self.cache = cache
        self._modules = LoadedModules(driver)

    @classmethod
    def of(cls, index: int) -> DeviceTools:
        """Return the tools of CUDA device `index`.

        Raises:
            ImportError: `cuda.bindings` is missing; it comes with torch's CUDA wheels.
        """
        from cuda.bindings import driver

        device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(device)
        has_maps = capability >= TENSOR_MAP_CAPABILITY
        return cls(
            driver,
            device,
            "sm_{}{}".format(*capability),
            CompiledCache(default_directory()),
            driver_replace_address(driver) if has_maps else None,
        )

    @functools.cached_property
    def against_prelude(self) -> str | None:
        """Return why graphs can have no prelude on this GPU; None where they can.

        Its kernels are built, and a small graph shows that they work. Waits for that graph.
        """
        reason = self.table_refusal() or against_prelude(self.driver_version(), self.target, self.cache)
        if reason is not None:
            return reason
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                return failed_prelude(self.driver, self, self.stream())
        except RuntimeError as error:
            return one_line(error)

    def driver_version(self) -> int:
        """Return the driver's version as `cuDriverGetVersion` gives it: 12040 is CUDA 12.4."""
        return int(check(self.driver.cuDriverGetVersion))

    def table_refusal(self) -> str | None:
        """Return why there cannot be a pointer table; None where its kernels are built."""
        try:
            for capacity in table.CAPACITIES:
                table.build_table_kernel(self.target, self.cache, capacity)
        except table.TableUnavailable as error:
            return str(error)
        return None

    def table_function(self, capacity: int) -> Any:
        """Return the kernel that writes up to `capacity` words of a pointer table, loaded."""
        image = table.build_table_kernel(self.target, self.cache, capacity)
        return self._modules.function(image, table.KERNEL_NAME)

    def own_function(self, build: BuildKernel, name: str) -> Any:
        """Return the kernel `name` of what `build` gives, loaded."""
        return self._modules.function(build(self.target, self.cache), name)

    def is_current(self) -> bool:
        """Return whether the device is the current one."""
        return bool(torch_internals.current_device() == self.device.index)

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is the current one."""
        return torch.cuda.device(self.device)

    def stream(self) -> Any:
        """Return the current stream of the device (`CUstream`)."""
        return self.driver.CUstream(torch_internals.current_raw_stream(self.device.index))

    def still_read(self, memory: Iterable[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        """Keep this memory from reuse until the work now on the stream (None: the current one) is done."""
        stream = torch.cuda.current_stream(self.device) if stream is None else stream
        with torch_internals.disable_current_modes():  # it is an operator, and may be called from anywhere
            for tensor in memory:
                tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Return the bytes of device memory that are free."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def unload(self) -> None:
        """Unload all kernels. No graph may use them any more."""
        self._modules.unload()


class RecordingTools:
    """Hold the tools of a device for one function, which launches `kernels` (the driver's names) as Triton kernels.

    It is an `in_place.examination.Tools`.
    """

    def __init__(self, tools: DeviceTools, kernels: Collection[str]) -> None:
        self.driver = tools.driver
        self.device = tools.device
        self.replace_address = tools.replace_address
        self.table_function = tools.table_function
        self.own_function = tools.own_function
        self.is_current = tools.is_current
        self.on_device = tools.on_device
        self.stream = tools.stream
        self.still_read = tools.still_read
        self.synchronize = tools.synchronize
        self.free_bytes = tools.free_bytes
        self._tools = tools
        self._kernels = kernels

    def available(self, graph: CapturedGraph) -> Available:
        """Return what can be used on the nodes of `graph`."""
        nodes = (path for path, node in graph.walk() if isinstance(node, KernelNode) and node.name in self._kernels)
        return Available(frozenset(nodes), lambda: self._tools.against_prelude)


_DEVICES: dict[int, DeviceTools] = {}


def device_tools(index: int) -> DeviceTools:
    """Return the tools of CUDA device `index`, the same ones until `unload_kernels`.

    Raises:
        ImportError: `cuda.bindings` is missing; it comes with torch's CUDA wheels.
    """
    if index not in _DEVICES:
        _DEVICES[index] = DeviceTools.of(index)
    return _DEVICES[index]


def unload_kernels() -> None:
    """Unload Encore's kernels on all devices. No graph may use them any more."""
    while _DEVICES:
        index, tools = _DEVICES.popitem()
        with torch.cuda.device(index):
            tools.synchronize()
            tools.unload()
