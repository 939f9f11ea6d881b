"""Whether results belong to the inputs that they are said to be of.

A CUDA graph that reads its inputs from where they were before computes a correct result, but of other inputs. Where a
program's results hardly depend on its inputs (an AlexNet with random weights gives nearly the same for all images),
such a result is within the tolerance. But it is nearer to what eager computes of those other inputs, and that is what
is checked here. Rounding does not bring a result there: it would have to go all one way in many elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from suite.measure.compare import relative_error

NEARER = 4.0
"""How many times nearer to eager's results of other inputs a result is that is taken for one of these."""

MOST_ELEMENTS = 2**22
"""Of a larger tensor, so many that lie evenly in it: who reads other inputs differs wherever results depend on them.
Gigabytes of output take many seconds to bring to the device once more for each input set."""

LEAST_ELEMENTS = 16
"""Tensors of fewer elements say nothing: in few dimensions, rounding may well go the way in which inputs differ."""


def result_of_other_inputs(
    results: Sequence[Mapping[str, torch.Tensor]],
    eager: Sequence[Mapping[str, torch.Tensor]],
    *,
    device: torch.device,
) -> tuple[str, float] | None:
    """A tensor that is eager's of another input set, with its relative error; None where there is none.

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
