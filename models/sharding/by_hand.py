"""Split layers by hand: slices of weights, and one all-reduce where partial sums meet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


class Summed(nn.Module):
    """Apply a linear layer whose inputs are split over processes: [..., inputs / processes] -> [..., outputs].

    One all-reduce adds the partial products up; the bias is added after it.
    """

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = part(whole.weight, 1, mesh)
        self.bias = whole.bias
        self.group: Any = mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        y = all_reduced(functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def all_reduced(partial: Tensor, group: Any) -> Tensor:
    """Return the sum of all processes' tensors, in the memory of this one's."""
    torch.distributed.all_reduce(partial, group=group)
    return partial


def part(whole: Tensor, dimension: int, mesh: DeviceMesh, groups: int = 1) -> nn.Parameter:
    """Return this process's share of a weight along a dimension, in memory of its own.

    Args:
        whole: the weight, the same on all processes.
        dimension: what is split, evenly.
        mesh: the processes.
        groups: equal stretches of the dimension that are split one by one (2: the halves of a gated layer).

    Raises:
        ValueError: the dimension cannot be split evenly.
    """
    processes, rank = mesh.size(), mesh.get_local_rank()
    size = whole.shape[dimension]
    if size % (processes * groups):
        raise ValueError(
            f"a weight of shape {tuple(whole.shape)} cannot be split over {processes} processes: dimension {dimension} "
            f"holds {groups} x {size // groups}; use a degree that divides it"
        )
    shares = [stretch.chunk(processes, dimension)[rank] for stretch in whole.detach().chunk(groups, dimension)]
    made = torch.cat(shares, dimension).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(made, requires_grad=whole.requires_grad)


def split_outputs(linear: nn.Linear, mesh: DeviceMesh, groups: int = 1) -> None:
    """Keep this process's share of a linear layer's outputs, in place."""
    linear.weight = part(linear.weight, 0, mesh, groups)
    if linear.bias is not None:
        linear.bias = part(linear.bias, 0, mesh, groups)
    linear.out_features = linear.weight.shape[0]


def share_of(count: int, mesh: DeviceMesh, what: str) -> int:
    """Return how many of `count` each process has.

    Raises:
        ValueError: they cannot be shared evenly.
    """
    if count % mesh.size():
        raise ValueError(f"{count} {what} cannot be shared by {mesh.size()} processes; use a degree that divides them")
    return count // mesh.size()
