"""Split XLNet as the papers do: attention by heads, feed-forward by its inner width, two all-reduces a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from models.sharding.by_hand import Summed, all_reduced, part, share_of, split_outputs

BY_HEAD = {"q": 1, "k": 1, "v": 1, "o": 1, "r": 1, "r_r_bias": 0, "r_s_bias": 0, "r_w_bias": 0, "seg_embed": 1}
"""Weights of attention, and the dimension that counts heads."""


class SplitAttention(XLNetRelativeAttention):
    """Compute relative attention with some of the heads; the projection of their results is summed over processes."""

    group: Any

    def post_attention(self, h: Tensor, attn_vec: Tensor, residual: bool = True) -> Tensor:
        """Map [queries, batch, heads, head width] to [queries, batch, width], as the library does."""
        projected = all_reduced(torch.einsum("ibnd,hnd->ibh", attn_vec, self.o), self.group)
        projected = self.dropout(projected)
        if residual:
            projected = projected + h
        return self.layer_norm(projected)


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split all layers of an XLNet with a language-modelling head.

    Raises:
        ValueError: heads or inner width cannot be split evenly.
    """
    network: Any = module
    for layer in network.transformer.layer:
        attention = layer.rel_attn
        for name, dimension in BY_HEAD.items():
            setattr(attention, name, part(getattr(attention, name), dimension, mesh))
        attention.n_head = share_of(attention.n_head, mesh, "heads")
        attention.__class__ = SplitAttention
        attention.group = mesh.get_group()
        split_outputs(layer.ff.layer_1, mesh)
        layer.ff.layer_2 = Summed(layer.ff.layer_2, mesh)
