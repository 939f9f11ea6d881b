"""Python's numbers on the GPU: filled in there instead of copied.

`torch.tensor(0.5, device="cuda")` and its relatives, `x[:, 0] = 0.5`, `x[:, [2, 1, 0]]`.

The copy from host memory cannot be in a graph. A fill with the same number has the same bits, and the number stands in
the trace, where calls are compared. Only numbers are filled: data of NumPy may change unnoticed.

Note [Numbers that are assigned]. PyTorch makes a tensor in CPU memory of a number that is assigned to a part of a
tensor, by no operator, and fills or copies from there. Where the part is told by a mask, it reads the number on the
host, which a capture can hold; one tensor of places takes a copy, which it cannot.

Note [Methods that are replaced]. A class of tensors may tell by the identity of a method what to do, and PyTorch looks
that up in `torch.Tensor` when it calls `__torch_function__`. So PyTorch's own stands there whenever it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import EllipsisType
from typing import Any

import torch

from optimizations.torch_internals import replaced_attribute

MOST_NUMBERS = 32
"""A list of more is left to PyTorch: each takes a kernel of its own."""
_NUMBERS = (bool, int, float, complex)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Owner:
    """Where methods of `torch.Tensor` are replaced, for the tensors of one thread. Note [Methods that are replaced].

    Attributes:
        holds: whether a tensor lies on the GPU.
        elsewhere: whether what runs now is no part of a step.
    """

    def __init__(self, holds: Callable[[torch.Tensor], bool], elsewhere: Callable[[], bool]) -> None:
        self.holds, self.elsewhere = holds, elsewhere

    def sees(self, tensor: torch.Tensor) -> bool:
        """Whether a method of this tensor may do something else than PyTorch's."""
        return type(tensor) in _PLAIN_TENSORS and not self.elsewhere() and self.holds(tensor)

    def plainly(self, name: str, stock: Any) -> AbstractContextManager[Any]:
        """PyTorch's own method, `stock`, stands in its place in the block."""
        if self.elsewhere():
            return contextlib.nullcontext()
        return replaced_attribute(torch.Tensor, name, stock)


def filling(
    stock: Callable[..., torch.Tensor], is_gpu: Callable[[torch.device], bool], dtype_of: Callable[[Any], torch.dtype]
) -> Callable[..., torch.Tensor]:
    """`torch.tensor` or `torch.as_tensor`, which is `stock`, with fills where it would copy numbers to the GPU."""

    def tensor(data: Any, *rest: Any, **keywords: Any) -> torch.Tensor:
        device = keywords.get("device")
        if device is None or rest or not keywords.keys() <= {"device", "dtype"} or (found := _numbers(data)) is None:
            return stock(data, *rest, **keywords)
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if not is_gpu(place):
            return stock(data, **keywords)
        try:
            return _filled(*found, keywords.get("dtype") or dtype_of(data), place)
        except (RuntimeError, TypeError, ValueError, OverflowError):  # a number that the dtype does not hold
            return stock(data, **keywords)

    return tensor


def filling_like(owner: Owner) -> Callable[..., torch.Tensor]:
    """`Tensor.new_tensor` in the same way."""
    stock = torch.Tensor.new_tensor

    def new_tensor(tensor: torch.Tensor, *data: Any, **keywords: Any) -> torch.Tensor:
        known = len(data) == 1 and keywords.keys() <= {"dtype"} and owner.sees(tensor)
        if known and (found := _numbers(data[0])) is not None:
            with contextlib.suppress(RuntimeError, TypeError, ValueError, OverflowError):
                return _filled(*found, keywords.get("dtype") or tensor.dtype, tensor.device)
        with owner.plainly("new_tensor", stock):
            return stock(tensor, *data, **keywords)

    return new_tensor


def _numbers(data: Any) -> tuple[tuple[int, ...], list[complex]] | None:
    """The shape and the numbers of a number or of nested lists of few; None for anything else."""
    if type(data) in _NUMBERS:
        return (), [data]
    if type(data) not in (list, tuple) or not 0 < len(data) <= MOST_NUMBERS:
        return None
    shape: tuple[int, ...] | None = None
    numbers: list[complex] = []
    for member in data:
        found = _numbers(member)
        if found is None or shape not in (None, found[0]):
            return None
        shape = found[0]
        numbers += found[1]
        if len(numbers) > MOST_NUMBERS:
            return None
    return (len(data), *(shape or ())), numbers


def _filled(shape: tuple[int, ...], numbers: list[complex], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    filled = [torch.full((), number, dtype=dtype, device=device) for number in numbers]
    if not shape:
        return filled[0]
    return torch.stack(filled) if len(shape) == 1 else torch.stack(filled).view(shape)


def indexing(owner: Owner) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """`Tensor.__getitem__`: places in lists, `x[:, [2, 1, 0]]`, are filled in, too."""
    stock = torch.Tensor.__getitem__

    def get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        if owner.sees(tensor):
            index = _with_places(tensor, index)
        with owner.plainly("__getitem__", stock):
            return stock(tensor, index)

    return get


def _with_places(tensor: torch.Tensor, index: Any) -> Any:
    """An index whose lists of places are tensors."""
    parts = index if type(index) is tuple else (index,)
    if not any(type(part) is list for part in parts):
        return index
    made = [_places(tensor, part) for part in parts]
    return tuple(made) if type(index) is tuple else made[0]


def _places(tensor: torch.Tensor, part: Any) -> Any:
    few = type(part) is list and 0 < len(part) <= MOST_NUMBERS
    if not few or any(type(member) is not int for member in part):
        return part
    return _filled((len(part),), part, torch.int64, tensor.device)


def assigning(
    owner: Owner, by_a_mask: Callable[[complex], AbstractContextManager[None]]
) -> Callable[[torch.Tensor, Any, Any], None]:
    """`Tensor.__setitem__`. Note [Numbers that are assigned].

    `by_a_mask`: in which PyTorch reads a number itself.
    """
    stock = torch.Tensor.__setitem__

    def assign(tensor: torch.Tensor, index: Any, value: Any) -> None:
        by: AbstractContextManager[None] = contextlib.nullcontext()
        if owner.sees(tensor) and not tensor.is_quantized:
            index = _with_places(tensor, index)
            if isinstance(value, _NUMBERS):
                others = [part for part in (index if type(index) is tuple else (index,)) if not _is_basic(part)]
                if not others:
                    tensor[index].fill_(value)
                    return
                if all(_is_tensor_of(part, owner.holds, torch.int64, torch.int32) and part.dim() for part in others):
                    value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
                elif len(others) == 1 and _is_tensor_of(others[0], owner.holds, torch.bool):
                    by = by_a_mask(value)
        with by, owner.plainly("__setitem__", stock):
            stock(tensor, index, value)

    return assign


def _is_basic(part: Any) -> bool:
    """Whether a part of an index leads to a view."""
    return type(part) is int or part is None or isinstance(part, (slice, EllipsisType))


def _is_tensor_of(part: Any, holds: Callable[[torch.Tensor], bool], *dtypes: torch.dtype) -> bool:
    return type(part) in _PLAIN_TENSORS and part.dtype in dtypes and holds(part)
