"""Find out what added nodes to a graph during a capture, and which inputs of a step it can read in place.

Addresses of inputs may change on every call. A step may pass an input to compiled code, to an operator, or to a kernel
of the program. So the nodes that can read it do not follow from generated code alone. They follow from the log of
launches (`concurrency.launch_log`). An operator that adds no node has read nothing: it made a view, or allocated
memory. One that adds nodes may have read all its tensor arguments. A launch of an Inductor-generated Triton kernel
names its arguments. All other nodes come from unknown code. If there are any, nothing is concluded for any input.

Note [By name]. If only Triton kernels that Inductor generated receive an input, its addresses are parameters of these
launches (`graph.named_uses`), and the host updates them. The placeholder of an input has its own memory for the life of
the recording. So no other node parameter may point into it. For operators that launch kernels, their arguments count
instead (Note [What an operator was given]). Gradients that the call left, and results that are copied after the launch,
must not overlap it either. No trial launch is needed. An input is still copied into its placeholder in a call where it
lacks the alignment that the kernels may rely on, or overlaps memory that the graph writes (`in_place.addresses`).

Note [What an operator was given]. For PyTorch's operators the arguments are more reliable than the parameters of their
nodes. Kernels for lists of tensors, such as those of optimizers, take a structure of four kilobytes, which PyTorch
fills only in part. The rest is uninitialized memory with old addresses, some of which may point into a large input. An
operator reads its tensor arguments. It may also pass a number, so a number that may be an address counts as an argument
(`numbers_of`). A sparse tensor consists of other tensors, whose addresses it does not expose. So after an operator with
a sparse argument nothing is concluded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.launch_log import MADE_OF_OTHERS, LaunchLog, Logged
from optimizations.graph.named_uses import find_named_uses
from optimizations.graph.plan import Available, Choice, Plan, make_plan, with_reasons
from optimizations.graph.pointers import ReasonCode
from optimizations.graph.records import Capture, CapturedGraph, KernelNode, MemoryRange, Placeholder, words_of

MOST_NODES = 4
"""An input that more kernels read is copied: a copy is one driver call, and a move takes one for each kernel."""


@dataclass(slots=True)
class Launches:
    """Record what added the nodes of a captured step. See the module.

    Attributes:
        kernels: launches of Triton kernels, in order.
        read: storages that something other than these kernels reads: tensor arguments of operators that added nodes,
            large numbers among their arguments, and tensors that are read after a launch.
        unknown: why the origin of some node is unknown; None if all are known.
    """

    kernels: list[Logged] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
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
            self.read |= logged.given
            if launch.name.partition(".")[0] not in torch_internals.PURE_OPERATORS:
                self._note(f"{launch.name} may keep an argument of an earlier call")
            if launch.barrier == MADE_OF_OTHERS:
                self._note(f"{launch.name} was given a sparse tensor, which is made of others")
        elif logged.passed:
            self.kernels.append(logged)
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
                self.read.add(tensor.untyped_storage().data_ptr())
            except RuntimeError:  # sparse tensors have no storage
                self._note("a tensor that is made of others is read after a launch")

    def _note(self, reason: str) -> None:
        self.unknown = self.unknown or reason

    def only_named(self, memory: Mapping[int, MemoryRange]) -> dict[int, MemoryRange]:
        """Return those inputs, given by their placeholders' memory, that only named kernels read.

        No operator and no unknown code received any part of these.
        """
        if self.unknown is not None:
            return {}
        named = {storage for one in self.kernels for _, storage in one.passed}
        read = sorted(self.read)

        def is_read(place: MemoryRange) -> bool:
            return bisect_left(read, place.address) < bisect_left(read, place.address + place.size_bytes)

        return {index: place for index, place in memory.items() if place.address in named and not is_read(place)}

    def plan(self, graph: CapturedGraph, memory: Mapping[int, MemoryRange]) -> Plan:
        """Plan the node updates for a change of the addresses of inputs that `only_named` returned. Note [By name]."""
        by_address = {place.address: index for index, place in memory.items()}
        passed = [
            (one.launch.name, [by_address[address] for address, _ in one.passed if address in by_address])
            for one in self.kernels
        ]
        nodes = {index for index, node in enumerate(graph.nodes) if isinstance(node, KernelNode)}
        triton = frozenset(one.launch.first for one in self.kernels if one.launch.first in nodes)
        placeholders = tuple(Placeholder(input=index, memory=place) for index, place in sorted(memory.items()))
        analysis = find_named_uses(
            Capture(graph=graph, placeholders=placeholders), passed, set(memory), triton, "an operator reads it"
        )
        words, others, many = self.conclusive_words(graph), {}, {}
        for verdict in analysis.verdicts:
            place = memory[verdict.input]
            inside = sum(place.address <= word < place.address + place.size_bytes for word in words)
            if inside != len(verdict.uses):
                others[verdict.input] = f"the graph holds {inside} addresses in it, {len(verdict.uses)} of them by name"
            if (readers := len({use.node for use in verdict.uses})) > MOST_NODES:
                many[verdict.input] = f"{readers} kernels read it"
        analysis = with_reasons(analysis, ReasonCode.UNEXPLAINED, others)
        return make_plan(graph, with_reasons(analysis, ReasonCode.NO_UPDATER, many), Choice.HOST, Available(triton))

    def conclusive_words(self, graph: CapturedGraph) -> list[int]:
        """Return the node parameters that may be addresses, except those of operators' kernels.

        For operators their arguments count, if no launch is unknown. Note [What an operator was given].
        """
        named = {one.launch.first for one in self.kernels}
        return [
            word
            for index, node in enumerate(graph.nodes)
            if index in named or not isinstance(node, KernelNode)
            for word in words_of(node)
        ]


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
