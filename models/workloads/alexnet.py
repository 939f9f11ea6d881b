"""ALNET: AlexNet as torchvision has it. No capture obstacle; a plain convolutional network at batch 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Images [2, 3, 224, 224] (tiny: [2, 3, 64, 64]), normal."""
    import torch

    side = 224 if size == "full" else 64
    return Inputs(args=(torch.randn(2, 3, side, side, generator=generator),))


@register(
    acronym="ALNET",
    name="alexnet",
    suite="torchvision",
    task="inference",
    batch=2,
    dtype_policy="bf16",
    inputs=inputs,
    parameters=61_100_840,
    cudnn_benchmark=True,
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from torchvision.models import AlexNet

    return AlexNet(num_classes=1000 if size == "full" else 10)
