"""Read from schemas and tags of operators what they write, whether they read values, and where they may run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals, written_operands

INDEXING = frozenset({"aten::index", "aten::_unsafe_index"})
"""Their shape depends on values only where an index is a mask."""

TRANSFERS = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy", "prims::device_put"})
MIXES_DEVICES = TRANSFERS | INDEXING | {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
"""Operators that take CPU tensors of rank 1 and more together with GPU tensors because they move data, or move it
themselves.

Any other that does may insist on the CPU: `_pack_padded_sequence` reads its lengths there.
"""

COPIES = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "cat", "stack", "repeat", "flip", "triu", "tril", "where", "expand_copy", "view_copy", "alias"),
        *("_unsafe_view", "_reshape_alias", "roll"),
    )
)
"""Operators that put elements of their operands, or zeros, into other places."""

FILLS = frozenset(
    f"aten::{name}"
    for name in (
        *("full", "zeros", "ones", "eye", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"),
        *("fill_", "zero_", "masked_fill", "masked_fill_", "scalar_tensor", "triu_", "tril_", "constant_pad_nd"),
    )
)
"""Operators that write given values to given places."""

EXACT_ON_INTEGERS = frozenset(
    f"aten::{name}"
    for name in ("arange", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "neg", "minimum", "maximum")
)
"""Operators whose result is the same everywhere on integers of 32 bits and more, whose overflow wraps around."""

EXACT_ON_BITS = frozenset(
    f"aten::{name}"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "minimum", "maximum"),
    )
)
"""Operators whose result is the same everywhere on integers of any width and on booleans."""

_INTEGERS = frozenset((torch.int32, torch.int64))
_WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16)) | _INTEGERS
_STORED_AS_COMPUTED = frozenset((torch.float32, torch.float64)) | _WHOLE
"""Generated kernels compute narrower floating-point types in 32 bits and do not round in between."""
_FLOATS = (torch.float32, torch.float64)


STRIDED = frozenset(f"aten::as_strided{form}" for form in ("", "_", "_copy", "_scatter"))
"""Operators that are given places in the memory of an operand, and not in the operand."""

OTHER_MEMORY = frozenset({"aten::set_", "aten::set", "aten::set_data"})
"""Operators that give a tensor the memory of another."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dictionaries and slices."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the operands that a call of the operator `func` changes."""
    yield from tensors_in(list(written_operands.written(func, args, kwargs)))


def reads_past(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the operands whose memory a call of `func` may use outside of the operand.

    Any place that is counted from the beginning of the memory may be outside: the offset of the real tensor is not
    known from one without data.
    """
    if func._schema.name not in STRIDED:
        return
    given = written_operands.operands(func, args, kwargs)
    tensor, size, stride = given["self"], given["size"], given["stride"]
    numbers = (*size, *stride, *tensor.shape, *tensor.stride())
    known = given.get("storage_offset") is None and all(isinstance(number, int) for number in numbers)
    if not known or _span(size, stride) > _span(tensor.shape, tensor.stride()):
        yield tensor


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the end of the last."""
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0


def needs_values(func: Any, operands: Iterable[torch.Tensor]) -> bool:
    """Return whether the host reads values of operands: to return a number, to choose a shape, or to check them."""
    if func._schema.name in INDEXING:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in list(operands)[1:])
    return (
        checks_values(func)
        or torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
    )


def checks_values(func: Any) -> bool:
    """Return whether `func` reads values only to raise an error."""
    return bool(func._schema.name.startswith("aten::_assert_async"))


def awaited_transfer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the program may change a CPU operand of `func` as soon as the call has returned.

    It may unless it asked for a transfer that does not block.
    """
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.name == "non_blocking":
            return not (args[position] if position < len(args) else kwargs.get("non_blocking", False))
    return True


def gpu_obstacle(func: Any, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str | None:
    """Return why `func` cannot take its CPU operands from the GPU, or None."""
    name = func._schema.name
    on_cpu = [tensor for tensor in operands if tensor.device.type == "cpu"]
    mixed = any(tensor.device.type != "cpu" for tensor in (*operands, *results))
    if mixed and name not in MIXES_DEVICES and any(tensor.dim() > 0 for tensor in on_cpu):
        return f"{func} takes a CPU tensor together with GPU tensors and may need it there"
    if torch.version.cuda is not None and not torch_internals.has_kernel_for(func.name(), "CUDA"):
        return f"{func} has no kernel for the GPU"
    return None


def is_exact(func: Any, args: Sequence[Any], operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Return whether `func` is defined to give the same result, bit for bit, on every device.

    It is for copies, fills, views, casts that cannot lose more than IEEE 754 says, and integer and boolean element-wise
    operations that neither divide nor shift. `args` are the call's arguments, for the numbers among them.
    """
    name = func._schema.name
    dtypes = {tensor.dtype for tensor in (*operands, *results)}
    numbers = [value for value in args if isinstance(value, (bool, int, float, complex))]
    if func.is_view:
        return len(dtypes) == 1
    if name in TRANSFERS or name in COPIES or name in FILLS:
        casts = all(_exact_cast(old.dtype, new.dtype) for old in operands for new in results)
        return casts and (name not in FILLS or all(_holds(new.dtype, value) for new in results for value in numbers))
    widths = dtypes - {torch.bool}
    if (
        not dtypes <= _WHOLE
        or len(widths) > 1
        or not all(_holds(dtype, value) for dtype in widths for value in numbers)
    ):
        return False
    return name in EXACT_ON_BITS or (name in EXACT_ON_INTEGERS and dtypes <= _INTEGERS)


def _exact_cast(old: torch.dtype, new: torch.dtype) -> bool:
    """Return whether a cast is defined to the last bit, and no kernel leaves out its rounding."""
    if old == new:
        return True
    if new is torch.bool:
        return old in _WHOLE
    if new in _FLOATS:
        # From integers rounded to nearest, between these two as IEEE 754 says; from 16 bits nothing is lost.
        return old in _WHOLE or old in _FLOATS or old in (torch.float16, torch.bfloat16)
    if new in _INTEGERS:
        # Floating-point numbers may be out of range, and so may wider integers.
        return old in _WHOLE and old.itemsize <= new.itemsize
    return False


def _holds(dtype: torch.dtype, number: complex) -> bool:
    """Return whether `dtype` has exactly this number, or rounds it the same way everywhere."""
    if dtype not in _STORED_AS_COMPUTED:
        # A kernel may use the number as it stands, unrounded.
        return isinstance(number, (bool, int, float)) and _is_the_same(number, dtype)
    if isinstance(number, complex):
        return False
    if dtype is torch.bool:
        return number in (0, 1)
    if dtype in _FLOATS:
        return True
    return float(number).is_integer() and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _is_the_same(number: float, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point:
        return False
    rounded = torch.tensor(float(number), dtype=torch.float64, device="cpu").to(dtype).double().item()
    return rounded == number or number != number
