"""Split DALL-E 2: attention by heads and feed-forward by inner width, in the text tower, prior and both UNets.

Which modules the papers split is not published. Convolutions and norms are kept whole here, and so is the text tower's
attention, which is PyTorch's own module with its three projections in one weight.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.networks.dalle2_attention import CrossAttention, SelfAttention
from models.sharding.by_hand import Summed, part, share_of, split_outputs


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a `Dalle2`.

    Raises:
        ValueError: heads or inner widths cannot be split evenly.
    """
    network: Any = module
    for block in network.clip.text.blocks:
        split_outputs(block.feedforward[0], mesh)
        block.feedforward[2] = Summed(block.feedforward[2], mesh)
    prior = network.prior
    prior.relative_bias.bias.weight = part(prior.relative_bias.bias.weight, 1, mesh)
    for feedforward in prior.feedforwards:
        split_outputs(feedforward[1], mesh, groups=2)
        feedforward[3] = Summed(feedforward[3], mesh)
    for attention in [*prior.modules(), *network.unets.modules()]:
        if isinstance(attention, SelfAttention):
            _split_heads(attention, mesh)  # its heads share one key and value, which stay whole
        elif isinstance(attention, CrossAttention):
            _split_heads(attention, mesh)
            split_outputs(attention.to_key_value, mesh, groups=2)


def _split_heads(attention: Any, mesh: DeviceMesh) -> None:
    attention.heads = share_of(attention.heads, mesh, "heads")
    split_outputs(attention.to_query, mesh)
    attention.output[0] = Summed(attention.output[0], mesh)
