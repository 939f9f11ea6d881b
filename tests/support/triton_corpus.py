"""Kernels that Inductor generated for the registered workloads, compiled offline from `data/triton_kernels.json`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PATH = Path(__file__).parents[1] / "data" / "triton_kernels.json"


@dataclass(frozen=True)
class CorpusKernel:
    """A kernel as `data/extract_triton_kernels.py` stored it."""

    workload: str
    name: str
    source: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible_by_16: list[int]
    options: dict[str, Any]

    @property
    def pointers(self) -> tuple[int, ...]:
        """Numbers of the parameters that are pointers, as the compiled kernel counts them (constants are left out)."""
        passed = [kind for name, kind in self.signature.items() if kind != "constexpr" and name not in self.constants]
        return tuple(number for number, kind in enumerate(passed) if kind.startswith("*"))


def corpus() -> tuple[CorpusKernel, ...]:
    return tuple(CorpusKernel(**kernel) for kernel in json.loads(PATH.read_text())["kernels"])


def compile_ptx(kernel: CorpusKernel, compute_capability: int, folder: Path) -> str:
    """The PTX Triton makes of a kernel for a compute capability (90), with no GPU. `folder` takes its source."""
    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = ASTSource(
        fn=getattr(module, kernel.name),
        signature=kernel.signature,
        constexprs=kernel.constants,
        attrs={(number,): [["tt.divisibility", 16]] for number in kernel.divisible_by_16},
    )
    target = GPUTarget("cuda", compute_capability, 32)
    return str(triton.compile(source, target=target, options=kernel.options).asm["ptx"])
