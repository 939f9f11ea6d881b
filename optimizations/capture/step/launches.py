"""Tell what put nodes into a graph while a step was captured: named Triton kernels, operators, or unknown code.

An input of a step can go anywhere: into compiled code, an operator, a kernel of the program's own. So generated code
alone does not tell which nodes can read it. The log of launches does (`concurrency.launch_log`). An operator that adds
no node has read nothing (it made a view, or memory). One that adds some may have read all the tensors it was given. A
launch of a Triton kernel that Inductor wrote names its arguments. Nodes that appeared in between came from unknown
code, and then nothing is concluded for any input.

Note [What an operator was given]. The words in the nodes of PyTorch's operators tell less than what they were given.
Kernels for lists of tensors, such as those of optimizers, take a structure of four kilobytes that PyTorch fills as far
as it needs it. In the rest stands what was in that memory before, old addresses among it, and where an input has
gigabytes some are likely to lie in it. An operator reads the tensors it is given, and may pass a number: one that is an
address counts as given, in whichever way it was (`numbers_of`). A sparse tensor is made of others, without a node, and
does not tell where they lie: after an operator that was given one, nothing is concluded.
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
    """Describe one launch of a Triton kernel: its node, the driver's name of it, where its tensors begin and lie.

    `tensors` are pairs of the address of the first element and that of the storage, as often as they are passed.
    """

    node: int
    kernel: str
    tensors: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Launches:
    """Hold what put the nodes of a captured step there. See the module.

    Attributes:
        launches: in order.
        read_by_operators: storages of tensors that operators were given which added nodes, and large numbers. Note
            [What an operator was given].
        read_elsewhere: storages of tensors that are read after a launch.
        unknown: why nothing is known of some node; None where all are known.
    """

    launches: list[Launch] = field(default_factory=list)
    read_by_operators: set[int] = field(default_factory=set)
    read_elsewhere: set[int] = field(default_factory=set)
    unknown: str | None = None

    @classmethod
    def of(cls, log: LaunchLog) -> Launches:
        """Return what was logged so far."""
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
                self._note(f"{launch.name} may keep what it was given in an earlier call")
            if launch.barrier == MADE_OF_OTHERS:
                self._note(f"{launch.name} was given a sparse tensor, which is made of others")
        elif logged.passed:
            self.launches.append(Launch(launch.first, launch.name, logged.passed))
            if launch.count != 1:
                self._note(f"{launch.name} added {launch.count} nodes")
        else:
            self._note(f"{launch.count} nodes came from neither an operator nor Inductor's code: {launch.name}")

    def read_after(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that are read after a launch: gradients, and results that are copied then. What reads them finds
        what the graph left there, without a node."""
        for tensor in tensors:
            try:
                self.read_elsewhere.add(tensor.untyped_storage().data_ptr())
            except RuntimeError:  # it has none of its own, as sparse ones
                self._note("a tensor that is made of others is read after a launch")

    def _note(self, reason: str) -> None:
        self.unknown = self.unknown or reason


_LEAST_ADDRESS = 1 << 32
"""Of what a GPU has in its address space, as CUDA hands it out. Sizes and counts are smaller."""


def numbers_of(values: Iterable[Any], holds: Callable[[torch.Tensor], bool]) -> Iterator[int]:
    """Yield the numbers among an operator's arguments, and in tensors on the CPU, that may be addresses.

    `holds`: whether a tensor is the device's.
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
    """Return whether an address can be an element. Memory that was given back holds nothing, and a read would raise."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in _OF_ADDRESSES:
        return False
    return bool(tensor.untyped_storage().nbytes())


_OF_ADDRESSES = (torch.int64, torch.uint64, torch.float64, torch.float32)
"""Types whose numbers can be exact enough for an address, all of which NumPy has."""
