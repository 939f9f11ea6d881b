"""DR-I and DR-T: a rating autoencoder whose input (3 GB in inference) goes straight into a vendor matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

FULL_ITEMS = 197_951
TINY_ITEMS = 50


def inference_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Ratings [8192, 197951] float32 (tiny: [6, 50]), normal."""
    return _ratings(8192 if size == "full" else 6, size, generator)


def training_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Ratings [256, 197951] float32 (tiny: [6, 50]), normal."""
    return _ratings(256 if size == "full" else 6, size, generator)


def _ratings(users: int, size: Size, generator: torch.Generator) -> Inputs:
    import torch

    items = FULL_ITEMS if size == "full" else TINY_ITEMS
    return Inputs(args=(torch.randn(users, items, generator=generator),))


@register(
    acronym="DR-I",
    name="nvidia_deeprecommender",
    suite="torchbench",
    task="inference",
    batch=8192,
    dtype_policy="bf16",
    inputs=inference_inputs,
    parameters=204_475_711,
)
@register(
    acronym="DR-T",
    name="nvidia_deeprecommender",
    suite="torchbench",
    task="training",
    batch=256,
    dtype_policy="amp",
    inputs=training_inputs,
    parameters=204_475_711,
    stochastic=True,
    optimizer="adam",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.deep_recommender import RatingAutoencoder

    if size == "full":
        return RatingAutoencoder(FULL_ITEMS, (512, 512, 1024))
    return RatingAutoencoder(TINY_ITEMS, (16, 16, 32))
