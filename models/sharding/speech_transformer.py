"""Speech-Transformer: attention by heads, feed-forward by inner width, with PyTorch's `parallelize_module`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from models.networks.speech_transformer import Attention, FeedForward
from models.sharding.by_hand import share_of


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Splits a `SpeechTransformer`: an all-reduce for each attention and each feed-forward.

    Raises:
        ValueError: the heads cannot be split evenly.
    """
    for member in list(module.modules()):
        if isinstance(member, Attention):
            member.heads = share_of(member.heads, mesh, "heads")
            by_head = {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(member, mesh, {**by_head, "output": RowwiseParallel()})
        elif isinstance(member, FeedForward):
            parallelize_module(member, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
