"""Define DCGAN: only the discriminator is trained, on the mean of its answers, as in the published runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return images [32, 3, 64, 64] (tiny: [4, 3, 64, 64]), normal."""
    import torch

    return Inputs(args=(torch.randn(32 if size == "full" else 4, 3, 64, 64, generator=generator),))


@register(
    acronym="DCGAN",
    name="dcgan",
    suite="torchbench",
    task="training",
    batch=32,
    dtype_policy="amp",
    sets=("grace",),
    inputs=inputs,
    parameters=2_765_568,
    optimizer="sgd",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.dcgan import Discriminator

    return Discriminator(width=64 if size == "full" else 8)
