"""Run `AveragedModel.update_parameters` without a decision on the host. Checked on PyTorch 2.11.

It reads `n_averaged` to find out whether it is called for the first time, and copies the weights then. Here the
averages are computed in any case, by PyTorch's own code, and one more kernel for each tensor takes the weights instead
where the count, which lies on the GPU, is zero.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from optimizations import torch_internals
from optimizations.torch_internals.foreach_scalars import tensors_for_numbers

Update = Callable[[AveragedModel, torch.nn.Module], None]
OWNER, NAME = AveragedModel, "update_parameters"
STOCK: Update = AveragedModel.update_parameters


class _NotTheFirst(torch.Tensor):
    """Hold a count that `update_parameters` itself reads as above zero. The program's own averaging function gets a
    plain tensor, which it can compare."""

    __torch_function__ = torch_internals.disabled_torch_function
    __hash__ = torch.Tensor.__hash__

    def __eq__(self, other: object) -> Any:
        return False if _asked_by_pytorch() else self._plain() == other

    def __gt__(self, other: Any) -> Any:
        return True if _asked_by_pytorch() else self._plain() > other

    def to(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self._plain().to(*arguments, **keywords)

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _asked_by_pytorch() -> bool:
    """Return whether `update_parameters` called the method that calls this."""
    return sys._getframe(2).f_code is STOCK.__code__


def decided_on_the_gpu(averaged: AveragedModel, model: torch.nn.Module) -> None:
    """Run `averaged.update_parameters(model)` with its count on the GPU."""
    count = averaged.n_averaged
    is_first = count == 0
    averaged.n_averaged = count.as_subclass(_NotTheFirst)
    try:
        with tensors_for_numbers():
            STOCK(averaged, model)
    finally:
        averaged.n_averaged = count
    ours: Iterable[torch.Tensor] = averaged.parameters()
    theirs: Iterable[torch.Tensor] = model.parameters()
    if averaged.use_buffers:
        ours = itertools.chain(averaged.module.parameters(), averaged.module.buffers())
        theirs = itertools.chain(model.parameters(), model.buffers())
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=False):
            chosen = mine.detach()
            torch.where(is_first, other.detach().to(chosen.device, chosen.dtype), chosen, out=chosen)
