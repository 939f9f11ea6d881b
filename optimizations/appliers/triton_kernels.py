"""Finds the PTX of the Triton kernels that a compiled function launches.

Inductor's generated module holds a `CachingAutotuner` per kernel; the launcher it settled on knows the folder of
Triton's cache that its kernel came from, and there `<name>.ptx` and `<name>.json` (how it was compiled) lie beside the
cubin. Inductor keeps the folder's files with its own cache entries, so they are there after a load from those as well.

A kernel node is matched by name. Inductor's kernel names are unique in their module; where a program's own Triton
kernel is compiled in several ways under one name, none of them is taken.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizations import torch_internals
from optimizations.appliers.ptx_rewriting import PtxKernel, read_kernel


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A kernel's PTX, what can be dereferenced in it, and the options `ptxas` was given beside the target."""

    ptx: str
    kernel: PtxKernel
    options: tuple[str, ...]


def triton_kernels(model: Callable[..., Any], device: int) -> dict[str, TritonKernel]:
    """The Triton kernels at hand of the module that `model` is defined in, by name."""
    found: dict[str, list[TritonKernel]] = defaultdict(list)
    for folder in _cache_folders(model, device):
        for kernel in read_folder(folder):
            found[kernel.kernel.name].append(kernel)
    return {name: kernels[0] for name, kernels in found.items() if len(kernels) == 1}


def read_folder(folder: Path) -> Iterator[TritonKernel]:
    """The kernels in one folder of Triton's cache; files that cannot be read or understood are passed over."""
    for path in sorted(folder.glob("*.ptx")):
        try:
            ptx = path.read_text()
            compiled_with = json.loads(path.with_suffix(".json").read_text())
            yield TritonKernel(ptx, read_kernel(ptx), _options(compiled_with))
        except (OSError, ValueError):  # PtxError is one
            continue


def _options(compiled_with: Mapping[str, Any]) -> tuple[str, ...]:
    """Options of `ptxas` that change the code, from the metadata of a kernel (Triton's `make_cubin`)."""
    options = [] if compiled_with.get("enable_fp_fusion", True) else ["--fmad=false"]
    return (*options, *(compiled_with.get("ptx_options") or "").split())


def _cache_folders(model: Callable[..., Any], device: int) -> Iterator[Path]:
    """Folders of the kernels in the globals of the module that defines `model`, each once."""
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
