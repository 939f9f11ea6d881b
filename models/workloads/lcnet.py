"""Define LCNET: timm's PP-LCNet 0.5x on a large batch, whose input is by far the largest thing it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return images [256, 3, 224, 224] float32 (tiny: [2, 3, 32, 32]): random bytes, standardised by their own mean and
    standard deviation."""
    import torch

    shape = (256, 3, 224, 224) if size == "full" else (2, 3, 32, 32)
    images = torch.randint(256, shape, generator=generator).float()
    return Inputs(args=((images - images.mean()) / images.std(),))


@register(
    acronym="LCNET",
    name="lcnet_050",
    suite="timm",
    task="inference",
    batch=256,
    dtype_policy="bf16",
    sets=("grace", "pygraph"),
    inputs=inputs,
    parameters=1_880_856,
)
def build(variant: str, size: Size) -> torch.nn.Module:
    import timm

    return timm.create_model("lcnet_050", pretrained=False, num_classes=1000 if size == "full" else 10)
