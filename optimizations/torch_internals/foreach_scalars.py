"""Give functions on lists of tensors a tensor in place of a number. Checked on PyTorch 2.11.

PyTorch reads such a tensor on the host. These have forms with a tensor for each member of the list, which compute the
same where the number has the precision of the members.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from optimizations import torch_internals

_lerp: Any = torch_internals.foreach_lerp_
_pow: Any = torch_internals.foreach_pow
_HALVES = (torch.float16, torch.bfloat16)


def _lerp_by_tensor(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: Any) -> Any:
    if not isinstance(weight, torch.Tensor):
        return _lerp(tensors, ends, weight)
    if tensors[0].dtype in _HALVES:  # a number would have single precision next to these
        for tensor, end in zip(tensors, ends, strict=True):
            tensor.copy_(torch.lerp(tensor.float(), end.float(), weight.float()))
        return None
    return _lerp(tensors, ends, [weight.to(tensors[0].dtype)] * len(tensors))


def _pow_by_tensor(base: Any, exponent: Any) -> Any:
    if isinstance(base, torch.Tensor) and not isinstance(exponent, torch.Tensor):
        base = [base.to(exponent[0].dtype)] * len(exponent)
    return _pow(base, exponent)


@contextlib.contextmanager
def tensors_for_numbers() -> Iterator[None]:
    """Let what Adam and weight averages call with a number take a tensor in the block, unread by the host."""
    with (
        torch_internals.replaced_attribute(torch, "_foreach_lerp_", _lerp_by_tensor),
        torch_internals.replaced_attribute(torch, "_foreach_pow", _pow_by_tensor),
    ):
        yield
