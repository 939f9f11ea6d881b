"""Find the PTX of the Triton kernels that a compiled function launches.

Inductor's generated module holds a `CachingAutotuner` per kernel; the launcher it settled on knows the folder of
Triton's cache that its kernel came from, and there `<name>.ptx` and `<name>.json` (how it was compiled) lie next to the
cubin. Inductor keeps the folder's files with its own cache entries, so they are there after a load from those as well.

A kernel node is matched by name. Inductor's kernel names are unique in their module; where a program's own Triton
kernel is compiled in several ways under one name, none of them is taken. Reading PTX takes milliseconds, so it is read
when it is first asked for: most graphs need that of few kernels, or of none.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from optimizations import torch_internals
from optimizations.graph.ptx import PtxKernel, read_kernel


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """Hold a kernel's PTX, what can be dereferenced in it, and the options of `ptxas` in addition to the target."""

    ptx: str
    kernel: PtxKernel
    options: tuple[str, ...]


class KernelAtHand(Protocol):
    """Define a readable kernel, and why each of its parameters cannot be dereferenced (None where it can)."""

    @property
    def kernel(self) -> TritonKernel: ...

    @property
    def refusals(self) -> Sequence[str | None]: ...


class KernelFile:
    """Read a kernel from a folder of Triton's cache.

    Attributes:
        name: as the driver gives it.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._path = path

    @functools.cached_property
    def kernel(self) -> TritonKernel:
        """Return the kernel as its files describe it.

        Raises:
            OSError, ValueError: they cannot be read, or are not understood (`PtxError`).
        """
        ptx = self._path.read_text()
        compiled_with = json.loads(self._path.with_suffix(".json").read_text())
        return TritonKernel(ptx, read_kernel(ptx), _options(compiled_with))

    @functools.cached_property
    def refusals(self) -> tuple[str | None, ...]:
        """Return per parameter why it cannot be dereferenced, or None; empty if the files are not understood."""
        try:
            return self.kernel.kernel.refusals
        except (OSError, ValueError):
            return ()


class Refusals(Mapping[Any, Sequence[str | None]]):
    """Map each node to the refusals of its kernel, which are read on demand."""

    def __init__(self, kernels: Mapping[Any, KernelAtHand]) -> None:
        self._kernels = kernels

    def __getitem__(self, node: Any) -> Sequence[str | None]:
        return self._kernels[node].refusals

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)


def triton_kernels(model: Callable[..., Any], device: int) -> dict[str, KernelFile]:
    """Return the available Triton kernels of the module that `model` is defined in, by name."""
    found: dict[str, list[KernelFile]] = defaultdict(list)
    for folder in _cache_folders(model, device):
        for kernel in read_folder(folder):
            found[kernel.name].append(kernel)
    return {name: kernels[0] for name, kernels in found.items() if len(kernels) == 1}


def read_folder(folder: Path) -> Iterator[KernelFile]:
    """Yield the kernels in one folder of Triton's cache."""
    yield from map(KernelFile, sorted(folder.glob("*.ptx")))


def _options(compiled_with: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options of `ptxas` that change the code, from the metadata of a kernel (Triton's `make_cubin`)."""
    options = [] if compiled_with.get("enable_fp_fusion", True) else ["--fmad=false"]
    return (*options, *(compiled_with.get("ptx_options") or "").split())


def _cache_folders(model: Callable[..., Any], device: int) -> Iterator[Path]:
    """Yield folders of the kernels in the globals of the module that defines `model`, each once."""
    module = getattr(getattr(model, "__func__", model), "__globals__", {})
    autotuners = [value for value in module.values() if isinstance(value, torch_internals.CachingAutotuner)]
    root = Path(torch_internals.triton_cache_dir(device))
    folders = {
        root / launcher.cache_hash
        for autotuner in autotuners
        if len(autotuner.launchers) == 1
        for launcher in autotuner.launchers
    }
    yield from sorted(folders)
