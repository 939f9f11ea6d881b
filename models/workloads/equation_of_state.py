"""Define EOS: a short pointwise program without parameters, for which the price of a CUDA graph itself is decisive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return salinity U(0.01, 10) and temperature U(-12, 20) [204, 204, 26], pressure U(0, 1000) [1, 1, 26]; float64 as
    drawn (tiny: [6, 6, 4])."""
    import torch

    x, y, levels = (204, 204, 26) if size == "full" else (6, 6, 4)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low

    return Inputs(
        args=(
            uniform(0.01, 10.0, x, y, levels),
            uniform(-12.0, 20.0, x, y, levels),
            uniform(0.0, 1000.0, 1, 1, levels),
        )
    )


@register(
    acronym="EOS",
    name="pyhpc_equation_of_state",
    suite="torchbench",
    task="inference",
    batch=1_048_576,
    dtype_policy="bf16",
    sets=("grace", "pygraph"),
    inputs=inputs,
    parameters=0,
    notes="the published runner's size parameter stands as batch; it gives a grid of 204 x 204 x 26",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.teos10 import EnthalpySlope

    return EnthalpySlope()
