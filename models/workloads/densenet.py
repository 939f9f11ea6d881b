"""Define DNET: DenseNet-121 as torchvision has it. No capture obstacle; many short kernels at batch 64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import CUDNN_NOTE, Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return images [64, 3, 224, 224] (tiny: [2, 3, 32, 32]), normal."""
    import torch

    shape = (64, 3, 224, 224) if size == "full" else (2, 3, 32, 32)
    return Inputs(args=(torch.randn(shape, generator=generator),))


@register(
    acronym="DNET",
    name="densenet121",
    suite="torchvision",
    task="inference",
    batch=64,
    dtype_policy="bf16",
    sets=("grace",),
    inputs=inputs,
    parameters=7_978_856,
    notes=CUDNN_NOTE,
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from torchvision.models import DenseNet, densenet121

    if size == "full":
        return densenet121(weights=None)
    return DenseNet(growth_rate=4, block_config=(1, 2, 1, 1), num_init_features=8, num_classes=10)
