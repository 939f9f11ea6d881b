"""Return results of a recorded step in memory of their own.

A result is in the memory of the graph, and the next launch overwrites it. So it is copied out, with one fused copy for
each dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from optimizations.capture.inputs import copy_all, is_plain
from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step.observer import StepRefused
from optimizations.graph.memory import overlaps
from optimizations.report.steps import Refusal
from optimizations.torch_internals.geometry import is_lazy_view

_LAYOUT = Refusal(
    "returns a tensor that is no plain one: its elements share memory, or it is sparse, quantized, a lazy conjugate or "
    "of a class of its own",
    "return a plain copy of it: `contiguous()`, `to_dense()`, `dequantize()`, `resolve_conj()`, `resolve_neg()`",
)


class Outputs:
    """Copy results out of the graph's memory. `copied` are the different tensors among the results of the recording.

    Raises:
        StepRefused: a result cannot be copied as it is.
    """

    def __init__(self, returned: Any) -> None:
        tensors: list[torch.Tensor] = []
        flatten(returned, tensors)
        if not all(_is_plain(tensor) and not overlaps(tensor) for tensor in tensors):
            raise StepRefused(_LAYOUT)
        self._nest = returned if not tensors else replaced(returned, iter([tensor.detach() for tensor in tensors]))
        made = {id(tensor): tensor.detach() for tensor in tensors}
        self.copied, places = list(made.values()), {key: place for place, key in enumerate(made)}
        self._plan = [places[id(tensor)] for tensor in tensors]
        self._single = len(tensors) == 1 and tensors[0] is returned

    def prepare(self) -> list[torch.Tensor]:
        """Allocate tensors for the next launch's results, before the launch, because this may run out of memory."""
        return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in self.copied]

    def copy_out(self, fresh: list[torch.Tensor]) -> None:
        """Copy results to `fresh`, directly after the launch, before gradients are published."""
        if self.copied:
            copy_all(fresh, self.copied)

    def take(self, fresh: list[torch.Tensor]) -> Any:
        """Return the results of a call, after `copy_out` to `fresh`."""
        return fresh[0] if self._single else replaced(self._nest, (fresh[place] for place in self._plan))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided and dense, without lazy conjugation, negation or quantization."""
    return is_plain(tensor) and not (is_lazy_view(tensor) or tensor.is_quantized)
