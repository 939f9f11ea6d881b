"""A device whose graphs are made of CPU operators, for the logic of whole-step captures.

What it keeps of CUDA: a capture runs Python and executes nothing (memory that was written is put back, what was made
holds NaN); a launch repeats the operators on the tensors of the capture, at their addresses, with numbers baked in;
reading a value on the host during a capture fails and breaks the capture. Random numbers come from the CPU's default
generator, as eager's do, so that results can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from forced_branches import BranchesAtOnce
from step_parts import CAPTURE_CHECK
from synthetic_captures import kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from optimizations import torch_internals
from optimizations.capture import inputs
from optimizations.capture.device import Device
from optimizations.capture.step import recording
from optimizations.concurrency.branches import Branches
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.graph.records import CapturedGraph, Edge, MemoryRange
from simulated_gpu.operator_graphs import (
    ASKS,
    ELSEWHERE,
    Capture,
    CpuGraph,
    freed_memory,
    has_address,
    is_of_host,
    is_word,
    leaves_of,
    storage_address,
)

__all__ = [
    "ASKS",
    "ELSEWHERE",
    "CpuDevice",
    "CpuDeviceWithHost",
    "CpuGraph",
    "copied",
]


def graphs_of_pool(device: weakref.ref[CpuDevice], pool: Any) -> Sequence[CpuGraph]:
    there = device()
    return there._captured[pool] if there is not None else ()


@contextlib.contextmanager
def optimizers_check() -> Iterator[None]:
    """In the block PyTorch's optimizers check whether they are captured, which they do only where there is a GPU.

    But for those that are never `fused`: `capturable=True`, which they would have on a GPU, they take on no CPU.
    """
    stock = vars(torch.optim.Optimizer)[CAPTURE_CHECK]

    def check(optimizer: torch.optim.Optimizer) -> None:
        if all("fused" in group for group in optimizer.param_groups):
            with torch_internals.replaced_attribute(torch.cuda, "is_available", lambda: True):
                stock(optimizer)

    with torch_internals.replaced_attribute(torch.optim.Optimizer, CAPTURE_CHECK, check):
        yield


def assigning(device: CpuDevice) -> contextlib.AbstractContextManager[None]:
    """In the block, a number is assigned to a part of a tensor as on a GPU: from a tensor in CPU memory, the host's.

    The device keeps it: no other tensor gets its memory, and each lies elsewhere.
    """
    stock = torch.Tensor.__setitem__

    def assign(tensor: torch.Tensor, index: Any, value: Any) -> None:
        if type(value) in (bool, int, float) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            with _disable_current_modes():
                number = torch.full((), value, dtype=tensor.dtype)
            device.numbers.append(number)
            device.host.add(storage_address(number))
            value = torch.ops.aten.lift_fresh(number)
        stock(tensor, index, value)

    assign.__code__ = assign.__code__.replace(co_filename=torch.__file__)  # none of the program's lines
    return torch_internals.replaced_attribute(torch.Tensor, "__setitem__", assign)


class CpuEdges:
    """The driver's calls on edges of a `CpuGraph`."""

    CUgraph = staticmethod(lambda graph: graph)

    @staticmethod
    def cuGraphGetNodes(graph: CpuGraph, count: int) -> Any:
        return 0, list(range(len(graph.nodes()))), len(graph.nodes())

    @staticmethod
    def cuGraphGetEdges(graph: CpuGraph, count: int) -> Any:
        edges = sorted(graph.edges_or_chain())
        return 0, [one for one, _ in edges], [other for _, other in edges], [None] * len(edges), len(edges)

    @staticmethod
    def cuGraphRemoveDependencies(graph: CpuGraph, sources: Any, targets: Any, data: Any, count: int) -> Any:
        graph.edges = graph.edges_or_chain() - set(zip(sources, targets, strict=True))
        return (0,)

    @staticmethod
    def cuGraphAddDependencies(graph: CpuGraph, sources: Any, targets: Any, data: Any, count: int) -> Any:
        assert graph.edges is not None
        graph.edges.update(zip(sources, targets, strict=True))
        return (0,)


class CpuDevice(Device):
    """A device of captures. Tensors in `host` (storages by address) count as the host's.

    `fail_with` is raised at the end of the next capture, whatever ended it; `broken` counts captures that a host read
    invalidated. `not_ready` is how often it says that the side stream became another one. `stream` is the current one,
    and `waits` are pairs of streams of which the first waits for the second. What a graph made and the program no
    longer references counts as lying where later graphs of its pool make something.
    `rooms` are sizes that captures reserved before anything was captured.
    """

    has_own_random = False

    race: Any = BranchesAtOnce
    streams: Any = property(lambda device: device)

    free: int | None = -1
    """Memory for audits: none, so that tests which count replays have no audited calls among them."""

    def __init__(self) -> None:
        self.host: set[int] = set()
        self.numbers: list[torch.Tensor] = []
        self.graphs: list[CpuGraph] = []
        self.capturing_into: CpuGraph | None = None
        self.fail_with: BaseException | None = None
        self.captures = self.broken = self.given_back = 0
        self.not_ready = self.stream = 0
        self.rooms: list[int] = []
        self.waits: list[tuple[int, int]] = []
        self._launched_on: int | None = None
        self.pools: dict[int, int] = {}
        self._captured: defaultdict[int, list[CpuGraph]] = defaultdict(list)
        self._numbers = itertools.count(1)

    def holds(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and storage_address(tensor) not in self.host

    def is_capturing(self) -> bool:
        return self.capturing_into is not None

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        with assigning(self):
            yield

    def may_read(self, tensors: Iterable[torch.Tensor | None]) -> None:
        pass

    def follow(self) -> bool:
        if self.is_capturing():
            return False
        if self._launched_on not in (None, self.stream):
            self.waits.append((self.stream, self._launched_on))
        self._launched_on = self.stream
        return True

    def is_on_other_stream(self) -> bool:
        return self._launched_on not in (None, self.stream)

    def ready(self) -> bool:
        self.not_ready -= 1
        return self.not_ready < 0

    def keeps_workspace(self) -> bool:
        return not ELSEWHERE.get()

    def new_pool(self) -> Any:
        number = next(self._numbers)
        self.pools[number] = 0
        return number

    def pool_bytes(self, pool: Any) -> int:
        return self.pools[pool]

    def free_bytes(self) -> int | None:
        return self.free

    def new_graph(self) -> CpuGraph:
        graph = CpuGraph()
        self.graphs.append(graph)
        return graph

    @contextlib.contextmanager
    def capturing(self, graph: CpuGraph, pool: Any) -> Iterator[None]:
        assert not self.is_capturing()
        if self._captured[pool] and all(one.freed for one in self._captured[pool]):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # a pool goes with the last graph in it
        self.capturing_into = graph
        self.captures += 1
        mode = Capture(graph, self.host, draws=self.has_own_random)
        random = torch.random.get_rng_state()
        try:
            try:
                with (
                    mode,
                    optimizers_check(),
                    assigning(self),
                    torch_internals.replaced_attribute(torch.cuda.graphs, ASKS, lambda: True),
                ):
                    yield
            finally:
                if mode.broken:
                    raise torch.AcceleratorError("operation failed due to a previous error during capture")
                if self.fail_with is not None:
                    error, self.fail_with = self.fail_with, None
                    raise error
            graph.valid = True
            for earlier in self._captured[pool]:
                earlier.later.append(graph)
            graph.note_references()
            held = sum((one.references for one in self.graphs), Counter[int]())
            graph.left = [
                (weakref.ref(earlier), freed)
                for earlier in self._captured[pool]
                if (freed := freed_memory(earlier, held))  # most left nothing, and each launch goes through this list
            ]
            self._captured[pool].append(graph)
            graph.mates = functools.partial(graphs_of_pool, weakref.ref(self), pool)
            self.pools[pool] += sum(storage.nbytes() for storage in graph.made.values())
        finally:
            self.broken += mode.broken
            mode.undo()
            torch.random.set_rng_state(random)
            self.capturing_into = None

    def make_room(self, size_bytes: int) -> None:
        assert self.capturing_into is not None
        assert not self.capturing_into.operators
        self.rooms.append(size_bytes)

    def mentions(self, graph: CpuGraph, memory: Sequence[MemoryRange]) -> bool:
        given = [word for words in graph.reads.values() for word in words]
        for _, arguments, *_ in graph.operators:
            given += filter(is_word, leaves_of(arguments))
        return any(address in place for place in memory for address in given)

    def node_count(self) -> int:
        assert self.capturing_into is not None
        return len(self.capturing_into.nodes())

    def read(self, graph: CpuGraph) -> CapturedGraph:
        """Every operator as a kernel, with the addresses it was given and those of its results."""
        nodes = []
        for index in graph.nodes():
            operator, arguments, keywords, results = graph.operators[index]
            values = [*leaves_of((arguments, keywords)), *results]
            words = [one if isinstance(one, int) else one.data_ptr() for one in values if has_address(one)]
            parameters = [(one % 2**64).to_bytes(8, "little") for one in words]
            nodes.append(kernel(parameters, name=str(operator)))
        edges = tuple(Edge(source=index, target=index + 1) for index in range(len(nodes) - 1))
        return CapturedGraph(nodes=tuple(nodes), edges=edges)

    def launch_log(self, *, notes_memory: bool) -> LaunchLog:
        return LaunchLog(self.node_count, None, device_type="cpu", notes_memory=notes_memory)

    def branches(self, graph: Any, log: LaunchLog) -> Branches:
        driver: Any = CpuEdges
        return Branches(log, graph, driver, self.race, object)

    def memory(self, pool: Any) -> tuple[list[MemoryRange], list[MemoryRange]]:
        """Return the memory of the pool, and every place there is: all that is made later may lie there."""
        made = [
            MemoryRange(address=address, size_bytes=storage.nbytes())
            for graph in self.graphs
            for address, storage in graph.made.items()
            if storage.nbytes()
        ]
        return made, [MemoryRange(address=1, size_bytes=2**63)]

    def default_generator(self) -> torch.Generator:
        return torch.default_generator

    def give_back(self) -> None:
        assert not self.is_capturing()
        self.given_back += 1

    def wait(self) -> None:
        pass

    def here(self) -> Any:
        return nullcontext()


class CpuDeviceWithHost(CpuDevice):
    """One with a host next to it: numbers that are drawn on the CPU, but for those drawn into or for other tensors, and
    what is computed from them alone. A capture executes that, and no launch does. The device's numbers are `own`'s."""

    has_own_random = True

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        with super().warming_up(), _Host(self.host):
            yield

    @contextlib.contextmanager
    def capturing(self, graph: CpuGraph, pool: Any) -> Iterator[None]:
        with super().capturing(graph, pool), _Host(self.host):
            try:
                yield
            finally:
                drawn = torch.random.get_rng_state()
        torch.random.set_rng_state(drawn)

    def default_generator(self) -> torch.Generator:
        return self.own


class _Host(TorchDispatchMode):
    """Marks what the host makes, and keeps it: addresses that are free again may be given to the device."""

    def __init__(self, host: set[int]) -> None:
        super().__init__()
        self.host = host
        self.kept: list[torch.Tensor] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.host.clear()
        self.kept.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_host = is_of_host(func, args, kwargs or {}, self.host)
        result = func(*args, **(kwargs or {}))
        if of_host:
            made = [value for value in leaves_of(result) if isinstance(value, torch.Tensor)]
            self.kept += made
            self.host |= set(map(storage_address, made))
        return result


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of tensors of each copy that steps make outside of graphs."""
    found: list[int] = []
    stock = inputs.copy_all

    def copy_all(targets: Any, sources: Any) -> None:
        found.append(len(targets))
        stock(targets, sources)

    for module in (inputs, recording):
        monkeypatch.setattr(module, "copy_all", copy_all)
    return found
