"""Pass learning rates that are changing numbers to the graph as tensors on the GPU.

A number becomes a constant in the kernels of a graph. Optimizers that support graphs (`capturable=True`, `fused=True`)
also take a tensor of one element and read it on the GPU. During observed and recorded calls the parameter group has the
tensor. Otherwise it has the program's number, and a scheduler changes it as usual. Before a launch a changed number is
written into the tensor, in stream order. The tensor is float32. Values that an optimizer derives from the number in
double precision, such as `1 - lr * weight_decay`, may differ in the last bit.

If a step runs code with the key "lr" other than that of PyTorch's optimizers, such as a scheduler or a metric, it may
read or set the rate. Then the rate stays a number and is compared like any other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

RATE = "lr"


@dataclass(slots=True, eq=False)
class _Rate:
    """Record the learning rate of one parameter group.

    Attributes:
        seen: the number that was last seen or, if there is a tensor, written into it; None if unknown.
        tensor: replaces the number, once it changed.
    """

    seen: Any
    tensor: torch.Tensor | None = None


class LearningRates:
    """Store the learning rates of a step's optimizers, by the indices of their groups."""

    def __init__(self) -> None:
        self._rates: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, _Rate]] = weakref.WeakKeyDictionary()
        self._has_tensors = False  # most steps never have one, and walking weak references takes microseconds

    @property
    def patched(self) -> int:
        """Return the number of rates that tensors replace."""
        return len(self._groups())

    def _groups(self) -> list[tuple[_Rate, dict[str, Any], torch.Tensor]]:
        """Return the rates with tensors, for groups that still exist."""
        return [
            (rates[index], group, tensor)
            for optimizer, rates in (self._rates.items() if self._has_tensors else ())
            for index, group in enumerate(optimizer.param_groups)
            if index in rates and (tensor := rates[index].tensor) is not None
        ]

    def changed(self, optimizers: Iterable[torch.optim.Optimizer], *, numbers_only: bool) -> bool:
        """Record the rates of these optimizers. Return whether the set of rates with tensors changed.

        `numbers_only`: the step may read rates itself, so that no tensor may replace one.
        """
        standing, changed = self._groups(), False
        if numbers_only:
            for one, _, _ in standing:
                one.tensor, changed = None, True
        replaced = [] if numbers_only else [group for _, group, _ in standing]
        for optimizer in optimizers:
            rates = self._rates.setdefault(optimizer, {})
            for index, group in enumerate(optimizer.param_groups):
                number = group.get(RATE)
                # An optimizer and its wrapper share a group.
                if not isinstance(number, Real) or any(other is group for other in replaced):
                    continue
                one = rates.setdefault(index, _Rate(number))
                before, one.seen = one.seen, number
                devices = {parameter.device for parameter in group["params"]}
                takes_tensor = (group.get("capturable") or group.get("fused")) and len(devices) == 1
                if number != before and takes_tensor and not numbers_only:
                    with torch.inference_mode(False):  # calls in other modes write it as well
                        one.tensor = torch.full((), float(number), dtype=torch.float32, device=devices.pop())
                    self._has_tensors = True
                    replaced.append(group)
                    changed = True
        return changed

    def stands_for(self, group: Any, key: Any) -> bool:
        """Return whether a tensor replaces this entry of a parameter group."""
        return key == RATE and any(one is group for _, one, _ in self._groups())

    def write(self) -> None:
        """Write changed numbers into their tensors, in stream order.

        A tensor that the program assigned is copied in each call, as it may be written at any time. To read it here
        would wait for the GPU.
        """
        for one, group, tensor in self._groups():
            rate = group[RATE]
            if isinstance(rate, torch.Tensor):
                one.seen = None
                tensor.copy_(rate.detach().reshape(()))
            elif rate != one.seen:
                one.seen = None  # until it is written: a call may end in between
                tensor.fill_(float(rate))
                one.seen = rate

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Assign the tensors to their groups inside the block."""
        self.write()
        numbers = [(one, group, group[RATE], tensor, tensor._version) for one, group, tensor in self._groups()]
        for _, group, _, tensor, _ in numbers:
            group[RATE] = tensor
        try:
            yield
        finally:
            for one, group, number, tensor, version in numbers:
                now: Any = group.get(RATE)
                if now is tensor and tensor._version == version:
                    group[RATE] = number
                elif isinstance(now, torch.Tensor):  # the step set another rate; from then on its code has the key
                    group[RATE], one.seen = float(now), None
