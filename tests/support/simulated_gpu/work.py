"""A function that can be "captured" on the simulated driver, with the peculiarities recordings have to cope with.

It has two float inputs `x` and `y` and a parameter `w` at a fixed address, and computes

    middle = 2 * x        (an intermediate, in the memory of the capture)
    out    = middle + y   (an output, in the memory of the capture)
    w     += 1            (if `writes_parameter`)
    y      = 0            (if `writes_y`)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda.bindings import driver as real

from optimizations.graph.memory import size_bytes
from optimizations.graph.read import read_graph
from optimizations.graph.recapture import Recaptured
from optimizations.graph.records import MemoryRange
from simulated_gpu.driver import Function, Node, SimulatedDriver, SimulatedGraph, floats, word

COUNT = 16
BLOCK = 64
"""Elements from one block of a capture's memory to the next: 256 bytes, what a kernel of a library may rely on."""


def aligned(elements: int, offset: int = 0) -> torch.Tensor:
    """Float memory aligned as PyTorch's CUDA allocator aligns it, `offset` elements on."""
    memory = torch.zeros(elements + offset + 128)
    skip = -(memory.data_ptr() // 4) % 128 + offset
    return memory[skip : skip + elements]


def _at(pointer: bytes) -> Any:
    return floats(int.from_bytes(pointer, "little"), COUNT)


@dataclass
class Captured:
    graph: int
    pool: torch.Tensor
    out: torch.Tensor

    @property
    def owned(self) -> tuple[MemoryRange, ...]:
        return (MemoryRange(address=self.pool.data_ptr(), size_bytes=size_bytes(self.pool)),)


@dataclass
class Work:
    """See the module. Every capture is kept, so that addresses stay apart.

    Attributes:
        hides_y: the kernel takes y's address from device memory of its own instead of a parameter.
        noise: added to `out`, another value in each run: the function does not repeat itself.
        returns_x: x is an output too.
        padding: bytes of a parameter that nobody reads, another value in each capture.
    """

    driver: SimulatedDriver
    writes_parameter: bool = False
    writes_y: bool = False
    hides_y: bool = False
    returns_x: bool = False
    noise: Callable[[], float] = lambda: 0.0
    padding: Callable[[int], bytes] = lambda capture: bytes(8)
    w: torch.Tensor = field(default_factory=lambda: torch.zeros(COUNT))
    captures: list[Captured] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._add = self._function("add", (8, 8, 8, 16), self._add_body)
        self._add_hidden = self._function("add_hidden", (8, 8, 8, 16), self._add_hidden_body)
        self._double = self._function("double", (8, 8), self._double_body)
        self._increment = self._function("increment", (8,), self._increment_body)
        self._clear = self._function("clear", (8,), self._clear_body)

    def _function(self, name: str, sizes: tuple[int, ...], body: Callable[..., None]) -> Function:
        function = Function(name, sizes, body)
        self.driver.add_function(function)
        return function

    @staticmethod
    def _double_body(source: bytes, destination: bytes) -> None:
        _at(destination)[:] = [2 * value for value in list(_at(source))]

    def _add_body(self, first: bytes, second: bytes, destination: bytes, _: bytes) -> None:
        noise = self.noise()
        pairs = zip(list(_at(first)), list(_at(second)), strict=True)
        _at(destination)[:] = [a + b + noise for a, b in pairs]

    def _add_hidden_body(self, first: bytes, table: bytes, destination: bytes, padding: bytes) -> None:
        (pointer,) = (torch.frombuffer(bytearray(_raw(table, 8)), dtype=torch.int64)).tolist()
        self._add_body(first, word(pointer), destination, padding)

    @staticmethod
    def _increment_body(at: bytes) -> None:
        _at(at)[:] = [value + 1 for value in list(_at(at))]

    @staticmethod
    def _clear_body(at: bytes) -> None:
        _at(at)[:] = [0.0] * COUNT

    def capture(self, inputs: Sequence[Any]) -> Captured:
        """What a capture of the function on inputs (x, y, w) makes."""
        x, y, w = inputs
        pool = aligned(3 * BLOCK)
        middle, out = pool[:COUNT], pool[BLOCK : BLOCK + COUNT]
        table = pool[2 * BLOCK :].view(torch.int64)
        driver, graph = self.driver, self.driver.new_graph()
        last = driver.add_node(graph, Node("KERNEL", self._double, [word(x.data_ptr()), word(middle.data_ptr())]))
        second = y.data_ptr()
        if self.hides_y:
            table[0] = second
            second = table.data_ptr()
        padding = bytes(8) + self.padding(len(self.captures))
        function = self._add_hidden if self.hides_y else self._add
        parameters = [word(middle.data_ptr()), word(second), word(out.data_ptr()), padding]
        last = driver.add_node(graph, Node("KERNEL", function, parameters), after=[last])
        if self.writes_parameter:
            last = driver.add_node(graph, Node("KERNEL", self._increment, [word(w.data_ptr())]), after=[last])
        if self.writes_y:
            driver.add_node(graph, Node("KERNEL", self._clear, [word(y.data_ptr())]), after=[last])
        captured = Captured(graph, pool, out)
        self.captures.append(captured)
        return captured

    def recapture(self, inputs: Sequence[Any]) -> Recaptured:
        """What `recapture.recapture` gives."""
        captured = self.capture(inputs)
        storages = {captured.pool.untyped_storage().data_ptr()}
        if self.returns_x:
            storages.add(inputs[0].untyped_storage().data_ptr())
        graph = read_graph(self.driver, real.CUgraph(captured.graph))
        return Recaptured(graph, captured.owned, frozenset(storages))

    def record(self, inputs: Sequence[Any]) -> tuple[SimulatedGraph, Captured]:
        """The capture that is replayed."""
        captured = self.capture(inputs)
        return SimulatedGraph(self.driver, captured.graph), captured


def _raw(pointer: bytes, size: int) -> bytes:
    return ctypes.string_at(int.from_bytes(pointer, "little"), size)
