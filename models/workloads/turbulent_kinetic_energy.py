"""Define TKE: a time step of an ocean model in float64, without parameters: 174 MB of input that stock graphs copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.registry import Inputs, Size, register

if TYPE_CHECKING:
    import torch


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    """Return the 21 tensors of `TurbulentKineticEnergy.forward` on a grid of 204 x 204 x 26 (tiny: 8 x 7 x 5): masks 1
    with probability 0.8, the lowest cell uniform over the levels, others normal; float64 but for the lowest cell."""
    import torch

    x, y, z = (204, 204, 26) if size == "full" else (8, 7, 5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def mask() -> torch.Tensor:
        return (torch.rand(x, y, z, generator=generator, dtype=torch.float64) < 0.8).to(torch.float64)

    return Inputs(
        args=(
            *(normal(x, y, z, 3) for _ in range(3)),
            *(mask() for _ in range(3)),
            *(normal(length) for length in (x, x, y, y, z, z, y, y)),
            torch.randint(z, (x, y), generator=generator),
            *(normal(x, y, z) for _ in range(3)),
            normal(x, y),
            normal(x, y, z, 3),
            normal(x, y, z, 3),
        )
    )


@register(
    acronym="TKE",
    name="pyhpc_turbulent_kinetic_energy",
    suite="torchbench",
    task="inference",
    batch=1_048_576,
    dtype_policy="amp",
    sets=("grace", "pygraph"),
    inputs=inputs,
    parameters=0,
    notes="the published runner's size parameter stands as batch; it gives a grid of 204 x 204 x 26. All is float64, "
    "which autocast leaves alone",
)
def build(variant: str, size: Size) -> torch.nn.Module:
    from models.networks.turbulent_kinetic_energy import TurbulentKineticEnergy

    return TurbulentKineticEnergy()
