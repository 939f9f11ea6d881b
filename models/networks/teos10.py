"""Compute the temperature derivative of sea water's dynamic enthalpy in the 48-term approximation of TEOS-10.

Specific volume is a rational function of pressure p whose coefficients are polynomials in Absolute Salinity s and
Conservative Temperature t (McDougall et al., "A computationally efficient 48-term expression for the density of
seawater in terms of Conservative Temperature", 2011, which publishes the coefficients used here):

    v(s, t, p) = (a0 + a1 p + a2 p^2 + a3 p^3) / (b0 + 2 b1 p + b2 p^2)

Dynamic enthalpy is its integral over pressure from 0 to p and has a closed form by partial fractions. Its derivative
in t comes from the same closed form in dual numbers: each quantity carries its own derivative along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

PASCAL_PER_DECIBAR = 1e4


@dataclass(frozen=True, slots=True)
class Dual:
    """Hold a quantity and its derivative with respect to temperature."""

    value: Tensor
    slope: Tensor

    def __add__(self, other: Dual) -> Dual:
        return Dual(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: Dual) -> Dual:
        return Dual(self.value - other.value, self.slope - other.slope)

    def __mul__(self, other: Dual) -> Dual:
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __truediv__(self, other: Dual) -> Dual:
        quotient = self.value / other.value
        return Dual(quotient, (self.slope - quotient * other.slope) / other.value)

    def scaled(self, factor: float | Tensor) -> Dual:
        """Multiply with something that does not depend on temperature."""
        return Dual(self.value * factor, self.slope * factor)

    def sqrt(self) -> Dual:
        root = torch.sqrt(self.value)
        return Dual(root, 0.5 * self.slope / root)

    def log1p(self) -> Dual:
        return Dual(torch.log1p(self.value), self.slope / (1.0 + self.value))


@dataclass(frozen=True, slots=True)
class VolumeCoefficients:
    """Hold specific volume as a fraction of polynomials in pressure: numerator a0..a3, denominator b0, 2 b1, b2."""

    a0: Dual
    a1: Dual
    a2: Dual
    a3: Dual
    b0: Dual
    b1: Dual
    b2: Dual


def volume_coefficients(s: Tensor, t: Tensor) -> VolumeCoefficients:
    """Return the 48 terms, gathered by power of pressure. `s` in g/kg, `t` in degrees Celsius."""
    root_s = torch.sqrt(s)
    a0 = _polynomial(
        t,
        1.0 + s * (-7.521448093615448e-3 + s * 5.419326551148740e-6 + root_s * -3.303308871386421e-5),
        2.775927747785646e-3 + s * (-2.764306979894411e-5 + root_s * 3.801564588876298e-7),
        -2.349607444135925e-5 + s * (1.262937315098546e-7 + root_s * -7.672876869259043e-9),
        1.119513357486743e-6 + s * (9.527875081696435e-10 + root_s * -4.634182341116144e-11),
        6.743689325042773e-10 + s * (-1.811147201949891e-11 + root_s * 2.681097235569143e-12),
    )
    a1 = _polynomial(
        t,
        -2.742185394906099e-5 + s * -1.105097577149576e-7,
        -3.212746477974189e-7 + s * 6.211426728363857e-10,
        3.191413910561627e-9,
        -1.931012931541776e-12,
    )
    a2 = _polynomial(
        t, -1.119011592875110e-10, -1.941660213148725e-11 + s * 1.119522344879478e-14, -1.864826425365600e-14
    )
    a3 = _polynomial(t, -1.200507748551599e-15, 6.057902487546866e-17)
    b0 = _polynomial(
        t,
        9.998420897506056e2 + s * (-6.698001071123802 + root_s * -3.988822378968490e-2),
        2.839940833161907 + s * (-2.986498947203215e-2 + root_s * 5.095422573880500e-4),
        -3.147759265588511e-2 + s * (2.327859407479162e-4 + root_s * -1.426984671633621e-5),
        1.181805545074306e-3 + s * root_s * 1.645039373682922e-7,
    )
    b1 = _polynomial(
        t,
        -2.233269627352527e-2 + s * -1.806789763745328e-4,
        -3.436090079851880e-4 + s * 6.876837219536232e-7,
        3.726050720345733e-6,
    )
    b2 = _polynomial(
        t, -3.087032500374211e-7 + s * 1.550932729220080e-10, -1.988366587925593e-8, -1.061519070296458e-11
    )
    return VolumeCoefficients(a0, a1, a2, a3, b0, b1.scaled(0.5), b2)


def enthalpy_slope(s: Tensor, t: Tensor, p: Tensor) -> Tensor:
    """Return d(dynamic enthalpy)/dt in J/(kg K); `p`: sea pressure in dbar. Operands broadcast; any float dtype."""
    c = volume_coefficients(s, t)
    # Long division splits off the quotient; the rest is (n + m p) over the denominator, whose roots are -upper / b2
    # and -lower / b2.
    a3_b1 = c.a3 * c.b1 / c.b2
    n = c.a0 + (a3_b1.scaled(2.0) - c.a2) * c.b0 / c.b2
    m = c.a1 + ((a3_b1.scaled(2.0) - c.a2).scaled(2.0) * c.b1 - c.a3 * c.b0) / c.b2
    root = (c.b1 * c.b1 - c.b0 * c.b2).sqrt()
    lower, upper = c.b1 - root, c.b1 + root
    b2_p = c.b2.scaled(p)
    quotient = (c.a2 - a3_b1.scaled(2.0) + c.a3.scaled(0.5 * p)).scaled(p) / c.b2
    whole = (m / c.b2).scaled(0.5) * ((c.b1.scaled(2.0) + b2_p).scaled(p) / c.b0).log1p()
    width = root.scaled(2.0)
    split = (n * c.b2 - m * c.b1) / (c.b2 * width) * (b2_p * width / (lower * (upper + b2_p))).log1p()
    return PASCAL_PER_DECIBAR * (quotient.slope + whole.slope + split.slope)


class EnthalpySlope(nn.Module):
    """Wrap `enthalpy_slope` as a module without parameters."""

    def forward(self, s: Tensor, t: Tensor, p: Tensor) -> Tensor:
        return enthalpy_slope(s, t, p)


def _polynomial(t: Tensor, *coefficients: float | Tensor) -> Dual:
    """Return sum c[i] t^i and its derivative by Horner's rule; a coefficient may depend on salinity."""
    value = coefficients[-2] + coefficients[-1] * t
    slope: float | Tensor = coefficients[-1]
    for coefficient in reversed(coefficients[:-2]):
        slope = slope * t + value
        value = value * t + coefficient
    return Dual(torch.as_tensor(value), slope if isinstance(slope, Tensor) else torch.full_like(t, slope))
