"""A device whose graphs are made of CPU operators, for the logic of whole-step captures.

What it keeps of CUDA: a capture runs Python and executes nothing (memory that was written is put back, what was made
holds NaN); a launch repeats the operators on the tensors of the capture, at their addresses, with numbers baked in;
reading a value on the host during a capture fails and breaks the capture. Random numbers come from the CPU's default
generator, as eager's do, so that results can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
import struct
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forced_branches import BranchesAtOnce
from step_parts import CAPTURE_CHECK
from synthetic_captures import kernel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from optimizations import torch_internals
from optimizations.capture import inputs
from optimizations.capture.copy_nodes import NotCarried
from optimizations.capture.device import Device
from optimizations.capture.step import outputs
from optimizations.concurrency.branches import Branches, Noted
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.graph.plan import Plan
from optimizations.graph.records import CapturedGraph, Edge, MemoryRange
from optimizations.torch_internals import reference_counts

GARBAGE = float("nan")
ASKS = "_cuda_isCurrentStreamCapturing"
"""What `torch.cuda.is_current_stream_capturing` calls."""
ELSEWHERE: ContextVar[bool] = ContextVar("elsewhere", default=False)
"""Whether what runs does so on another stream than the side stream."""


_launches = itertools.count(1)


_BY_GRAPHS: ContextVar[dict[int, list[int]]] = ContextVar("by graphs", default=defaultdict(lambda: [0, 0]))  # noqa: B039
"""What all graphs hold of storages, by their addresses in C++: references of C++, and of Python. Steps that reach the
device do not look into it."""
_counts = reference_counts.storage_counts


def _without_graphs(cells: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> tuple[list[int], list[int]]:
    """A graph of the GPU holds addresses only, so what graphs of this one hold is no reference."""
    of_storages, of_objects = _counts(cells, storages)
    by_graphs = _BY_GRAPHS.get()
    held = [by_graphs.get(cell, (0, 0)) for cell in cells]
    return (
        [count - one for count, (one, _) in zip(of_storages, held, strict=True)],
        [count - one for count, (_, one) in zip(of_objects, held, strict=True)],
    )


def _count(held: Mapping[int, tuple[int, int]], times: int) -> None:
    by_graphs = _BY_GRAPHS.get()
    for cell, (of_storage, of_object) in held.items():
        by_graphs[cell][0] += times * of_storage
        by_graphs[cell][1] += times * of_object
        if by_graphs[cell] == [0, 0]:
            del by_graphs[cell]


reference_counts.storage_counts = _without_graphs


class CpuGraph:
    """Operators with their arguments and results. `reads` are the addresses they were given, by their places; those of
    views belong to the operator behind them."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self.reads: defaultdict[int, set[int]] = defaultdict(set)
        self.made: dict[int, torch.UntypedStorage] = {}
        self.outlived: list[tuple[int, StorageWeakRef]] = []
        """What it made, once it was freed: others hold it, if anything does."""
        self.references: dict[int, tuple[int, int]] = {}
        """What it holds of storages, as in `_BY_GRAPHS`."""
        self.held: Counter[int] = Counter()
        """How many tensors it holds over storages, by their addresses in C++."""
        self.led_elsewhere: set[tuple[int, int]] = set()
        """Arguments of its operators in whose place an address was set."""
        self.replays = self.launched_at = 0
        self.freed = False
        self.valid = False
        self.later: list[CpuGraph] = []
        """Graphs that were captured in the same pool since. Memory that this one used for a while was free then."""
        self.mates: Callable[[], Sequence[CpuGraph]] = lambda: ()
        """All graphs of the pool, which it does not hold."""
        self.edges: set[tuple[int, int]] | None = None
        """Between nodes, by their places among them; None: each waits for the one before it. `launched_edges` are
        those of the executable."""
        self.launched_edges: set[tuple[int, int]] | None = None
        self.orders: set[tuple[int, ...]] = set()
        """In which nodes ran, where they were not a chain."""
        self.left: list[tuple[weakref.ref[CpuGraph], list[torch.UntypedStorage]]] = []
        """What earlier graphs of the pool made, and nobody held any more behind this one: it may lie there."""

    def replay(self) -> None:
        assert self.valid and not self.freed, "a graph was launched that was not captured, or freed"
        for mate in self.mates():
            mate.spoil()
        self.replays += 1
        self.launched_at = next(_launches)
        to_come = list(self.later)
        with torch.inference_mode(), self._uncounted():  # what was made in that mode may be written
            for index in self._order():
                operator, arguments, keywords, results = self.operators[index]
                copies_inputs = isinstance(operator, ListCopy) or (index, 1) in self.led_elsewhere
                if operator is not _nothing and not copies_inputs:  # inputs are copied first of all
                    while to_come:
                        to_come.pop().overwrite()
                values = _flat(operator(*arguments, **keywords))
                for result, value in zip(results, values, strict=True):
                    if result is not None:
                        result.copy_(value)

    def _order(self) -> Sequence[int]:
        """Return the operators in an order that the edges allow, another one in each launch."""
        if self.launched_edges is None:
            return range(len(self.operators))
        nodes = self.nodes()
        drawn = random.Random(self.replays)
        left, order = set(range(len(nodes))), []
        while left:
            waiting = {later for earlier, later in self.launched_edges if earlier in left}
            chosen = drawn.choice(sorted(left - waiting))
            left.remove(chosen)
            order.append(chosen)
        self.orders.add(tuple(order))
        places = set(nodes)
        memory = [index for index in range(len(self.operators)) if index not in places]
        return [*memory, *(nodes[one] for one in order)]

    def raw_cuda_graph(self) -> Any:
        return self

    def instantiate(self) -> None:
        self.launched_edges = None if self.edges is None else set(self.edges)

    def spoil(self) -> None:
        """Where it made something, what earlier graphs left is written over, if anything was written there since: their
        launches left garbage."""
        before = [storages for graph, storages in self.left if (one := graph()) and one.launched_at > self.launched_at]
        if before and any(not _is_garbage(storage) for storage in self.made.values()):
            for storages in before:
                for storage in storages:
                    _fill_with_garbage(storage)

    def __del__(self) -> None:
        _count(self.references, -1)

    def note_references(self) -> None:
        """A graph of the GPU holds addresses only: what this one holds in their place is not the program's."""
        tensors = [
            one
            for index, (_, arguments, *rest) in enumerate(self.operators)
            for place, some in enumerate([*arguments, rest])
            if (index, place) not in self.led_elsewhere
            for one in _flat(some)
            if _has_memory(one)
        ]
        held = Counter(one.untyped_storage()._cdata for one in {id(one): one for one in tensors}.values())
        held.update({one._cdata: 0 for one in self.made.values()})
        made = {one._cdata for one in self.made.values()}
        _count(self.references, -1)
        self.references = {key: (held[key], int(key in made)) for key in held}
        _count(self.references, 1)
        self.held = held

    def _uncounted(self) -> contextlib.AbstractContextManager[Any]:
        """A launch counts no versions: PyTorch sees nothing of it."""
        values = [value for _, *rest in self.operators for value in _flat(rest) if isinstance(value, torch.Tensor)]
        return torch.autograd._unsafe_preserve_version_counter(tuple(one for one in values if not one.is_inference()))

    def nodes(self) -> list[int]:
        """Places of the operators that do something: memory is not made by nodes."""
        return [index for index, (operator, *_) in enumerate(self.operators) if not _makes_memory(operator)]

    def copy_node(self, source: torch.Tensor, target: torch.Tensor) -> CpuCopy:
        found = [
            index
            for index, (operator, arguments, _, _) in enumerate(self.operators)
            if str(operator) == "aten.copy_.default"
            and (arguments[1].data_ptr(), arguments[0].data_ptr()) == (source.data_ptr(), target.data_ptr())
        ]
        if len(found) != 1:
            raise NotCarried(f"{len(found)} copies")
        return CpuCopy(self, found[0])

    def overwrite(self) -> None:
        """What it made holds garbage, but for memory that the program gave back."""
        outlived = [(address, torch_internals.storage_of_weak(one.cdata)) for address, one in self.outlived]
        for address, storage in [*self.made.items(), *outlived]:
            if storage is not None and storage.data_ptr() == address:
                _fill_with_garbage(storage)

    def reset(self) -> None:
        self.freed = True
        _count(self.references, -1)
        self.references = {}
        self.operators.clear()
        self.outlived = [(address, StorageWeakRef(one)) for address, one in self.made.items()]
        self.made.clear()


def _of_pool(device: weakref.ref[CpuDevice], pool: Any) -> Sequence[CpuGraph]:
    there = device()
    return there._captured[pool] if there is not None else ()


def _fill_with_garbage(storage: torch.UntypedStorage) -> None:
    if storage.nbytes() % 4 == 0:
        torch.tensor([], dtype=torch.float32).set_(storage).fill_(GARBAGE)


def _freed(graph: CpuGraph, held: Mapping[int, int]) -> list[torch.UntypedStorage]:
    """What it made and nothing but graphs, which hold so many tensors over each, has now."""
    by_graphs = {key: held[key] + 1 for key in (one._cdata for one in graph.made.values())}
    return [
        one for one in graph.made.values() if torch_internals.storage_use_count(one._cdata) <= by_graphs[one._cdata]
    ]


def _is_garbage(storage: torch.UntypedStorage) -> bool:
    if not storage.nbytes() or storage.nbytes() % 4:
        return True
    return bool(torch.tensor([], dtype=torch.float32).set_(storage).isnan().all())


class CpuCopy:
    """A copy among the operators whose ends can be set. `settings` counts; none is taken after `refuse_after`."""

    settings = 0
    refuse_after: int | None = None

    def __init__(self, graph: CpuGraph, index: int) -> None:
        self._graph, self._index = graph, index

    def _set(self, place: int, address: int) -> None:
        if CpuCopy.refuse_after is not None and CpuCopy.settings >= CpuCopy.refuse_after:
            raise NotCarried("refused")
        CpuCopy.settings += 1
        operator, arguments, keywords, results = self._graph.operators[self._index]
        changed = [*arguments]
        changed[place] = _like_at(arguments[place], address)
        self._graph.operators[self._index] = operator, tuple(changed), keywords, results
        if (self._index, place) not in self._graph.led_elsewhere:
            self._graph.led_elsewhere.add((self._index, place))
            self._graph.note_references()

    def read_from(self, address: int) -> None:
        self._set(1, address)

    def switch_off(self) -> None:
        self._graph.operators[self._index] = _nothing, (), {}, []
        self._graph.note_references()

    def write_to(self, address: int) -> None:
        self._set(0, address)

    def renew(self) -> None:
        """What was set stays set: there is one executable."""


@functools.cache
def _makes_memory(operator: Any) -> bool:
    return str(operator).startswith("aten.empty")


def _nothing() -> list[torch.Tensor]:
    return []


def _like_at(tensor: torch.Tensor, address: int) -> torch.Tensor:
    """What lies there, which is not held: a graph has nothing but the address."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class ListCopy:
    """The kernel that copies lists of tensors, launched with so many blocks: its argument says what to copy, as bytes
    that can be set. Where nothing is written it holds what lay there before, `left_over`.

    As in ATen/native/cuda/MultiTensorApply.cuh: addresses of 64 sources and of 64 copies, how many elements each has,
    the tensor and the part of it of each of 320 blocks, and the first tensor of the launch.
    """

    LAYOUT = struct.Struct("<64Q64Q64q320B320i4x")
    TENSORS, BLOCKS, PART = 64, 320, 65536

    def __init__(self, element_bytes: int, left_over: int) -> None:
        self.element_bytes, self.left_over = element_bytes, left_over
        self.tensors: list[tuple[int, int, int]] = []
        self.blocks: list[tuple[int, int]] = []

    def __str__(self) -> str:
        return "multi_tensor_apply_kernel"

    @classmethod
    def launches(cls, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], left_over: int) -> list[Any]:
        """What copies them: another launch where one is full."""
        found = [cls(sources[0].element_size(), left_over)]
        for target, source in zip(targets, sources, strict=True):
            one = source.data_ptr(), target.data_ptr(), source.numel()
            for part in range(-(-source.numel() // cls.PART)):
                last = found[-1]
                if len(last.blocks) == cls.BLOCKS or (not part and len(last.tensors) == cls.TENSORS):
                    last = cls(last.element_bytes, left_over)
                    found.append(last)
                if one not in last.tensors or not part:
                    last.tensors.append(one)
                last.blocks.append((len(last.tensors) - 1, part))
        return found

    def argument(self) -> bytearray:
        columns = zip(*self.tensors, strict=True)
        words = [[*column, *[self.left_over] * (64 - len(column))] for column in columns]
        places = [[*column, *[0] * (320 - len(column))] for column in zip(*self.blocks, strict=True)]
        return bytearray(self.LAYOUT.pack(*itertools.chain(*words, *places)))

    def __call__(self, argument: bytearray) -> list[torch.Tensor]:
        fields = self.LAYOUT.unpack(argument)
        sources, targets, elements, tensors, parts = (
            fields[start:end] for start, end in itertools.pairwise([0, 64, 128, 192, 512, 832])
        )
        for block in range(len(self.blocks)):
            tensor, begin = tensors[block], parts[block] * self.PART
            count, shift = min(elements[tensor] - begin, self.PART), begin * self.element_bytes
            assert not sources[tensor] % self.element_bytes, "a misaligned address"
            ctypes.memmove(targets[tensor] + shift, sources[tensor] + shift, count * self.element_bytes)
        return []


def _is_list_copy(func: Any, args: Any) -> bool:
    """Whether PyTorch has one kernel for it: otherwise it copies one after another."""
    if str(func) != "aten._foreach_copy_.default":
        return False
    return all(
        target.dtype == source.dtype == args[0][0].dtype
        and target.stride() == source.stride()
        and source.is_contiguous()
        and target.shape == source.shape
        for target, source in zip(*args[:2], strict=True)
    )


class _Capture(TorchDispatchMode):
    """`left_over` is what lies in memory that a launch hands to the driver and does not fill. None: lists of tensors
    are not copied by a kernel."""

    def __init__(self, graph: CpuGraph, host: Collection[int] | None = None, left_over: int | None = None) -> None:
        super().__init__()
        self.graph = graph
        self.host = host
        self.left_over = left_over
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.broken = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, torch_internals.FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a tensor that holds others
        if str(func).startswith("profiler."):
            return func(*args, **kwargs)
        if self.host is not None and _is_of_host(func, args, kwargs, self.host):
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        inputs = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        before = {_storage(tensor) for tensor in inputs}
        before |= {one.data_ptr() for one in _flat((args, kwargs)) if isinstance(one, torch.UntypedStorage)}
        self.graph.reads[len(self.graph.operators)] |= before
        writes = False
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes = True
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in _flat(value):
                    if isinstance(tensor, torch.Tensor):
                        self._save(tensor)
        if "batch_norm" in str(func):  # writes its running statistics, which its schema does not say
            writes = True
            for tensor in inputs:
                self._save(tensor)
        result = func(*args, **kwargs)
        if any(isinstance(value, torch_internals.FakeTensor) for value in _flat(result)):
            return result
        if self.left_over is not None and _is_list_copy(func, args) and not self.graph.made:
            for launch in ListCopy.launches(*args[:2], self.left_over):
                self.graph.operators.append((launch, (launch.argument(),), {}, []))
            return result
        results: list[torch.Tensor | None] = []
        for value in _flat(result):
            fresh = _has_memory(value) and _storage(value) not in before
            results.append(_where_it_lies(value.detach()) if fresh else None)
            if fresh:
                self.graph.made.setdefault(_storage(value), value.untyped_storage())
        if writes or any(value is not None for value in results):
            self.graph.operators.append((func, _placed(args), _placed(kwargs), results))
        return result

    def _save(self, tensor: torch.Tensor) -> None:
        address = _storage(tensor)
        if address not in self.graph.made and address not in self.saved:
            self.saved[address] = tensor.untyped_storage(), tensor.untyped_storage().clone()

    def undo(self) -> None:
        """Executing nothing: what was there is as it was, what was made holds garbage."""
        for storage, content in self.saved.values():
            storage.copy_(content)
        self.graph.overwrite()


@contextlib.contextmanager
def optimizers_check() -> Iterator[None]:
    """PyTorch's optimizers look in the block whether they are captured, which they do where there is a GPU only.

    But for those that are never `fused`: `capturable=True`, which they would have on a GPU, they take on no CPU.
    """
    stock = vars(torch.optim.Optimizer)[CAPTURE_CHECK]

    def check(optimizer: torch.optim.Optimizer) -> None:
        if all("fused" in group for group in optimizer.param_groups):
            with torch_internals.replaced_attribute(torch.cuda, "is_available", lambda: True):
                stock(optimizer)

    with torch_internals.replaced_attribute(torch.optim.Optimizer, CAPTURE_CHECK, check):
        yield


class CpuEdges:
    """The driver's calls on edges of a `CpuGraph`."""

    CUgraph = staticmethod(lambda graph: graph)

    @staticmethod
    def cuGraphGetNodes(graph: CpuGraph, count: int) -> Any:
        return 0, list(range(len(graph.nodes()))), len(graph.nodes())

    @staticmethod
    def cuGraphGetEdges(graph: CpuGraph, count: int) -> Any:
        edges = sorted(graph.edges if graph.edges is not None else itertools.pairwise(range(len(graph.nodes()))))
        return 0, [one for one, _ in edges], [other for _, other in edges], [None] * len(edges), len(edges)

    @staticmethod
    def cuGraphRemoveDependencies(graph: CpuGraph, sources: Any, targets: Any, data: Any, count: int) -> Any:
        if graph.edges is None:
            graph.edges = set(itertools.pairwise(range(len(graph.nodes()))))
        graph.edges.difference_update(zip(sources, targets, strict=True))
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
    and `waits` are pairs of streams of which the first was told to wait for the second. What a graph made and nobody
    holds any more counts as lying where later graphs of its pool make something. `workspaces` are cuBLAS's, and
    `let_go` is how often it was told that no graph writes there. `set_nodes` counts the calls of the driver that set a
    node for inputs that moved. `left_over` is a word that lies in memory that launches do not fill. `rooms` are sizes
    that a capture asked for before anything was captured.
    """

    has_own_random = False

    race: Any = BranchesAtOnce

    free: int | None = -1
    """Memory for audits: none, so that tests which count replays have no audited calls among them."""

    def __init__(self, *, copies_are_nodes: bool = True) -> None:
        self.copies_are_nodes = copies_are_nodes
        self.host: set[int] = set()
        self.graphs: list[CpuGraph] = []
        self.capturing_into: CpuGraph | None = None
        self.fail_with: BaseException | None = None
        self.capture_now = False
        self.captures = self.warmed_up = self.broken = self.given_back = self.set_nodes = 0
        self.not_ready = self.stream = self.let_go = self.left_over = 0
        self.workspaces: list[MemoryRange] = []
        self.rooms: list[int] = []
        self.waits: list[tuple[int, int]] = []
        self._launched_on: int | None = None
        self.pools: dict[int, int] = {}
        self._captured: defaultdict[int, list[CpuGraph]] = defaultdict(list)
        self._numbers = itertools.count(1)

    def holds(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) not in self.host

    def is_capturing(self) -> bool:
        return self.capture_now

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        self.warmed_up += 1
        yield

    def may_read(self, tensors: Iterable[torch.Tensor | None]) -> None:
        pass

    def follow(self) -> bool:
        if self.capture_now:
            return False
        if self._launched_on not in (None, self.stream):
            self.waits.append((self.stream, self._launched_on))
        self._launched_on = self.stream
        return True

    @property
    def launched_on(self) -> int | None:
        return self._launched_on

    def wait_for(self, stream: int) -> None:
        self.waits.append((self.stream, stream))

    def hold(self, stream: int) -> None:
        self.waits.append((stream, self.stream))

    def ready(self) -> bool:
        self.not_ready -= 1
        return self.not_ready < 0

    def keeps_workspace(self) -> bool:
        return not ELSEWHERE.get()

    def computes_in_workspace(self, graph: CpuGraph, but: Collection[int] = ()) -> bool:
        return self.mentions(graph, self.workspaces, but)

    def let_go_of_workspaces(self) -> None:
        self.let_go += 1

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
    def capturing(self, graph: CpuGraph, pool: Any, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
        assert not self.capture_now
        if self._captured[pool] and all(one.freed for one in self._captured[pool]):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # a pool goes with the last graph in it
        self.capture_now, self.capturing_into = True, graph
        self.captures += 1
        left_over = self.left_over if self.copies_are_nodes else None
        mode = _Capture(graph, self.host if self.has_own_random else None, left_over)
        random = torch.random.get_rng_state()
        states = [(generator, generator.get_state()) for generator in generators]
        try:
            try:
                with (
                    mode,
                    optimizers_check(),
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
            held = sum((one.held for one in self.graphs), Counter[int]())
            graph.left = [
                (weakref.ref(earlier), freed)
                for earlier in self._captured[pool]
                if (freed := _freed(earlier, held))  # most left nothing, and each launch goes through this list
            ]
            self._captured[pool].append(graph)
            graph.mates = functools.partial(_of_pool, weakref.ref(self), pool)
            self.pools[pool] += sum(storage.nbytes() for storage in graph.made.values())
        finally:
            self.broken += mode.broken
            mode.undo()
            torch.random.set_rng_state(random)
            for generator, state in states:
                generator.set_state(state)
            self.capture_now, self.capturing_into = False, None

    def make_room(self, size_bytes: int) -> None:
        assert self.capturing_into is not None
        assert not self.capturing_into.operators
        self.rooms.append(size_bytes)

    def copies(self, graph: CpuGraph, ends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Sequence[Any]:
        if not self.copies_are_nodes:
            raise NotCarried("a copy is no node")
        return [graph.copy_node(*pair) for pair in ends]

    def mentions(self, graph: CpuGraph, memory: Sequence[MemoryRange], but: Collection[int] = ()) -> bool:
        left_out = {index for place, index in enumerate(graph.nodes()) if place in but}
        given = [word for index, words in graph.reads.items() if index not in left_out for word in words]
        for index, (operator, arguments, *_) in enumerate(graph.operators):
            if index not in left_out:
                lists = isinstance(operator, ListCopy)
                given += struct.unpack_from("<192Q", arguments[0]) if lists else filter(_is_word, _flat(arguments))
        return any(address in place for place in memory for address in given)

    def node_count(self) -> int:
        assert self.capturing_into is not None
        return len(self.capturing_into.nodes())

    def read(self, graph: CpuGraph) -> CapturedGraph:
        """Every operator as a kernel, with the addresses it was given and those of its results."""
        nodes = []
        for index in graph.nodes():
            operator, arguments, keywords, results = graph.operators[index]
            if isinstance(operator, ListCopy):
                nodes.append(kernel([bytes(arguments[0]), b"\0", b"\0"], name=str(operator)))
                continue
            values = [*_flat((arguments, keywords)), *results]
            words = [one if isinstance(one, int) else one.data_ptr() for one in values if _has_address(one)]
            parameters = [(one % 2**64).to_bytes(8, "little") for one in words]
            nodes.append(kernel(parameters, name=str(operator)))
        edges = tuple(Edge(source=index, target=index + 1) for index in range(len(nodes) - 1))
        return CapturedGraph(nodes=tuple(nodes), edges=edges)

    def pointers(self, graph: CpuGraph, captured: CapturedGraph, plan: Plan) -> Any:
        def point(addresses: Mapping[int, int]) -> int:
            written = 0
            for node in plan.nodes:
                uses = [use for use in node.uses if use.input in addresses]
                place = graph.nodes()[node.node[0]]
                operator, arguments, keywords, results = graph.operators[place]
                changed = [*arguments]
                for use in uses:
                    if isinstance(operator, ListCopy):
                        struct.pack_into("<Q", changed[use.parameter], use.byte_offset, addresses[use.input])
                    else:
                        changed[use.parameter] = addresses[use.input]
                graph.operators[place] = operator, tuple(changed), keywords, results
                self.set_nodes += bool(uses)
                written += 8 * len(uses)
            return written

        return SimpleNamespace(point=point, settle=lambda: None)

    def launch_log(self, *, notes_memory: bool) -> LaunchLog:
        return LaunchLog(self.node_count, None, device_type="cpu", in_autograd=True, notes_memory=notes_memory)

    def branches(self, graph: Any, noted: Noted) -> Branches:
        driver: Any = CpuEdges
        return Branches(noted, graph, driver, self.race, object)

    def workspace_ranges(self) -> Sequence[MemoryRange]:
        return self.workspaces

    def renew(self, graph: CpuGraph, pointers: Any) -> None:
        pass

    def pool_ranges(self, pool: Any) -> Sequence[MemoryRange]:
        return [
            MemoryRange(address=address, size_bytes=storage.nbytes())
            for graph in self.graphs
            for address, storage in graph.made.items()
            if storage.nbytes()
        ]

    def used_ranges(self, pool: Any) -> Sequence[MemoryRange]:
        """Every place there is: all that is made later may lie there."""
        return [MemoryRange(address=1, size_bytes=2**63)]

    def default_generator(self) -> torch.Generator:
        return torch.default_generator

    def random_states(self) -> list[Any]:
        return [torch.random.get_rng_state()]

    def restore_random_states(self, states: list[Any]) -> None:
        torch.random.set_rng_state(states[0])

    def give_back(self) -> None:
        assert not self.capture_now
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
    def capturing(self, graph: CpuGraph, pool: Any, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
        with super().capturing(graph, pool, generators), _Host(self.host):
            try:
                yield
            finally:
                drawn = torch.random.get_rng_state()
        torch.random.set_rng_state(drawn)

    def default_generator(self) -> torch.Generator:
        return self.own

    def random_states(self) -> list[Any]:
        return [self.own.get_state()]

    def restore_random_states(self, states: list[Any]) -> None:
        self.own.set_state(states[0])


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
        of_host = _is_of_host(func, args, kwargs or {}, self.host)
        result = func(*args, **(kwargs or {}))
        if of_host:
            made = [value for value in _flat(result) if isinstance(value, torch.Tensor)]
            self.kept += made
            self.host |= set(map(_storage, made))
        return result


def _is_of_host(func: Any, args: Any, kwargs: Any, host: Collection[int]) -> bool:
    tensors = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
    if not tensors:
        return torch.Tag.nondeterministic_seeded in func.tags
    return all(_storage(tensor) in host for tensor in tensors)


def _has_address(value: Any) -> bool:
    return _has_memory(value) or _is_word(value)


def _is_word(value: Any) -> bool:
    return type(value) is int


def _has_memory(value: Any) -> bool:
    """Whether it is a tensor other than a sparse one, which is made of others, one that is zero without memory, or one
    of the device `meta`."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_meta
        and not value._is_zerotensor()
    )


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor that holds others
        return 0


def _placed(value: Any) -> Any:
    """An operator's arguments as a graph has them: it knows their memory, and no tensors of the program's."""
    if isinstance(value, dict):
        return {key: _placed(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_placed, value))
    return _where_it_lies(value) if isinstance(value, torch.Tensor) else value


def _where_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor in the same memory. What becomes of the program's own does not change it."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _flat(value: Any) -> list[Any]:
    if not isinstance(value, _NESTS):
        return [value]
    leaves: list[Any] = []
    for member in value.values() if isinstance(value, dict) else value:
        if isinstance(member, _NESTS):
            leaves += _flat(member)
        else:  # most: a launch asks for all operands of a graph
            leaves.append(member)
    return leaves


_NESTS = (dict, list, tuple)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are nodes of graphs count their settings from 0, and take all of them."""
    monkeypatch.setattr(CpuCopy, "settings", 0)
    monkeypatch.setattr(CpuCopy, "refuse_after", None)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """See `copies_outside_of_graphs`."""
    return copies_outside_of_graphs(monkeypatch)


def copies_outside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors steps copy from now on without a node of a graph, by copy."""
    found: list[int] = []
    stock = inputs.copy_all

    def copy_all(targets: Any, sources: Any) -> None:
        found.append(len(targets))
        stock(targets, sources)

    for module in (inputs, outputs):
        monkeypatch.setattr(module, "copy_all", copy_all)
    return found
