"""Split Mask R-CNN: the two wide layers of the box head, with one all-reduce; everything else is kept whole.

Which modules the papers split is not published. These two hold a third of the weights, and are what a tensor-parallel
program splits first.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.sharding.by_hand import Summed, split_outputs


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split torchvision's Mask R-CNN.

    Raises:
        ValueError: the width between the layers cannot be split evenly.
    """
    head: Any = module.get_submodule("roi_heads.box_head")
    split_outputs(head.fc6, mesh)
    head.fc7 = Summed(head.fc7, mesh)
