"""Define ALNET and ALNET-128: AlexNet as torchvision has it, at GraCE's and at PyGraph's batch. No capture obstacle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import CUDNN_NOTE, Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return images [2, 3, 224, 224] (tiny: [2, 3, 64, 64]), normal."""
    return _images(2, size, generator)


def large_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return images [128, 3, 224, 224] (tiny: [3, 3, 64, 64]), normal."""
    return _images(128 if size == "full" else 3, size, generator)


def _images(batch: int, size: Size, generator: torch.Generator) -> Inputs:
    import torch

    side = 224 if size == "full" else 64
    return Inputs(args=(torch.randn(batch, 3, side, side, generator=generator),))


@register(
    acronym="ALNET",
    name="alexnet",
    suite="torchvision",
    task="inference",
    batch=2,
    dtype_policy="bf16",
    sets=("grace",),
    inputs=inputs,
    parameters=61_100_840,
    notes=CUDNN_NOTE,
)
@register(
    acronym="ALNET-128",
    name="alexnet",
    suite="torchvision",
    task="inference",
    batch=128,
    dtype_policy="bf16",
    sets=("pygraph",),
    inputs=large_inputs,
    parameters=61_100_840,
    notes="ALNET with PyGraph's batch; " + CUDNN_NOTE,
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from torchvision.models import AlexNet

    return AlexNet(num_classes=1000 if size == "full" else 10)
