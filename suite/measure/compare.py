"""How far two results are apart: relative L2 error per tensor.

||x - ref|| / ||ref|| over all elements of a tensor, because single elements that are nearly zero say nothing about a
computation in low precision. What cannot be expressed as a distance is infinitely far away: another shape or dtype, a
missing tensor, an integer that differs, an infinity or NaN in another place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from suite.measure.results import GRADIENT, State

CHUNK_ELEMENTS = 2**24
"""Elements compared at once: tensors come from host memory, and are compared in float64 on the device."""


def relative_error(
    value: torch.Tensor, reference: torch.Tensor, *, device: torch.device, least_rms: float = 0.0
) -> float:
    """Relative L2 error of `value`; 0.0 if both are empty or zero, `inf` if they cannot be compared.

    Floating dtypes may differ. Integers and booleans must be equal: 0.0 or `inf`. Where the reference's root mean
    square is below `least_rms`, the difference is taken relative to `least_rms` instead.
    """
    if value.shape != reference.shape or value.is_floating_point() != reference.is_floating_point():
        return math.inf
    if not value.is_floating_point():
        return 0.0 if torch.equal(value, reference) else math.inf
    squared_difference = squared_norm = 0.0
    chunks = zip(value.reshape(-1).split(CHUNK_ELEMENTS), reference.reshape(-1).split(CHUNK_ELEMENTS), strict=True)
    for part, reference_part in chunks:
        x, ref = part.to(device).double(), reference_part.to(device).double()
        finite = ref.isfinite()
        if not torch.equal(_unusual(x), _unusual(ref)):
            return math.inf
        squared_difference += float((x - ref)[finite].square().sum())
        squared_norm += float(ref[finite].square().sum())
    scale = max(math.sqrt(squared_norm), least_rms * math.sqrt(value.numel()))
    if scale == 0.0:
        return 0.0 if squared_difference == 0.0 else math.inf
    return math.sqrt(squared_difference) / scale


def _unusual(x: torch.Tensor) -> torch.Tensor:
    """0 for finite elements, 1 and -1 for the infinities, 2 for NaN."""
    return torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), 0.0))


def misshapen(results: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], state: State) -> list[str]:
    """Names of tensors that one side lacks, or that have another dtype or shape: wrong whatever their values are.

    Buffers and inputs that only one side changed are there on both, see `errors`.
    """

    def form(tensor: torch.Tensor | None) -> tuple[torch.dtype, torch.Size] | None:
        return None if tensor is None else (tensor.dtype, tensor.shape)

    names = [*reference, *(name for name in results if name not in reference)]
    return [
        name
        for name in names
        if form(results.get(name, state.saved(name))) != form(reference.get(name, state.saved(name)))
    ]


def errors(
    results: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    state: State,
    *,
    device: torch.device,
    tolerance: float,
) -> dict[str, float]:
    """Relative errors by tensor name, over all names in either.

    A buffer or input that only one side changed is compared with its value before, from `state`. Gradients are
    compared relative to at least `tolerance` times the root mean square of all gradients: where the true gradient is
    zero (a bias in front of a normalisation, say), what is computed is rounding noise, and has no relative error.
    """
    least_rms = tolerance * _rms([tensor for name, tensor in reference.items() if name.startswith(GRADIENT)])
    found: dict[str, float] = {}
    for name in [*reference, *(name for name in results if name not in reference)]:
        value, expected = results.get(name, state.saved(name)), reference.get(name, state.saved(name))
        if value is None or expected is None:
            found[name] = math.inf
        else:
            least = least_rms if name.startswith(GRADIENT) else 0.0
            found[name] = relative_error(value, expected, device=device, least_rms=least)
    return found


def _rms(tensors: list[torch.Tensor]) -> float:
    """Root mean square over the finite elements of all of them."""
    squares = sum(float(tensor.double().nan_to_num(0.0, 0.0, 0.0).square().sum()) for tensor in tensors)
    return math.sqrt(squares / max(1, sum(tensor.numel() for tensor in tensors)))
