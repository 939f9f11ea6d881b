"""Tensors made of Python's numbers on the GPU, `torch.tensor(0.5, device="cuda")`: filled there instead of copied.

The copy from host memory cannot be in a graph. A fill with the same number has the same bits, and the number stands in
the trace, where calls are compared. Only numbers are filled: data of NumPy may change unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST_NUMBERS = 32
"""A list of more is left to PyTorch: each takes a kernel of its own."""
_NUMBERS = (bool, int, float, complex)


def filling(
    stock: Callable[..., torch.Tensor], is_gpu: Callable[[torch.device], bool], dtype_of: Callable[[Any], torch.dtype]
) -> Callable[..., torch.Tensor]:
    """`torch.tensor`, which is `stock`, with fills where it would copy numbers to the GPU."""

    def tensor(data: Any, **keywords: Any) -> torch.Tensor:
        device = keywords.get("device")
        numbers = [data] if type(data) in _NUMBERS else data if type(data) in (list, tuple) else []
        fits = 0 < len(numbers) <= MOST_NUMBERS and all(type(number) in _NUMBERS for number in numbers)
        if device is None or not fits or not keywords.keys() <= {"device", "dtype"}:
            return stock(data, **keywords)
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if not is_gpu(place):
            return stock(data, **keywords)
        try:
            dtype = keywords.get("dtype") or dtype_of(data)
            filled = [torch.full((), number, dtype=dtype, device=place) for number in numbers]
        except (RuntimeError, TypeError, ValueError, OverflowError):  # a number that the dtype does not hold
            return stock(data, **keywords)
        return filled[0] if numbers is not data else torch.stack(filled)

    return tensor
