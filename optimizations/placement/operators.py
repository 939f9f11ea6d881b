"""Read from schemas and tags of operators what they write, whether they read values, and where they may run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals

INDEXING = frozenset({"aten::index", "aten::_unsafe_index"})
"""Their shape depends on values only where an index is a mask."""

TRANSFERS = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy", "prims::device_put"})
MIXES_DEVICES = TRANSFERS | INDEXING | {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
"""Operators that take CPU tensors of rank 1 and more together with GPU tensors because they move data, or move it
themselves.

Any other that does may insist on the CPU: `_pack_padded_sequence` reads its lengths there.
"""

STRIDED = frozenset(f"aten::as_strided{form}" for form in ("", "_", "_copy", "_scatter"))
"""Operators that are given places in the memory of an operand, which may lie outside of the operand."""

OTHER_MEMORY = frozenset({"aten::set_", "aten::set", "aten::set_data"})
"""Operators that give a tensor the memory of another."""


def needs_values(func: Any, operands: Iterable[torch.Tensor]) -> bool:
    """Return whether the host reads values of operands: to return a number, to choose a shape, or to check them."""
    if func._schema.name in INDEXING:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in list(operands)[1:])
    if func._schema.name.startswith("aten::_assert_async"):
        return True
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def awaited_transfer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the program may change a CPU operand of `func` as soon as the call has returned.

    It may unless it requested a transfer that does not block.
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
