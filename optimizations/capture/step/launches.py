"""Record what put nodes into a graph while a step was captured: named Triton kernels, operators, or unknown code.

An input of a step can go anywhere: into compiled code, an operator, a kernel of the program's own. So generated code
alone does not tell which nodes can read it. Counting does: around every operator, and every launch of a Triton kernel
that Inductor wrote, the nodes of the graph are counted. An operator that adds none has read nothing (it made a view, or
memory). One that adds some may have read all the tensors it was given. A launch names its arguments. Nodes that
appeared in between came from unknown code, and then nothing is concluded for any input.

Note [What an operator was given]. The words in the nodes of PyTorch's operators tell less than what they were given.
Kernels for lists of tensors, such as those of optimizers, take a structure of four kilobytes that PyTorch fills as far
as it needs it. In the rest stands what was in that memory before, old addresses among it, and where an input has
gigabytes some are likely to lie in it. An operator reads the tensors it is given, and may pass a number: one that is an
address counts as given, in whichever way it was (`numbers_of`). A sparse tensor is made of others, without a node, and
does not tell where they lie: after an operator that was given one, nothing is concluded.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.driver import CudaCallFailed
from optimizations.torch_internals import replaced_attribute

_TUNERS = "torch._inductor.runtime.triton_heuristics"


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe one launch of a Triton kernel: its node, the driver's name of it, where its tensors begin and lie.

    `tensors` are pairs of the address of the first element and that of the storage, as often as they are passed.
    """

    node: int
    kernel: str
    tensors: tuple[tuple[int, int], ...]


class Launches:
    """Count nodes while a step is captured. See the module.

    Args:
        count: how many nodes the graph has that is being captured.

    Attributes:
        own: the nodes that copy inputs to their placeholders.
        launches: in order.
        read_by_operators: storages of tensors that operators were given which added nodes, and large numbers. Note
            [What an operator was given].
        read_elsewhere: storages of tensors that are read after a launch.
        unknown: why nothing is known of some node; None where all are known.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._ask = count
        self._thread = threading.get_ident()
        self._inside = False
        self._last = 0
        self.own = range(0)
        self.launches: list[Launch] = []
        self.read_by_operators: set[int] = set()
        self.read_elsewhere: set[int] = set()
        self.unknown: str | None = None
        self._last = self._count()

    def _count(self) -> int:
        """Return how many nodes there are; where that cannot be told, nothing is known, and the capture goes on."""
        if self.unknown is not None:
            return self._last
        try:
            return self._ask()
        except CudaCallFailed as error:
            self._note(str(error))
            return self._last

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Note that the nodes that come in the block are the library's own copies of inputs."""
        yield
        now = self._count()
        self.own, self._last = range(self._last, now), now

    @contextlib.contextmanager
    def operator(self, func: Any, given: Iterable[int], *, sparse: bool = False) -> Iterator[None]:
        """Count nodes around an operator on these storages and numbers, which are read only if it adds some.

        `sparse`: whether some of its tensors have no storage of their own.
        """
        if self._inside:  # part of what is counted already
            yield
            return
        self._look("before an operator")
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        now = self._count()
        if now > self._last:
            self.read_by_operators.update(given)
            namespace = getattr(func, "namespace", None)
            if namespace not in torch_internals.PURE_OPERATORS:
                self._note(f"{func} may keep what it was given in an earlier call")
            if sparse:
                self._note(f"{func} was given a sparse tensor, which is made of others")
        self._last = now

    def read_behind(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that are read after a launch: gradients, and results that are copied then. What reads them finds
        what the graph left there, without a node."""
        for tensor in tensors:
            try:
                self.read_elsewhere.add(tensor.untyped_storage().data_ptr())
            except RuntimeError:  # it has none of its own, as sparse ones
                self._note("a tensor that is made of others is read behind a launch")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note launches of Inductor's kernels for this capture in the block."""
        if _TUNERS not in sys.modules:  # nothing was compiled, and nothing may be now
            yield
            self._look("at the end")
            return
        tuner: Any = torch_internals.CachingAutotuner
        stock = tuner.run

        def run(kernel: Any, *arguments: Any, **keywords: Any) -> Any:
            if self._elsewhere() or self._inside:
                return stock(kernel, *arguments, **keywords)
            self._look("before a kernel")
            before, result = self._last, stock(kernel, *arguments, **keywords)
            self._last = self._count()
            name = str(kernel.fn.__name__)
            if self._last != before + 1:
                self._note(f"{name} added {self._last - before} nodes")
            given = [value for value in [*arguments, *keywords.values()] if isinstance(value, torch.Tensor)]
            tensors = tuple((tensor.data_ptr(), tensor.untyped_storage().data_ptr()) for tensor in given)
            self.launches.append(Launch(before, name, tensors))
            return result

        with replaced_attribute(tuner, "run", run):
            yield
            self._look("at the end")

    def _elsewhere(self) -> bool:
        return threading.get_ident() != self._thread and torch_internals.current_autograd_node() is None

    def _look(self, when: str) -> None:
        now = self._count()
        if now != self._last:
            self._note(f"{now - self._last} nodes came from neither an operator nor Inductor's code, {when}")
        self._last = now

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
