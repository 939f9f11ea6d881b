"""Measure the distance of two results: relative error per tensor, in two norms.

The error is ||x - ref|| / ||ref|| over all elements of a tensor, because the relative error of single elements near
zero is meaningless in low precision. The L2 norm hides one wrong element among a million; the maximum norm hides many
elements with a small error. So the larger of the two counts. The error is infinite where no distance is defined: a
different shape or dtype, a missing tensor, an integer that differs, or an infinity or NaN in only one of the results.

Check that results were computed from their own inputs:

A CUDA graph that reads stale input addresses computes a correct result of other inputs. Where a program's results
hardly depend on its inputs (an AlexNet with random weights returns nearly the same for all images), such a result is
within the tolerance. But it is closer to eager's result of those other inputs, which is checked here. Rounding does
not cause this: it would need the same sign in many elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from suite.measure.results import BUFFER, GRADIENT, State

CHUNK_ELEMENTS = 2**24
"""Elements compared at once: tensors come from host memory, and are compared in float64 on the device."""

LEAST_SHARE = 0.04
"""Share of the size of all gradients, or of all buffers, that smaller ones are measured against, or the tolerance where
that is larger. Noise in gradients that are zero is up to 50 roundings of that size in EfficientDet in float32."""


@dataclass(frozen=True, slots=True)
class Size:
    """Describe the size of tensors' finite elements: their root mean square, and the largest absolute value."""

    rms: float = 0.0
    largest: float = 0.0


def relative_error(
    value: torch.Tensor, reference: torch.Tensor, *, device: torch.device, least: Size | None = None
) -> float:
    """Return the relative error of `value`, the larger one of the L2 and the maximum norm.

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
    """Return 0 for finite elements, 1 and -1 for the infinities, 2 for NaN."""
    return torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), 0.0))


def misshapen(results: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], state: State) -> list[str]:
    """Return the names of tensors that are missing on one side or differ in dtype or shape.

    A buffer or input that only one side changed is not missing, see `errors`.
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
    """Return relative errors by tensor name, over the names of both sides; 0 for names in `same`, whose bits agree.

    A buffer or input that only one side changed is compared with its saved value in `state`. Gradients and buffers
    are compared relative to at least `LEAST_SHARE` or `tolerance` of the size of all gradients or all buffers. Where
    the true value is zero, the computed one is rounding noise and has no meaningful relative error. Examples are the
    gradient of a bias before a normalisation, and the mean of a linear layer's outputs for normalised inputs
    (EfficientNet's bottlenecks).
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
    of_kind = (tensor for name, tensor in reference.items() if name.startswith(kind) and tensor.is_floating_point())
    size = size_of(of_kind, device)
    return Size(share * size.rms, share * size.largest)


def size_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Size:
    """Return the size over all elements of the tensors, computed on `device`."""
    squares, count, largest = 0.0, 0, 0.0
    for tensor in tensors:
        for part in tensor.reshape(-1).split(CHUNK_ELEMENTS):
            finite = part.to(device).double().nan_to_num(0.0, 0.0, 0.0)
            squares += float(finite.square().sum())
            largest = max(largest, _largest(finite))
        count += tensor.numel()
    return Size(math.sqrt(squares / max(1, count)), largest)


NEARER = 4.0
"""A result that is closer by this factor to eager's result of other inputs counts as computed from those."""

MOST_ELEMENTS = 2**22
"""Number of evenly spaced elements that are compared of a larger tensor: a mode that reads other inputs differs
wherever results depend on them. Copying gigabytes to the device again for each input set takes many seconds."""

LEAST_ELEMENTS = 16
"""Smaller tensors are not checked: in few dimensions, rounding errors may resemble the effect of other inputs."""


def result_of_other_inputs(
    results: Sequence[Mapping[str, torch.Tensor]],
    eager: Sequence[Mapping[str, torch.Tensor]],
    *,
    device: torch.device,
) -> tuple[str, float] | None:
    """Return a tensor that matches eager's result of another input set, with its relative error, or None.

    Args:
        results: tensors by name, of one input set after the other.
        eager: eager's, in the same order.
        device: where to compare.
    """
    for index, (found, expected) in enumerate(zip(results, eager, strict=True)):
        for name, tensor in found.items():
            if not tensor.is_floating_point() or tensor.numel() < LEAST_ELEMENTS or name not in expected:
                continue
            tensor = _sample(tensor)
            own = relative_error(tensor, _sample(expected[name]), device=device)
            others = (
                relative_error(tensor, _sample(other[name]), device=device)
                for number, other in enumerate(eager)
                if number != index and name in other
            )
            if own > 0.0 and any(math.isfinite(error) and error * NEARER < own for error in others):
                return name, own
    return None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)[:: -(-tensor.numel() // MOST_ELEMENTS)] if tensor.numel() > MOST_ELEMENTS else tensor
