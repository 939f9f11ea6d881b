"""Split Speech-Transformer: attention by heads, feed-forward by inner width, with PyTorch's `parallelize_module`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.networks.speech_transformer import Attention, FeedForward
from models.sharding.by_layers import split_layers


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a `SpeechTransformer`: an all-reduce for each attention and each feed-forward.

    Raises:
        ValueError: the heads cannot be split evenly.
    """
    split_layers(module, mesh, Attention, FeedForward, widen=("widen",), narrow="narrow")
