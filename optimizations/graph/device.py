"""Provide the driver, and the kernels of Encore, of one GPU.

A kernel is built once in a process. To build all takes some tenths of a second, so a thread of its own does this while
Inductor compiles the first function (`prelude_check.build_early`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.driver import check
from optimizations.graph.tensor_map import driver_replace_address

TENSOR_MAP_CAPABILITY = (9, 0)
"""First compute capability with tensor maps."""

BuildKernel = Callable[..., bytes]
"""A function that returns the cubin of a kernel of Encore for a target (`sm_90`)."""

_CUBINS: dict[tuple[Any, ...], bytes] = {}
_BUILDING = threading.Lock()


def cubin(build: BuildKernel, target: str, *arguments: Any) -> bytes:
    """Return what `build` returns for a target and these arguments. It is called once, whatever thread asks first.

    Raises:
        KernelUnavailable: it cannot be built; the next call tries again.
    """
    key = build, target, *arguments
    with _BUILDING:
        if key not in _CUBINS:
            _CUBINS[key] = build(target, *arguments)
        return _CUBINS[key]


def target_of(device: torch.device | int) -> str:
    """Return the target of kernels for a GPU, such as `sm_90`."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


class DeviceTools:
    """Hold the tools of one GPU. Kernels are built and loaded when they are first needed.

    Args:
        driver: the module `cuda.bindings.driver`.
        device: the GPU.
        against_prelude: determines why graphs can have no prelude on it.

    Attributes:
        replace_address: replaces a tensor map's address; None if the GPU has no tensor maps.
    """

    def __init__(self, driver: Any, device: torch.device, against_prelude: Callable[[DeviceTools], str | None]) -> None:
        self.driver = driver
        self.device = device
        has_tensor_maps = torch.cuda.get_device_capability(device) >= TENSOR_MAP_CAPABILITY
        self.replace_address = driver_replace_address(driver) if has_tensor_maps else None
        self._target = target_of(device)
        self._modules: list[Any] = []
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._against_prelude = against_prelude

    @functools.cached_property
    def against_prelude(self) -> str | None:
        """Return why graphs can have no prelude on this GPU; None if they can. See `prelude_check`."""
        return self._against_prelude(self)

    def function(self, build: BuildKernel, name: str, *arguments: Any) -> Any:
        """Load the cubin that `build` returns for these arguments, and return its kernel `name`.

        Raises:
            KernelUnavailable: it cannot be built.
            CudaCallFailed: the driver cannot load it.
        """
        key = (build, name, *arguments)
        if key not in self._functions:
            image = cubin(build, self._target, *arguments)
            self._modules.append(check(self.driver.cuModuleLoadData, image))
            self._functions[key] = check(self.driver.cuModuleGetFunction, self._modules[-1], name.encode())
        return self._functions[key]

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

    def free_bytes(self) -> int:
        """Return the bytes of device memory that are free."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def unload(self) -> None:
        """Wait for the device and unload all kernels. No graph may use them any more."""
        with self.on_device():
            torch.cuda.synchronize()
            self._functions.clear()
            while self._modules:
                check(self.driver.cuModuleUnload, self._modules.pop())
