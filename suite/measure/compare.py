"""How far two results are apart: relative error per tensor, in two norms.

||x - ref|| / ||ref|| over all elements of a tensor, because single elements that are nearly zero say nothing about a
computation in low precision. In the L2 norm, a wrong element among a million has no weight; in the maximum norm, many
elements that are somewhat wrong have none. So an error is the larger of the two. What cannot be expressed as a distance
is infinitely far away: another shape or dtype, a missing tensor, an integer that differs, an infinity or NaN in another
place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from suite.measure.results import BUFFER, GRADIENT, State

CHUNK_ELEMENTS = 2**24
"""Elements compared at once: tensors come from host memory, and are compared in float64 on the device."""

LEAST_SHARE = 0.04
"""Of the size of all gradients, or of all buffers: what smaller ones are measured against, or the tolerance where that
is larger. Noise in gradients that are zero is up to 50 roundings of that size in EfficientDet in float32."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the finite elements of tensors are: their root mean square, and the largest absolute value."""

    rms: float = 0.0
    largest: float = 0.0


def relative_error(
    value: torch.Tensor, reference: torch.Tensor, *, device: torch.device, least: Size | None = None
) -> float:
    """Relative error of `value`, the larger one of the L2 and the maximum norm.

    0.0 if both are empty or zero, `inf` if they cannot be compared. Floating dtypes may differ. Integers and booleans
    must be equal: 0.0 or `inf`. Where the reference is smaller than `least`, the difference is taken relative to that
    instead.
    """
    if value.shape != reference.shape or value.is_floating_point() != reference.is_floating_point():
        return math.inf
    if not value.is_floating_point():
        return 0.0 if torch.equal(value, reference) else math.inf
    least = least or Size()
    squared_difference = squared_norm = largest_difference = largest = 0.0
    chunks = zip(value.reshape(-1).split(CHUNK_ELEMENTS), reference.reshape(-1).split(CHUNK_ELEMENTS), strict=True)
    for part, reference_part in chunks:
        x, ref = part.to(device).double(), reference_part.to(device).double()
        finite = ref.isfinite()
        if not torch.equal(_unusual(x), _unusual(ref)):
            return math.inf
        difference, ref = (x - ref)[finite], ref[finite]
        squared_difference += float(difference.square().sum())
        squared_norm += float(ref.square().sum())
        largest_difference = max(largest_difference, _largest(difference))
        largest = max(largest, _largest(ref))
    norm = max(math.sqrt(squared_norm), least.rms * math.sqrt(value.numel()))
    return max(_ratio(math.sqrt(squared_difference), norm), _ratio(largest_difference, max(largest, least.largest)))


def _ratio(difference: float, size: float) -> float:
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


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
    same: Collection[str] = (),
) -> dict[str, float]:
    """Relative errors by tensor name, over all names in either. Those that are known to have the `same` bits have none.

    A buffer or input that only one side changed is compared with its value before, from `state`. Gradients and buffers
    are compared relative to at least `LEAST_SHARE` or `tolerance` of the size of all of their kind: where the true
    value is zero, what is computed is rounding noise, and has no relative error. So it is with the gradient of a bias
    in front of a normalisation, and with the mean of what a linear layer makes of normalised values (EfficientNet's
    bottlenecks).
    """
    least = {kind: _least(kind, reference, max(tolerance, LEAST_SHARE), device) for kind in (GRADIENT, BUFFER)}
    found: dict[str, float] = {}
    for name in [*reference, *(name for name in results if name not in reference)]:
        value, expected = results.get(name, state.saved(name)), reference.get(name, state.saved(name))
        if value is None or expected is None:
            found[name] = math.inf
        elif name in same:
            found[name] = 0.0
        else:
            floor = next((size for kind, size in least.items() if name.startswith(kind)), None)
            found[name] = relative_error(value, expected, device=device, least=floor)
    return found


def _least(kind: str, reference: Mapping[str, torch.Tensor], share: float, device: torch.device) -> Size:
    alike = (tensor for name, tensor in reference.items() if name.startswith(kind) and tensor.is_floating_point())
    size = size_of(alike, device)
    return Size(share * size.rms, share * size.largest)


def size_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Size:
    """Size of all of them together, found on `device`."""
    squares, count, largest = 0.0, 0, 0.0
    for tensor in tensors:
        for part in tensor.reshape(-1).split(CHUNK_ELEMENTS):
            finite = part.to(device).double().nan_to_num(0.0, 0.0, 0.0)
            squares += float(finite.square().sum())
            largest = max(largest, _largest(finite))
        count += tensor.numel()
    return Size(math.sqrt(squares / max(1, count)), largest)
