"""Encore's own kernels, loaded into the current CUDA context: each image once, until `unload`."""

from __future__ import annotations

import hashlib
from typing import Any

from optimizations.graph.driver import check

DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a kernel may have without being asked for (CUDA Programming Guide, "Shared Memory")."""


class LoadedModules:
    """Modules of one device."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._modules: dict[str, Any] = {}

    def function(self, image: bytes, name: str, shared_bytes: int = 0) -> Any:
        """Kernel `name` of the cubin `image` as a `CUfunction` that may take `shared_bytes` of dynamic shared memory.

        Raises:
            CudaCallFailed: the driver does not load the image, or it has no such kernel.
        """
        digest = hashlib.sha256(image).hexdigest()
        if digest not in self._modules:
            self._modules[digest] = check(self._driver.cuModuleLoadData, image)
        function = check(self._driver.cuModuleGetFunction, self._modules[digest], name.encode())
        if shared_bytes > DEFAULT_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(self._driver.cuFuncSetAttribute, function, attribute, shared_bytes)
        return function

    def unload(self) -> None:
        """Unload all modules. No graph may use their kernels any more."""
        while self._modules:
            _, module = self._modules.popitem()
            check(self._driver.cuModuleUnload, module)
