"""The kernel of the indirection microbenchmark. It reads so little that only replay itself takes time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optimizations.graph.ptx import read_kernel
from optimizations.graph.triton_kernels import TritonKernel

ELEMENTS = 128
"""Elements that one node reads and writes; the smallest input has twice as many."""


@triton.jit
def consume(source, destination, elements: tl.constexpr):  # type: ignore[no-untyped-def]
    """destination = 2 * source, of the first `elements` elements."""
    places = tl.arange(0, elements)
    tl.store(destination + places, tl.load(source + places) * 2)


def launch(source: torch.Tensor, destination: torch.Tensor) -> None:
    """One node's work."""
    consume[(1,)](source, destination, elements=ELEMENTS)


@dataclass(frozen=True, slots=True)
class InMemory:
    """A kernel that has no file. `graph.triton_kernels.KernelAtHand`."""

    kernel: TritonKernel

    @property
    def refusals(self) -> tuple[str | None, ...]:
        return self.kernel.kernel.refusals


def compiled(source: torch.Tensor, destination: torch.Tensor) -> InMemory:
    """The kernel, compiled for the device of these tensors, and its PTX."""
    ptx = str(consume[(1,)](source, destination, elements=ELEMENTS).asm["ptx"])
    return InMemory(TritonKernel(ptx, read_kernel(ptx), ()))
