"""Define DR-I and DR-T: a rating autoencoder whose input (3 GB in inference) is read by a vendor matrix product.

DR-I-256 and DR-T-4096 are the same with PyGraph's batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch

FULL_ITEMS = 197_951
TINY_ITEMS = 50


def inference_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return ratings [8192, 197951] float32 (tiny: [6, 50]), normal."""
    return _ratings(8192 if size == "full" else 6, size, generator)


def training_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return ratings [256, 197951] float32 (tiny: [6, 50]), normal."""
    return _ratings(256 if size == "full" else 6, size, generator)


def small_inference_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return ratings [256, 197951] float32 (tiny: [4, 50]), normal."""
    return _ratings(256 if size == "full" else 4, size, generator)


def large_training_inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return ratings [4096, 197951] float32 (tiny: [8, 50]), normal."""
    return _ratings(4096 if size == "full" else 8, size, generator)


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
    sets=("grace",),
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
    sets=("grace",),
    inputs=training_inputs,
    parameters=204_475_711,
    stochastic=True,
    optimizer="adam",
)
@register(
    acronym="DR-I-256",
    name="nvidia_deeprecommender",
    suite="torchbench",
    task="inference",
    batch=256,
    dtype_policy="bf16",
    sets=("pygraph",),
    inputs=small_inference_inputs,
    parameters=204_475_711,
    notes="DR-I with PyGraph's batch",
)
@register(
    acronym="DR-T-4096",
    name="nvidia_deeprecommender",
    suite="torchbench",
    task="training",
    batch=4096,
    dtype_policy="amp",
    sets=("pygraph",),
    inputs=large_training_inputs,
    parameters=204_475_711,
    stochastic=True,
    optimizer="adam",
    notes="DR-T with PyGraph's batch",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.deep_recommender import RatingAutoencoder

    if size == "full":
        return RatingAutoencoder(FULL_ITEMS, (512, 512, 1024))
    return RatingAutoencoder(TINY_ITEMS, (16, 16, 32))
