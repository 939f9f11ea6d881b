"""Leave operators out of CUDA graphs that cannot be captured, with the unpacking of what they return.

`torch._inductor.config.custom_should_partition_ops` names operators between which Inductor splits a graph: what is
before and after them is captured, and they run in between. The setting is part of the key of Inductor's cache.

Note [Operators that wait for the GPU]. Factorizations read on the host whether they succeeded, or how many steps they
need, for most sizes: a capture that meets one fails. PyTorch 2.11 names none of them, and 2.14 names `_linalg_eigh`.
After a failed capture most run as before. cuSOLVER's eigenvalues of a single symmetric matrix do not: the next call
fails, too. So all are listed whose capture was seen to fail with inputs that are not empty, and those that call them.

Note [Operators that give an input other memory]. `x.data = y` and `x.untyped_storage().resize_(n)` in a compiled
function change a tensor of the caller and launch nothing. A replay would not repeat them.

Note [Results of operators between graphs]. An operator with several results returns a tuple, and Inductor takes single
results out of it in the graph after it. That graph's input would be the tuple, and it could not be recorded. So taking
results out is left out with the operator. Checked on PyTorch 2.11 and 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from optimizations import torch_internals

SETTING = "custom_should_partition_ops"

_OF_ATEN = (
    *("_linalg_eigh", "_linalg_svd", "linalg_eig", "_linalg_eigvals", "linalg_pinv.atol_rtol_tensor"),
    *("linalg_lu_factor_ex", "linalg_lu", "linalg_ldl_factor_ex", "linalg_matrix_exp"),
    *("cholesky", "cholesky_inverse", "masked_scatter_backward", "segment_reduce", "set_.source_Tensor"),
)
OPERATORS = (*(f"aten::{name}" for name in _OF_ATEN), "inductor::resize_storage_bytes_")
"""Operators that wait for the GPU or give an input other memory. Without the overload where it is `default`."""


def with_operators_left_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a graph with `OPERATORS` next to those that the program leaves out."""
    theirs = settings.get(SETTING, getattr(torch_internals.inductor_config, SETTING))
    return {**settings, SETTING: [*theirs, *OPERATORS]}


def uncapturable(called: str) -> str | None:
    """Return the operator that a call in generated code is of, such as `torch.ops.aten.linalg_lu.default`; None for
    operators that can be captured, and for other calls."""
    namespace, _, operator = called.removeprefix("torch.ops.").partition(".")
    name = f"{namespace.removesuffix('_ops')}::{operator.removesuffix('.default')}"  # `inductor_ops` in generated code
    return name if name in OPERATORS else None


def left_out_with_its_operator(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `should_partition` as Note [Results of operators between graphs] says."""

    @functools.wraps(stock)
    def should_partition(scheduler: Any, node: Any) -> str | None:
        reason: str | None = stock(scheduler, node)
        if reason is None and isinstance(node.node, torch_internals.MultiOutput):
            of = scheduler.name_to_buf.get(node.node.inputs[0].get_name())
            if of is not None and of.defining_op is not None:
                return scheduler.should_partition(of.defining_op)
        return reason

    return should_partition
