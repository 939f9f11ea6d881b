"""Split a plain decoder, with PyTorch's `parallelize_module`: attention by heads, feed-forward by inner width."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.networks.decoder import Attention, FeedForward
from models.sharding.by_layers import split_layers


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a `Decoder`: two all-reduces a layer.

    Raises:
        ValueError: the heads cannot be split evenly.
    """
    split_layers(module, mesh, Attention, FeedForward, widen=("gate", "up"), narrow="down")
