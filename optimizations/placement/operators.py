"""What the schemas and tags of operators tell: what they write, whether they look at values, and where they may run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals

INDEXING = frozenset({"aten::index", "aten::_unsafe_index"})
"""Their shape depends on values only where an index is a mask."""

TRANSFERS = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy", "prims::device_put"})
MIXES_DEVICES = TRANSFERS | INDEXING | {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
"""Operators that take CPU tensors of rank 1 and more beside GPU tensors because they move data, or move it themselves.

Any other that does may insist on the CPU: `_pack_padded_sequence` reads its lengths there.
"""

DEVICE_DEPENDENT = frozenset(
    f"aten::{name}"
    for name in (
        # which of equal elements comes first
        *("sort", "argsort", "topk", "kthvalue", "mode", "median", "nanmedian", "argmax", "argmin"),
        *("max.dim", "min.dim", "cummax", "cummin"),
        # which of several writes to one place stays
        *("index_put", "index_put_", "_index_put_impl_", "scatter", "scatter_", "put", "put_", "index_copy"),
        *("index_copy_", "masked_scatter", "masked_scatter_"),
        # signs and order of vectors
        *("linalg_eig", "_linalg_eigh", "linalg_qr", "_linalg_svd", "geqrf", "linalg_ldl_factor_ex"),
    )
)
"""Operators whose documented result leaves a choice that CPU and GPU may make differently."""

EXACT = frozenset(
    f"aten::{name}"
    for name in (
        *("full", "zeros", "ones", "eye", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"),
        *("clone", "cat", "stack", "repeat", "flip", "triu", "triu_", "tril", "tril_", "where"),
        *("masked_fill", "masked_fill_", "fill_", "zero_"),
    )
)
"""Operators that write given values to given places: the same bits on every device."""

EXACT_ON_INTEGERS = frozenset(
    f"aten::{name}"
    for name in (
        *("arange", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "neg", "_to_copy", "minimum", "maximum"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"),
    )
)
"""The same for operators that may round on floating-point numbers."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples, dictionaries and slices."""
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
    """The operands that a call of the operator `func` changes."""
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is None or not parameter.alias_info.is_write:
            continue
        if position < len(args):
            yield from tensors_in(args[position])
        elif parameter.name in kwargs:
            yield from tensors_in(kwargs[parameter.name])


def needs_values(func: Any, operands: Iterable[torch.Tensor]) -> bool:
    """Whether the host has to look at values of operands: to return a number, to choose a shape, to check something."""
    if func._schema.name in INDEXING:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in list(operands)[1:])
    if func._schema.name.startswith("aten::_assert_async"):
        return True
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def gpu_obstacle(func: Any, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str | None:
    """Why `func` cannot take its CPU operands from the GPU with the same result, or None."""
    name = func._schema.name
    on_cpu = [tensor for tensor in operands if tensor.device.type == "cpu"]
    mixed = any(tensor.device.type != "cpu" for tensor in (*operands, *results))
    if not mixed and not DEVICE_DEPENDENT.isdisjoint((name, func.name())):
        return f"{func} leaves a choice that CPU and GPU may make differently"
    if mixed and name not in MIXES_DEVICES and any(tensor.dim() > 0 for tensor in on_cpu):
        return f"{func} takes a CPU tensor beside GPU tensors and may need it there"
    if torch.version.cuda is not None and not torch_internals.has_kernel_for(func.name(), "CUDA"):
        return f"{func} has no kernel for the GPU"
    return None


def is_exact(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `func` gives the same bits on every device, for operands and results `tensors`."""
    integral = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    return func.is_view or func._schema.name in EXACT or (integral and func._schema.name in EXACT_ON_INTEGERS)
