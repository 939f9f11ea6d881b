"""Triton kernels of a module that Inductor generated, compiled to PTX without a GPU: inputs for tests of rewriting.

Inductor leaves the block sizes of a kernel open and tries a few on the GPU; here each of these configurations can be
had. To be used inside `pretended_gpu`, in which the generated module was made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optimizations import torch_internals
from suite.explain.generated_code import definitions
from suite.explain.pretended_gpu import WARP_SIZE


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A Triton kernel of a generated module: `source` is a module that defines `name`."""

    name: str
    source: str


def triton_kernels(source: str) -> tuple[TritonKernel, ...]:
    """Return the Triton kernels a generated module defines, in order."""
    return tuple(
        TritonKernel(name, text)
        for name, call in definitions(ast.parse(source))
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "triton"
        and isinstance(text := ast.literal_eval(call.args[1]), str)
    )


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One configuration of a kernel, compiled for one GPU.

    Attributes:
        target: what it is compiled for: "sm_90".
        configuration: block sizes, warps and stages, as Triton writes them.
        signature: Triton's type of each parameter by name ("*bf16", "i32", "constexpr").
        ptx: the text of the PTX module.
        cubin: the same, assembled by Triton's own ptxas.
    """

    name: str
    target: str
    configuration: str
    signature: Mapping[str, str]
    ptx: str
    cubin: bytes


def compile_kernel(kernel: TritonKernel, capability: int = 90) -> Iterator[CompiledKernel]:
    """Return the kernel in each of its configurations, for a GPU of compute capability `capability` / 10.

    Raises:
        triton.CompilationError: Triton cannot compile it for this GPU.
    """
    with torch_internals.replaced_attribute(triton_helpers, "set_driver_to_gpu", lambda: None):
        tuner = getattr(torch_internals.PyCodeCache.load(kernel.source), kernel.name)
        for configuration in tuner.configs:
            meta = tuner._create_compile_meta(configuration)
            signature: Mapping[str, str] = meta["signature"]
            source = ASTSource(tuner.fn, signature, meta["constants"], meta["configs"][0])
            options: Mapping[str, Any] = tuner._create_compile_options(configuration, meta)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE), options=dict(options))
            yield CompiledKernel(
                name=kernel.name,
                target=f"sm_{capability}",
                configuration=str(configuration),
                signature=signature,
                ptx=compiled.asm["ptx"],
                cubin=compiled.asm["cubin"],
            )
