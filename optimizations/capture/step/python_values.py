"""Python's numbers on the GPU, `torch.tensor(0.5, device="cuda")` and `x[:, 0] = 0.5`: filled in instead of copied.

The copy from host memory cannot be in a graph. A fill with the same number has the same bits, and the number stands in
the trace, where calls are compared. Only numbers are filled: data of NumPy may change unnoticed.

Note [Numbers that are assigned]. PyTorch makes a tensor in CPU memory of a number that is assigned to a part of a
tensor, by no operator, and fills or copies from there. Where the part is told by a mask, it reads the number on the
host, which a capture can hold; one tensor of places takes a copy, which it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType
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


def assigning(
    stock: Callable[[torch.Tensor, Any, Any], None],
    on_gpu: Callable[[torch.Tensor], bool],
    elsewhere: Callable[[], bool],
    by_a_mask: Callable[[complex], AbstractContextManager[None]],
) -> Callable[[torch.Tensor, Any, Any], None]:
    """`Tensor.__setitem__`, which is `stock`. Note [Numbers that are assigned].

    `elsewhere`: whether PyTorch's own is to be called in any case. `by_a_mask`: in which PyTorch reads a number itself.
    """

    def assign(tensor: torch.Tensor, index: Any, value: Any) -> None:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and isinstance(value, _NUMBERS)
        if not plain or elsewhere() or not on_gpu(tensor) or tensor.is_quantized:
            stock(tensor, index, value)
            return
        others = [part for part in (index if type(index) is tuple else (index,)) if not _is_basic(part)]
        if not others:
            tensor[index].fill_(value)
            return
        if all(_is_tensor_of(part, on_gpu, torch.int64, torch.int32) and part.dim() for part in others):
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        by_mask = len(others) == 1 and _is_tensor_of(others[0], on_gpu, torch.bool)
        with by_a_mask(value) if by_mask else nullcontext():
            stock(tensor, index, value)

    return assign


def _is_basic(part: Any) -> bool:
    """Whether a part of an index leads to a view."""
    return type(part) is int or part is None or isinstance(part, (slice, EllipsisType))


def _is_tensor_of(part: Any, on_gpu: Callable[[torch.Tensor], bool], *dtypes: torch.dtype) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in dtypes and on_gpu(part)
