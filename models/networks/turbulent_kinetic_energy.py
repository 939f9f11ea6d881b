"""Compute one time step of turbulent kinetic energy in an ocean, as the Veros model does (Haefner et al., 2018).

The grid is [x, y, z] with two ghost cells at each end of x and y and the surface last in z. Energy changes by vertical
mixing and dissipation, which are solved implicitly (a tridiagonal system per column), by lateral diffusion, and by
advection with a superbee limiter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TAU, NEXT, LAST = 0, 1, 2
"""Where the present, the next and the previous time level stand in the last dimension of the state."""

STEP_S = 1.0
DISSIPATION = 0.7
MIXING = 1.0
LATERAL_DIFFUSIVITY = 2000.0
ADAMS_BASHFORTH = 0.1

INNER = slice(2, -2)
BEFORE = slice(1, -3)
"""The inner cells, and each one's neighbour before it."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Hold cell widths of tracers (t) and velocities (u) [x] and [y], heights [z], and cosines of the latitude [y]."""

    dxt: Tensor
    dxu: Tensor
    dyt: Tensor
    dyu: Tensor
    dzt: Tensor
    dzw: Tensor
    cost: Tensor
    cosu: Tensor

    @property
    def area_x(self) -> Tensor:
        return (self.cost[None, :] * self.dxt[:, None])[..., None]

    @property
    def area_y(self) -> Tensor:
        return (self.cost * self.dyt)[None, :, None]

    @property
    def heights(self) -> Tensor:
        """Return the heights over which a vertical flux is spread: half a cell at the surface."""
        return torch.cat([self.dzw[:-1], 0.5 * self.dzw[-1:]])


def solve_tridiagonal(below: Tensor, diagonal: Tensor, above: Tensor, right: Tensor) -> Tensor:
    """Solve tridiagonal systems along the last dimension by Thomas's algorithm, level by level.

    Changes `diagonal` and `right` in place. No pivoting: the pivots must not vanish.
    """
    levels = diagonal.shape[-1]
    for level in range(1, levels):
        factor = below[..., level] / diagonal[..., level - 1]
        diagonal[..., level] -= factor * above[..., level - 1]
        right[..., level] -= factor * right[..., level - 1]
    solution = torch.empty_like(right)
    solution[..., -1] = right[..., -1] / diagonal[..., -1]
    for level in range(levels - 2, -1, -1):
        solution[..., level] = (right[..., level] - above[..., level] * solution[..., level + 1]) / diagonal[..., level]
    return solution


def mix_vertically(
    tke: Tensor,
    root: Tensor,
    mixing: Tensor,
    length: Tensor,
    forcing: Tensor,
    surface: Tensor,
    bottom: Tensor,
    grid: Grid,
) -> Tensor:
    """Return the energy of the inner cells after vertical mixing, dissipation and forcing; ground cells stay unchanged.

    Args:
        tke, root: present energy and its square root [x, y, z].
        mixing, length: eddy diffusivity and mixing length [x, y, z].
        forcing, surface: energy gained in the water [x, y, z] and through the surface [x, y].
        bottom: number of the lowest water cell, counted from 1, and 0 for land: [x, y] int64.
    """
    inner = (INNER, INNER)
    mixing, length, root = mixing[inner], length[inner], root[inner]
    exchange = torch.zeros_like(mixing)
    exchange[..., :-1] = STEP_S / grid.dzt[1:] * MIXING * 0.5 * (mixing[..., :-1] + mixing[..., 1:])
    heights = grid.heights
    loss = STEP_S * DISSIPATION * root / length
    below = torch.zeros_like(mixing)
    below[..., 1:] = -exchange[..., :-1] / heights[1:]
    above = torch.zeros_like(mixing)
    above[..., :-1] = -exchange[..., :-1] / grid.dzw[:-1]
    diagonal = torch.zeros_like(mixing)
    diagonal[..., 1:-1] = 1 + (exchange[..., 1:-1] + exchange[..., :-2]) / grid.dzw[1:-1] + loss[..., 1:-1]
    diagonal[..., -1] = 1 + exchange[..., -2] / heights[-1] + loss[..., -1]
    diagonal_at_bottom = 1 + exchange / grid.dzw + loss
    right = tke[inner] + STEP_S * forcing[inner]
    right[..., -1] += STEP_S * surface[inner] / heights[-1]

    lowest = bottom[inner][..., None] - 1
    levels = torch.arange(tke.shape[-1], device=tke.device)
    water = (lowest >= 0) & (levels >= lowest)
    at_bottom = (lowest >= 0) & (levels == lowest)
    diagonal = torch.where(at_bottom, diagonal_at_bottom, torch.where(water, diagonal, 1.0))
    solved = solve_tridiagonal(water * below * ~at_bottom, diagonal, water * above, water * right)
    return torch.where(water, solved, tke[inner])


def superbee_flux(velocity: Tensor, mask: Tensor, tracer: Tensor, dim: int, courant: Tensor) -> Tensor:
    """Return superbee-limited flux of `tracer` through each cell's upper face in `dim`; zero in outermost faces.

    `courant` is |velocity| times the time step over the cell's width; `mask` is 1 where the face is open.
    """
    size = tracer.shape[dim]

    def shifted(values: Tensor, by: int) -> Tensor:
        return values.narrow(dim, 1 + by, size - 3)

    difference = shifted(tracer, 1) - shifted(tracer, 0)
    behind = (shifted(tracer, 0) - shifted(tracer, -1)) * shifted(mask, -1)
    ahead = (shifted(tracer, 2) - shifted(tracer, 1)) * shifted(mask, 1)
    open_difference = difference * shifted(mask, 0)
    tiny = 1e-20
    divisor = torch.where(open_difference.abs() < tiny, tiny, open_difference)
    speed = shifted(velocity, 0)
    ratio = torch.where(speed > 0, behind, ahead) / divisor
    limiter = torch.maximum(torch.zeros_like(ratio), torch.maximum((2 * ratio).clamp(max=1.0), ratio.clamp(max=2.0)))
    mean = 0.5 * (shifted(tracer, 1) + shifted(tracer, 0))
    correction = 0.5 * speed.abs() * ((1 - limiter) + shifted(courant, 0) * limiter) * open_difference
    flux = torch.zeros_like(tracer)
    flux.narrow(dim, 1, size - 3).copy_(speed * mean * shifted(mask, 0) - correction)
    return flux


def advect(tke: Tensor, u: Tensor, v: Tensor, w: Tensor, masks: tuple[Tensor, Tensor, Tensor], grid: Grid) -> Tensor:
    """Return the tendency of the energy by advection [x, y, z], zero in the ghost cells."""
    mask_u, mask_v, mask_w = masks
    half_u, half_v, half_w = torch.zeros_like(u), torch.zeros_like(v), torch.zeros_like(w)
    # Velocities stand on the faces of tracer cells; energy's cells lie half a level higher.
    half_u[..., :-1] = 0.5 * (u[..., :-1] * mask_u[..., :-1] + u[..., 1:] * mask_u[..., 1:])
    half_u[..., -1] = u[..., -1] * mask_u[..., -1]
    half_v[..., :-1] = 0.5 * (v[..., :-1] * mask_v[..., :-1] + v[..., 1:] * mask_v[..., 1:])
    half_v[..., -1] = v[..., -1] * mask_v[..., -1]
    half_w[..., :-1] = 0.5 * (w[..., :-1] * mask_w[..., :-1] + w[..., 1:] * mask_w[..., 1:])

    open_x, open_y, open_z = torch.zeros_like(mask_w), torch.zeros_like(mask_w), torch.zeros_like(mask_w)
    open_x[:-1] = mask_w[1:] * mask_w[:-1]
    open_y[:, :-1] = mask_w[:, 1:] * mask_w[:, :-1]
    open_z[..., :-1] = mask_w[..., 1:] * mask_w[..., :-1]
    east = superbee_flux(half_u, open_x, tke, 0, (half_u * STEP_S / grid.area_x).abs())
    north_speed = half_v * grid.cosu[None, :, None]
    north = superbee_flux(north_speed, open_y, tke, 1, (half_v * STEP_S / grid.area_y).abs())
    # Two more levels above and below make every face of the column an inner one.
    pad = (2, 2)
    top = superbee_flux(
        functional.pad(half_w, pad),
        functional.pad(open_z, pad),
        functional.pad(tke, pad),
        2,
        functional.pad((half_w * STEP_S / grid.dzw).abs(), pad),
    )[..., 2:-2]

    tendency = torch.zeros_like(tke)
    tendency[INNER, INNER] = mask_w[INNER, INNER] * -(
        (east[INNER, INNER] - east[BEFORE, INNER]) / grid.area_x[INNER, INNER]
        + (north[INNER, INNER] - north[INNER, BEFORE]) / grid.area_y[:, INNER]
    )
    tendency[..., 0] -= top[..., 0] / grid.dzw[0]
    tendency[..., 1:] -= (top[..., 1:] - top[..., :-1]) / grid.heights[1:]
    return tendency


def diffuse_laterally(tke: Tensor, masks: tuple[Tensor, Tensor, Tensor], grid: Grid) -> Tensor:
    """Return the tendency of the inner cells' energy by lateral diffusion."""
    mask_u, mask_v, mask_w = masks
    east, north = torch.zeros_like(tke), torch.zeros_like(tke)
    widths = (grid.cost[None, :] * grid.dxu[:-1, None])[..., None]
    east[:-1] = LATERAL_DIFFUSIVITY * (tke[1:] - tke[:-1]) / widths * mask_u[:-1]
    slopes = (tke[:, 1:] - tke[:, :-1]) / grid.dyu[None, :-1, None]
    north[:, :-1] = LATERAL_DIFFUSIVITY * slopes * mask_v[:, :-1] * grid.cosu[None, :-1, None]
    return mask_w[INNER, INNER] * (
        (east[INNER, INNER] - east[BEFORE, INNER]) / grid.area_x[INNER, INNER]
        + (north[INNER, INNER] - north[INNER, BEFORE]) / grid.area_y[:, INNER]
    )


class TurbulentKineticEnergy(nn.Module):
    """Compute one time step; a module without parameters.

    Takes, in this order: velocities u, v, w [x, y, z, 3]; masks of u, v and w cells [x, y, z]; widths dxt, dxu [x] and
    dyt, dyu [y]; heights dzt, dzw [z]; cosines cost, cosu [y]; the lowest cell [x, y] int64; eddy diffusivity, mixing
    length and forcing [x, y, z]; forcing at the surface [x, y]; energy and its tendency [x, y, z, 3].

    Returns the energy and its tendency with the next time level filled in, in the inputs' dtype, and the energy that
    had to be added at the surface [x, y] in float32. The inputs stay as they are.
    """

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        velocities, masks, widths, rest = inputs[:3], inputs[3:6], inputs[6:14], inputs[14:]
        bottom, mixing, length, forcing, surface, tke, tendencies = rest
        grid = Grid(*widths)
        mask_u, mask_v, mask_w = masks
        tke, tendencies = tke.clone(), tendencies.clone()
        now = tke[..., TAU].clone()
        root = now.clamp(min=0.0).sqrt()
        mixed = mix_vertically(now, root, mixing, length, forcing, surface, bottom, grid)

        added = torch.zeros(now.shape[:2], device=now.device)
        top = mixed[..., -1]
        added[INNER, INNER] = torch.where(top < 0, -top * grid.heights[-1] / STEP_S, 0.0).to(added.dtype)
        mixed = torch.cat([mixed[..., :-1], top.clamp(min=0.0)[..., None]], dim=-1)

        tke[INNER, INNER, :, NEXT] = mixed + STEP_S * diffuse_laterally(now, (mask_u, mask_v, mask_w), grid)
        u, v, w = (velocity[..., TAU] for velocity in velocities)
        tendency = advect(now, u, v, w, (mask_u, mask_v, mask_w), grid)
        tendencies[..., TAU] = tendency
        before = tendencies[..., LAST]
        tke[..., NEXT] += STEP_S * ((1.5 + ADAMS_BASHFORTH) * tendency - (0.5 + ADAMS_BASHFORTH) * before)
        return tke, tendencies, added
