"""Split the layers of a transformer with PyTorch's `parallelize_module`: attention by heads, the rest by width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from models.sharding.by_hand import share_of


def split_layers(
    module: nn.Module,
    mesh: DeviceMesh,
    attention: type[Any],
    feed_forward: type[nn.Module],
    *,
    widen: Sequence[str],
    narrow: str,
) -> None:
    """Split each attention by heads and each feed-forward by inner width, with an all-reduce for each.

    Args:
        module: is split in place.
        mesh: the processes, in one dimension.
        attention: modules with linear layers `query`, `key`, `value` and `output`, and a number of `heads`.
        feed_forward: modules of which the linear layers `widen` lead to the inner width, and `narrow` leads back.

    Raises:
        ValueError: the heads cannot be split evenly.
    """
    for member in list(module.modules()):
        if isinstance(member, attention):
            member.heads = share_of(member.heads, mesh, "heads")
            by_head = {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(member, mesh, {**by_head, "output": RowwiseParallel()})
        elif isinstance(member, feed_forward):
            by_width = {name: ColwiseParallel() for name in widen}
            parallelize_module(member, mesh, {**by_width, narrow: RowwiseParallel()})
