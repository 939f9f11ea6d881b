"""Find out what added nodes to a graph during a capture: named Triton kernels, operators, or unknown code.

A step may pass an input to compiled code, to an operator, or to a kernel of the program. So the nodes that can read it
do not follow from generated code alone. They follow from the log of launches (`concurrency.launch_log`). An operator
that adds no node has read nothing: it made a view, or allocated memory. One that adds nodes may have read all its
tensor arguments. A launch of an Inductor-generated Triton kernel names its arguments. All other nodes come from unknown
code. If there are any, nothing is concluded for any input.

Note [What an operator was given]. For PyTorch's operators the arguments are more reliable than the parameters of their
nodes. Kernels for lists of tensors, such as those of optimizers, take a structure of four kilobytes, which PyTorch
fills only in part. The rest is uninitialized memory with old addresses, some of which may point into a large input. An
operator reads its tensor arguments. It may also pass a number, so a number that may be an address counts as an argument
(`numbers_of`). A sparse tensor consists of other tensors, whose addresses it does not expose. So after an operator with
a sparse argument nothing is concluded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.launch_log import MADE_OF_OTHERS, LaunchLog, Logged


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe one launch of a Triton kernel: its node, the driver's name of it, and its tensors.

    `tensors` has the address of the first element and that of the storage for each tensor argument.
    """

    node: int
    kernel: str
    tensors: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Launches:
    """Record what added the nodes of a captured step. See the module.

    Attributes:
        launches: launches of Triton kernels, in order.
        read_by_operators: storages of the tensor arguments of operators that added nodes, and large numbers among
            their arguments. Note [What an operator was given].
        read_elsewhere: storages of tensors that are read after a launch.
        unknown: why the origin of some node is unknown; None if all are known.
    """

    launches: list[Launch] = field(default_factory=list)
    read_by_operators: set[int] = field(default_factory=set)
    read_elsewhere: set[int] = field(default_factory=set)
    unknown: str | None = None

    @classmethod
    def of(cls, log: LaunchLog) -> Launches:
        """Return the launches that were logged so far."""
        log.note_others("at the end")
        found = cls(unknown=log.failure)
        for one in log.logged:
            found._add(one)
        return found

    def _add(self, logged: Logged) -> None:
        launch = logged.launch
        if logged.is_operator:
            self.read_by_operators |= logged.given
            if launch.name.partition(".")[0] not in torch_internals.PURE_OPERATORS:
                self._note(f"{launch.name} may keep an argument of an earlier call")
            if launch.barrier == MADE_OF_OTHERS:
                self._note(f"{launch.name} was given a sparse tensor, which is made of others")
        elif logged.passed:
            self.launches.append(Launch(launch.first, launch.name, logged.passed))
            if launch.count != 1:
                self._note(f"{launch.name} added {launch.count} nodes")
        else:
            self._note(f"{launch.count} nodes came from neither an operator nor Inductor's code: {launch.name}")

    def read_after(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record tensors that are read after a launch: gradients, and results that are copied.

        They are read outside the graph, so no node shows it.
        """
        for tensor in tensors:
            try:
                self.read_elsewhere.add(tensor.untyped_storage().data_ptr())
            except RuntimeError:  # sparse tensors have no storage
                self._note("a tensor that is made of others is read after a launch")

    def _note(self, reason: str) -> None:
        self.unknown = self.unknown or reason


_LEAST_ADDRESS = 1 << 32
"""Least address that CUDA returns for GPU memory. Sizes and counts are smaller."""


def numbers_of(values: Iterable[Any], holds: Callable[[torch.Tensor], bool]) -> Iterator[int]:
    """Yield the numbers among an operator's arguments, and in CPU tensors, that may be addresses.

    `holds`: whether a tensor is on the device.
    """
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from numbers_of(value, holds)
        elif isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and _holds_numbers(value) and not holds(value):
                numbers: Any = value.numpy(force=True)
                yield from map(int, numbers[(numbers >= _LEAST_ADDRESS) & (numbers < math.inf)])
        elif isinstance(value, (int, float)) and value >= _LEAST_ADDRESS and value < math.inf:
            yield int(value)


def _holds_numbers(tensor: torch.Tensor) -> bool:
    """Return whether an element may be an address. Reading a tensor whose storage was freed would raise."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in _OF_ADDRESSES:
        return False
    return bool(tensor.untyped_storage().nbytes())


_OF_ADDRESSES = (torch.int64, torch.uint64, torch.float64, torch.float32)
"""Dtypes that can represent an address and that NumPy has."""
