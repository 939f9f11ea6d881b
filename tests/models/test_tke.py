"""The ocean model's step against what must hold for any correct one."""

from __future__ import annotations

import pytest
import torch

from models.networks import turbulent_kinetic_energy as tke
from models.registry import find

X, Y, Z = 9, 8, 5


def grid(generator: torch.Generator) -> tke.Grid:
    def positive(length: int) -> torch.Tensor:
        return torch.rand(length, generator=generator, dtype=torch.float64) + 0.5

    return tke.Grid(*(positive(length) for length in (X, X, Y, Y, Z, Z, Y, Y)))


def field(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (X, Y, Z), generator=generator, dtype=torch.float64)


def test_tridiagonal_systems_are_solved() -> None:
    generator = torch.Generator().manual_seed(0)
    below, above, right = (field(generator, 4, 6) for _ in range(3))
    diagonal = field(generator, 4, 6).abs() + 4
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(below[:, 1:], -1) + torch.diag_embed(above[:, :-1], 1)
    expected = torch.linalg.solve(matrix, right)
    torch.testing.assert_close(tke.solve_tridiagonal(below, diagonal.clone(), above, right.clone()), expected)


def test_mixing_without_dissipation_keeps_a_columns_energy() -> None:
    generator = torch.Generator().manual_seed(1)
    cells = grid(generator)
    energy, mixing = field(generator).abs(), field(generator).abs()
    nothing = torch.zeros(X, Y, Z, dtype=torch.float64)
    bottom = torch.ones(X, Y, dtype=torch.int64)
    mixed = tke.mix_vertically(energy, nothing, mixing, nothing + 1, nothing, nothing[..., 0], bottom, cells)
    before, after = ((each * cells.heights).sum(dim=-1) for each in (energy[2:-2, 2:-2], mixed))
    torch.testing.assert_close(after, before)
    assert (mixed.std(dim=-1) < energy[2:-2, 2:-2].std(dim=-1)).all()


def test_cells_in_the_ground_and_on_land_keep_their_energy() -> None:
    generator = torch.Generator().manual_seed(2)
    energy, mixing, length, forcing = (field(generator).abs() + 0.1 for _ in range(4))
    bottom = torch.full((X, Y), 3)
    bottom[4, 4] = 0
    mixed = tke.mix_vertically(energy, energy.sqrt(), mixing, length, forcing, forcing[..., 0], bottom, grid(generator))
    inner = energy[2:-2, 2:-2]
    assert torch.equal(mixed[..., :2], inner[..., :2])
    assert torch.equal(mixed[2, 2], inner[2, 2])
    water = torch.ones(X - 4, Y - 4, dtype=torch.bool)
    water[2, 2] = False
    assert (mixed[water][:, 2:] != inner[water][:, 2:]).all()


def test_dissipation_takes_energy_away() -> None:
    generator = torch.Generator().manual_seed(3)
    energy = field(generator).abs() + 0.1
    still = torch.zeros(X, Y, Z, dtype=torch.float64)
    mixed = tke.mix_vertically(
        energy,
        energy.sqrt(),
        still,
        still + 1,
        still,
        still[..., 0],
        torch.ones(X, Y, dtype=torch.int64),
        grid(generator),
    )
    inner = energy[2:-2, 2:-2]
    torch.testing.assert_close(mixed, inner / (1 + 0.7 * inner.sqrt()))


def test_even_tracer_flows_with_the_velocity() -> None:
    generator = torch.Generator().manual_seed(4)
    velocity, ones = field(generator), torch.ones(X, Y, Z, dtype=torch.float64)
    for dim in range(3):
        flux = tke.superbee_flux(velocity, ones, 2 * ones, dim, velocity.abs())
        inner = flux.narrow(dim, 1, flux.shape[dim] - 3)
        torch.testing.assert_close(inner, 2 * velocity.narrow(dim, 1, flux.shape[dim] - 3))
        assert not flux.narrow(dim, flux.shape[dim] - 2, 2).any()


def test_step_is_carried_upwind_and_makes_no_new_extreme() -> None:
    line = torch.where(torch.arange(40) < 20, 1.0, 0.0).double()[:, None, None]
    ones, speed = torch.ones_like(line), 0.4
    for _ in range(15):
        flux = tke.superbee_flux(speed * ones, ones, line, 0, speed * ones)
        line = line - torch.diff(flux, dim=0, prepend=flux[:1])
        line[:2], line[-3:] = 1.0, 0.0
    assert line.min() >= -1e-12 and line.max() <= 1 + 1e-12
    assert line.sum().item() == pytest.approx(26), "15 steps of 0.4 cells"


def test_lateral_diffusion_keeps_the_energy_of_a_closed_basin() -> None:
    generator = torch.Generator().manual_seed(5)
    cells = grid(generator)
    closed = torch.zeros(X, Y, Z, dtype=torch.float64)
    closed[2:-2, 2:-2] = 1.0
    open_x, open_y = torch.zeros_like(closed), torch.zeros_like(closed)
    open_x[:-1] = closed[1:] * closed[:-1]
    open_y[:, :-1] = closed[:, 1:] * closed[:, :-1]
    tendency = tke.diffuse_laterally(field(generator), (open_x, open_y, closed), cells)
    area = (cells.cost[None, :] * cells.dxt[:, None] * cells.dyt[None, :])[2:-2, 2:-2, None]
    assert tendency.abs().max() > 1
    assert abs((tendency * area).sum().item()) < 1e-9 * (tendency * area).abs().sum().item()


def test_step_fills_the_next_level_and_keeps_its_inputs() -> None:
    made = find("TKE").inputs("published", "tiny", torch.Generator().manual_seed(0)).args
    before = [tensor.clone() for tensor in made]
    energy, tendency, added = tke.TurbulentKineticEnergy()(*made)
    assert all(torch.equal(one, other) for one, other in zip(made, before, strict=True))
    assert torch.equal(energy[..., [tke.TAU, tke.LAST]], made[19][..., [tke.TAU, tke.LAST]])
    assert not torch.equal(energy[..., tke.NEXT], made[19][..., tke.NEXT])
    assert torch.equal(tendency[..., [tke.NEXT, tke.LAST]], made[20][..., [tke.NEXT, tke.LAST]])
    assert added.dtype == torch.float32 and added.any()
    assert not added[:2].any() and not added[:, :2].any(), "the ghost cells"
