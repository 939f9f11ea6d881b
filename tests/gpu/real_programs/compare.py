"""Results of a program in two modes, compared leaf by leaf."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open


@dataclass(frozen=True)
class Difference:
    """The difference of results from a reference's.

    Attributes:
        error: largest relative L2 error of a floating-point leaf; infinite where infinities or NaNs are in other
            places, where a leaf of integers differs, and where a leaf has another shape or dtype.
        where: the leaf it is of, None if there is no difference.
        bits: whether all leaves are equal bit for bit.
    """

    error: float
    where: str | None
    bits: bool


def difference(results: Path, reference: Path) -> Difference:
    """Raises ValueError if a leaf is missing on one side, or if there is none at all."""
    with safe_open(results, "pt") as given, safe_open(reference, "pt") as wanted:
        names, expected = set(given.keys()), set(wanted.keys())
        if names != expected or not names:
            only = sorted(names ^ expected)[:3]
            raise ValueError(f"{len(names)} results against {len(expected)}; on one side only: {', '.join(only)}")
        worst, where, bits = 0.0, None, True
        for name in sorted(names):
            left, right = given.get_tensor(name), wanted.get_tensor(name)
            if left.shape == right.shape and left.dtype == right.dtype and _same_bits(left, right):
                continue
            bits = False
            error = relative_error(left, right)
            if error >= worst:
                worst, where = error, name
        return Difference(worst, where, bits)


def relative_error(left: torch.Tensor, right: torch.Tensor) -> float:
    """||left - right|| / ||right|| in float64; infinite where they cannot be near (see `Difference`)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return float("inf")
    if not (right.is_floating_point() or right.is_complex()):
        return 0.0 if torch.equal(left, right) else float("inf")
    wide = torch.complex128 if right.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    finite = right.isfinite()
    if not torch.equal(left.isfinite(), finite) or not torch.equal(
        left[~finite].nan_to_num(nan=0.5), right[~finite].nan_to_num(nan=0.5)
    ):
        return float("inf")
    norm = right[finite].norm().item()
    distance = (left[finite] - right[finite]).norm().item()
    return distance / norm if norm else (float("inf") if distance else 0.0)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
