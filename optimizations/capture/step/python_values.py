"""Fill Python's numbers in on the GPU instead of copying them.

`torch.tensor(0.5, device="cuda")` and its relatives, `x[:, 0] = 0.5`, `x[:, [2, 1, 0]] = y`.

The copy from host memory cannot be in a graph. A fill with the same number has the same bits, and the number stands in
the trace, where calls are compared. Only numbers are filled: data of NumPy may change unnoticed.

Note [Numbers that are assigned]. PyTorch makes a tensor in CPU memory of a number that is assigned to a part of a
tensor, by no operator, and fills or copies from there. Where the part is told by a mask, it reads the number on the
host, which a capture can hold; one tensor of places takes a copy, which it cannot.

Note [Methods that are replaced]. A class of tensors may tell by the identity of a method what to do, and PyTorch looks
that up in `torch.Tensor` when it calls `__torch_function__`. So PyTorch's own stands there whenever it is called.
A mode is to see what the program called, so where there is one PyTorch's own is called; a default device looks at
nothing that names its device.
`__getitem__` is never replaced: from then on Python would take all tensors for sequences, whatever is put back, and
`torch.tensor` of a list of tensors asks for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import EllipsisType, FunctionType
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals import replaced_attribute

MOST_NUMBERS = 32
"""A list of more is left to PyTorch: each takes a kernel of its own."""
_NUMBERS = (bool, int, float, complex)
_NOT_HELD = (RuntimeError, TypeError, ValueError, OverflowError)
"""What is raised for a number that a dtype does not hold, or a device that is none: PyTorch's own is called then."""
_NOT_ASSIGNED = (*_NOT_HELD, IndexError)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Owner:
    """Tell where PyTorch's functions are replaced, for tensors of one thread. Note [Methods that are replaced].

    Attributes:
        holds: whether a tensor lies on the GPU.
        elsewhere: whether the current thread runs something else than the step.
    """

    def __init__(self, holds: Callable[[torch.Tensor], bool], elsewhere: Callable[[], bool]) -> None:
        self.holds, self.elsewhere = holds, elsewhere

    def is_here(self) -> bool:
        """Return whether a function may do something else than PyTorch's."""
        return not self.elsewhere() and _only_default_devices()

    def sees(self, tensor: torch.Tensor) -> bool:
        """Return whether a method of this tensor may do something else than PyTorch's."""
        return type(tensor) in _PLAIN_TENSORS and self.is_here() and _is_ordinary(tensor) and self.holds(tensor)

    def plainly(self, owner: Any, name: str, stock: Any) -> AbstractContextManager[Any]:
        """Put PyTorch's own function, `stock`, in its place in the block."""
        if self.elsewhere():
            return contextlib.nullcontext()
        return replaced_attribute(owner, name, stock)


def is_pytorchs(function: Any) -> bool:
    """Return whether a function is PyTorch's own, or stands in for it in a step of another thread.

    The program's own functions stay.
    """
    return not isinstance(function, FunctionType) or function.__module__ == __name__


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether nothing is special about the tensor: of others PyTorch refuses much that fills would do."""
    unusual = tensor.is_nested or tensor.is_quantized or torch_internals.has_names(tensor)
    laid_out = tensor.layout is torch.strided and not unusual
    return laid_out and not (tensor.is_conj() or tensor.is_neg()) and tensor.dtype is not torch.complex32


def _only_default_devices() -> bool:
    stack = map(torch_internals.get_function_stack_at, range(torch_internals.len_torch_function_stack()))
    return all(type(mode) is torch_internals.DeviceContext for mode in stack)


def filling(
    owner: Owner, name: str, is_gpu: Callable[[torch.device], bool], dtype_of: Callable[[Any], torch.dtype]
) -> Callable[..., torch.Tensor]:
    """Return `torch.tensor` or `torch.as_tensor`, by its name, with fills where it would copy numbers to the GPU."""
    stock = vars(torch)[name]

    def tensor(*data: Any, **keywords: Any) -> torch.Tensor:
        known = len(data) == 1 and keywords.keys() <= {"device", "dtype"} and keywords.get("device") is not None
        if known and owner.is_here() and (found := _numbers(data[0])) is not None:
            with contextlib.suppress(*_NOT_HELD):
                device = keywords["device"]
                place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
                if is_gpu(place):
                    return _filled(*found, keywords.get("dtype") or dtype_of(data[0]), place)
        with owner.plainly(torch, name, stock):
            made: torch.Tensor = stock(*data, **keywords)
        return made

    return tensor


def filling_like(owner: Owner) -> Callable[..., torch.Tensor]:
    """Return `Tensor.new_tensor` with fills in the same way."""
    stock = torch.Tensor.new_tensor

    def new_tensor(tensor: torch.Tensor, *data: Any, **keywords: Any) -> torch.Tensor:
        known = len(data) == 1 and keywords.keys() <= {"dtype"} and owner.sees(tensor)
        if known and (found := _numbers(data[0])) is not None:
            with contextlib.suppress(*_NOT_HELD):
                return _filled(*found, keywords.get("dtype") or tensor.dtype, tensor.device)
        with owner.plainly(torch.Tensor, "new_tensor", stock):
            return stock(tensor, *data, **keywords)

    return new_tensor


def _numbers(data: Any) -> tuple[tuple[int, ...], list[complex]] | None:
    """Return the shape and the numbers of a number or of nested lists of few; None for anything else."""
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
    filled = [torch.full((), _as_filled(number, dtype), dtype=dtype, device=device) for number in numbers]
    if not shape:
        return filled[0]
    return torch.stack(filled) if len(shape) == 1 else torch.stack(filled).view(shape)


def _as_filled(number: complex, dtype: torch.dtype) -> complex:
    """Return what a fill makes the same bits of as `torch.tensor`, which takes real numbers in double precision.

    Raises:
        TypeError: PyTorch may not take it: a complex number, even one without an imaginary part, or one below zero.
    """
    if (type(number) is complex and not dtype.is_complex) or dtype is torch.uint64:
        raise TypeError(f"{number} as {dtype}")
    return float(number) if type(number) is int and (dtype.is_floating_point or dtype.is_complex) else number


def _with_places(tensor: torch.Tensor, index: Any) -> Any:
    """Return an index whose lists of places are tensors."""
    parts = index if type(index) is tuple else (index,)
    if not any(type(part) is list for part in parts):
        return index
    made = [_places(tensor, part) for part in parts]
    return tuple(made) if type(index) is tuple else made[0]


def _places(tensor: torch.Tensor, part: Any) -> Any:
    few = type(part) is list and 0 < len(part) <= MOST_NUMBERS
    if not few or any(type(member) is not int for member in part):
        return part
    with contextlib.suppress(*_NOT_HELD):
        return _filled((len(part),), part, torch.int64, tensor.device)
    return part


def assigning(
    owner: Owner, by_a_mask: Callable[[complex], AbstractContextManager[None]]
) -> Callable[[torch.Tensor, Any, Any], None]:
    """Return `Tensor.__setitem__` with fills. Note [Numbers that are assigned].

    `by_a_mask`: in which PyTorch reads a number itself.
    """
    stock = torch.Tensor.__setitem__

    def assign(tensor: torch.Tensor, index: Any, value: Any) -> None:
        by: AbstractContextManager[None] = contextlib.nullcontext()
        if owner.sees(tensor):
            index = _with_places(tensor, index)
            if _is_scalar(value):
                others = [part for part in (index if type(index) is tuple else (index,)) if not _is_basic(part)]
                if not others:
                    with contextlib.suppress(*_NOT_ASSIGNED):
                        tensor[index].fill_(value)
                        return
                elif all(_is_tensor_of(part, owner.holds, torch.int64, torch.int32) and part.dim() for part in others):
                    with contextlib.suppress(*_NOT_HELD):
                        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
                elif len(others) == 1 and _is_tensor_of(others[0], owner.holds, torch.bool):
                    by = by_a_mask(value)
        with by, owner.plainly(torch.Tensor, "__setitem__", stock):
            stock(tensor, index, value)

    return assign


def _is_scalar(value: Any) -> bool:
    """Return whether PyTorch takes it for a number that it may assign."""
    return isinstance(value, _NUMBERS) and (not isinstance(value, int) or -(2**63) <= value < 2**63)


def _is_basic(part: Any) -> bool:
    """Return whether a part of an index leads to a view."""
    return type(part) is int or part is None or isinstance(part, (slice, EllipsisType))


def _is_tensor_of(part: Any, holds: Callable[[torch.Tensor], bool], *dtypes: torch.dtype) -> bool:
    return type(part) in _PLAIN_TENSORS and part.dtype in dtypes and holds(part)
