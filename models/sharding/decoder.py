"""A plain decoder, with PyTorch's `parallelize_module`: attention by heads, feed-forward by inner width."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from models.networks.decoder import Attention, FeedForward
from models.sharding.by_hand import share_of


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Splits a `Decoder`: two all-reduces a layer.

    Raises:
        ValueError: the heads cannot be split evenly.
    """
    for member in list(module.modules()):
        if isinstance(member, Attention):
            member.heads = share_of(member.heads, mesh, "heads")
            by_head = {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(member, mesh, {**by_head, "output": RowwiseParallel()})
        elif isinstance(member, FeedForward):
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(member, mesh, plan)
