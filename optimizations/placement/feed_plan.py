"""How the arguments of a rewritten graph come from those of its original: plain records, nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from optimizations.placement.sources import Guard


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape, strides and dtype of a tensor on the GPU. Sizes are symbolic where they differ from call to call."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def is_static(self) -> bool:
        return all(isinstance(number, int) for number in (*self.shape, *self.stride))


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute that hoisted values depend on: argument `index` of the graph, or `constant` held by the graph."""

    guard: Guard
    index: int | None
    constant: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HoistedGroup:
    """Values that depend on the same attributes. `compute` takes these, in order, and returns the values."""

    compute: torch.fx.GraphModule
    attributes: tuple[Attribute, ...]
    layouts: tuple[TensorLayout, ...]


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """How the rewritten graph's arguments come from the original's.

    They are: arguments `kept` (indices into the original's), then the values of all `hoisted` groups in order, then
    the `staged` arguments (indices) with their layouts. Results `cpu_outputs` (indices) belong on the CPU.
    `keep_addresses`: staged arguments may be overwritten by the next call, because no backward needs them.
    """

    device: torch.device
    kept: tuple[int, ...]
    hoisted: tuple[HoistedGroup, ...]
    staged: tuple[int, ...]
    staged_layouts: tuple[TensorLayout, ...]
    cpu_outputs: tuple[int, ...]
    keep_addresses: bool
