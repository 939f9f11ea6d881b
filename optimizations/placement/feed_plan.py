"""Define plain records that map a call of the original graph to a call of the rewritten one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Hold shape, strides and dtype of a tensor on the GPU. Sizes are symbolic where they differ from call to call."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def is_static(self) -> bool:
        return all(isinstance(number, int) for number in (*self.shape, *self.stride))

    @property
    def size_bytes(self) -> int:
        """Return the bytes of memory that a static layout spans."""
        if 0 in self.shape:
            return 0
        sizes = zip(self.shape, self.stride, strict=True)
        return int((1 + sum((size - 1) * stride for size, stride in sizes)) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class HoistedGroup:
    """Hold values that depend on the same `attributes`, arguments of the graph by their indices.

    `compute` takes these, in order, and returns the values.

    `awaited`: for each value, whether the program may change what it is copied from as soon as the copy is through.
    """

    compute: torch.fx.GraphModule
    attributes: tuple[int, ...]
    layouts: tuple[TensorLayout, ...]
    awaited: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Name the source of a value: an argument, a constant, or a result of the graph or the evaluations around it."""

    where: Literal["argument", "before", "graph", "after", "constant"]
    index: int
    constant: Any = None


@dataclass(frozen=True, slots=True)
class Staged:
    """Describe a CPU value that is copied to the GPU in each call. `awaited`: as in `HoistedGroup`."""

    source: Source
    layout: TensorLayout
    awaited: bool = True


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Hold operations of the original graph that are evaluated unchanged on the CPU in each call.

    `compute` takes `inputs` and returns a tuple of values.
    """

    compute: torch.fx.GraphModule
    inputs: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """Map arguments and results of the original graph to those of the rewritten graph.

    The arguments are: those `kept` (indices into the original's), then the results of `before` at the indices
    `passed`, which stay on the CPU, then the values of all `hoisted` groups in order, then the `staged` ones.
    `keep_addresses`: staged memory may be overwritten by the next call, because no backward needs it. `results` are the
    sources of the original's results; None: they are the graph's results. `apart` are pairs of arguments: the graph
    writes the first, and an operation outside of it reads the second. They share no memory when the graph is compiled,
    and must not share memory later. `attributes` are arguments on the CPU that persist between calls, with their names
    in the program, of a static layout.
    """

    device: torch.device
    kept: tuple[int, ...]
    hoisted: tuple[HoistedGroup, ...] = ()
    staged: tuple[Staged, ...] = ()
    keep_addresses: bool = True
    before: Evaluation | None = None
    passed: tuple[int, ...] = ()
    passed_layouts: tuple[Any, ...] = ()
    after: Evaluation | None = None
    results: tuple[Source, ...] | None = None
    apart: tuple[tuple[int, int], ...] = ()
    attributes: tuple[tuple[int, str], ...] = ()

    @property
    def device_bytes(self) -> int:
        """Return the bytes that stay on the GPU between calls, as far as sizes are known."""
        layouts = [layout for group in self.hoisted for layout in group.layouts]
        if self.keep_addresses:
            layouts += [staged.layout for staged in self.staged]
        return sum(layout.size_bytes for layout in layouts if layout.is_static)
