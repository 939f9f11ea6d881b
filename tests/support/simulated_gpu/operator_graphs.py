"""Graphs of PyTorch's operators on the CPU, for the device in `operators`: what captures make and launches run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimizations import torch_internals
from optimizations.capture.step import gradients

GARBAGE = float("nan")
ASKS = "_cuda_isCurrentStreamCapturing"
"""Name of the function that `torch.cuda.is_current_stream_capturing` calls."""
ELSEWHERE: ContextVar[bool] = ContextVar("elsewhere", default=False)
"""True while work runs on another stream than the side stream."""


_launches = itertools.count(1)


_BY_GRAPHS: ContextVar[Counter[int]] = ContextVar("by graphs", default=Counter())  # noqa: B039
"""References of all graphs to storages, by their addresses in C++. Steps that reach the device do not read it."""
_counts = gradients.storage_counts


def _without_graphs(cells: Sequence[int]) -> list[int]:
    """A graph of the GPU holds addresses only, so what graphs of this one hold is no reference."""
    by_graphs = _BY_GRAPHS.get()
    return [count - by_graphs[cell] for count, cell in zip(_counts(cells), cells, strict=True)]


gradients.storage_counts = _without_graphs


class CpuGraph:
    """Operators with their arguments and results. `reads` are the addresses they were given, by their places; those of
    views belong to the operator after them."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self.reads: defaultdict[int, set[int]] = defaultdict(set)
        self.made: dict[int, torch.UntypedStorage] = {}
        self.outlived: list[tuple[int, StorageWeakRef]] = []
        """Memory that the graph made, noted when it is freed: others may still hold it."""
        self.references = Counter[int]()
        """Its references to storages, by tensors over them, as in `_BY_GRAPHS`."""
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
        """Orders in which nodes ran where they were no chain."""
        self.left: list[tuple[weakref.ref[CpuGraph], list[torch.UntypedStorage]]] = []
        """Results of earlier graphs of the pool that are dead after this one, so that it may use their memory."""

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
                while to_come:
                    to_come.pop().overwrite()
                values = leaves_of(operator(*arguments, **keywords))
                for result, value in zip(results, values, strict=True):
                    if result is not None:
                        result.copy_(value)

    def _order(self) -> Sequence[int]:
        """Return the operators in an order that the edges allow, another one in each launch."""
        if self.launched_edges is None:
            return range(len(self.operators))
        nodes = self.nodes()
        # A GPU gives each launch that draws random numbers its own part of them. Here they take them in turn.
        draws = [place for place, index in enumerate(nodes) if _draws(self.operators[index][0])]
        edges = {*self.launched_edges, *itertools.pairwise(draws)}
        drawn = random.Random(self.replays)
        left, order = set(range(len(nodes))), []
        while left:
            waiting = {later for earlier, later in edges if earlier in left}
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
        _BY_GRAPHS.get().subtract(self.references)

    def note_references(self) -> None:
        """A graph of the GPU holds addresses only: what this one holds in their place is not the program's."""
        tensors = [one for _, *rest in self.operators for one in leaves_of(rest) if _has_memory(one)]
        self.references.update(one.untyped_storage()._cdata for one in {id(one): one for one in tensors}.values())
        _BY_GRAPHS.get().update(self.references)

    def _uncounted(self) -> contextlib.AbstractContextManager[Any]:
        """A launch counts no versions: PyTorch sees nothing of it."""
        values = [value for _, *rest in self.operators for value in leaves_of(rest) if isinstance(value, torch.Tensor)]
        return torch.autograd._unsafe_preserve_version_counter(tuple(one for one in values if not one.is_inference()))

    def edges_or_chain(self) -> set[tuple[int, int]]:
        return set(itertools.pairwise(range(len(self.nodes())))) if self.edges is None else self.edges

    def nodes(self) -> list[int]:
        """Places of the operators that do something: memory is not made by nodes."""
        return [index for index, (operator, *_) in enumerate(self.operators) if not _makes_memory(operator)]

    def overwrite(self) -> None:
        """Fill the memory that it made with garbage, but for memory that the program freed."""
        outlived = [(address, torch_internals.storage_of_weak(one.cdata)) for address, one in self.outlived]
        for address, storage in [*self.made.items(), *outlived]:
            if storage is not None and storage.data_ptr() == address:
                _fill_with_garbage(storage)

    def reset(self) -> None:
        self.freed = True
        _BY_GRAPHS.get().subtract(self.references)
        self.references = Counter()
        self.operators.clear()
        self.outlived = [(address, StorageWeakRef(one)) for address, one in self.made.items()]
        self.made.clear()


def _fill_with_garbage(storage: torch.UntypedStorage) -> None:
    if storage.nbytes() % 4 == 0:
        torch.tensor([], dtype=torch.float32).set_(storage).fill_(GARBAGE)


def freed_memory(graph: CpuGraph, held: Mapping[int, int]) -> list[torch.UntypedStorage]:
    """Return what it made and nothing but graphs, which hold so many tensors over each, has now."""
    made = graph.made.values()
    return [one for one in made if torch_internals.storage_use_count(one._cdata) <= held[one._cdata] + 1]


def _is_garbage(storage: torch.UntypedStorage) -> bool:
    if not storage.nbytes() or storage.nbytes() % 4:
        return True
    return bool(torch.tensor([], dtype=torch.float32).set_(storage).isnan().all())


def _draws(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


@functools.cache
def _makes_memory(operator: Any) -> bool:
    return str(operator).startswith("aten.empty")


class Capture(TorchDispatchMode):
    """Records operators, but for those of the host. `draws`: the host has random numbers of its own."""

    def __init__(self, graph: CpuGraph, host: Collection[int], *, draws: bool) -> None:
        super().__init__()
        self.graph = graph
        self.host = host
        self.draws = draws
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
        if is_of_host(func, args, kwargs, self.host, draws=self.draws):
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        inputs = [value for value in leaves_of((args, kwargs)) if isinstance(value, torch.Tensor)]
        before = {storage_address(tensor) for tensor in inputs}
        before |= {one.data_ptr() for one in leaves_of((args, kwargs)) if isinstance(one, torch.UntypedStorage)}
        self.graph.reads[len(self.graph.operators)] |= before
        writes = False
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes = True
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in leaves_of(value):
                    if isinstance(tensor, torch.Tensor):
                        self._save(tensor)
        if "batch_norm" in str(func):  # writes its running statistics, which its schema does not say
            writes = True
            for tensor in inputs:
                self._save(tensor)
        result = func(*args, **kwargs)
        if any(isinstance(value, torch_internals.FakeTensor) for value in leaves_of(result)):
            return result
        results: list[torch.Tensor | None] = []
        for value in leaves_of(result):
            fresh = _has_memory(value) and storage_address(value) not in before
            results.append(_where_it_lies(value.detach()) if fresh else None)
            if fresh:
                self.graph.made.setdefault(storage_address(value), value.untyped_storage())
        if writes or any(value is not None for value in results):
            placed = pytree.tree_map_only(torch.Tensor, _where_it_lies, (args, kwargs))
            self.graph.operators.append((func, *placed, results))
        return result

    def _save(self, tensor: torch.Tensor) -> None:
        address = storage_address(tensor)
        if address not in self.graph.made and address not in self.saved:
            self.saved[address] = tensor.untyped_storage(), tensor.untyped_storage().clone()

    def undo(self) -> None:
        """Executing nothing: what was there is as it was, what was made holds garbage."""
        for storage, content in self.saved.values():
            storage.copy_(content)
        self.graph.overwrite()


def is_of_host(func: Any, args: Any, kwargs: Any, host: Collection[int], *, draws: bool = True) -> bool:
    tensors = [value for value in leaves_of((args, kwargs)) if isinstance(value, torch.Tensor)]
    if not tensors:
        return draws and torch.Tag.nondeterministic_seeded in func.tags
    return all(storage_address(tensor) in host for tensor in tensors)


def has_address(value: Any) -> bool:
    return _has_memory(value) or is_word(value)


def is_word(value: Any) -> bool:
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


def storage_address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor that holds others
        return 0


def _where_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor in the same memory. What becomes of the program's own does not change it."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def leaves_of(value: Any) -> list[Any]:
    if not isinstance(value, _NESTS):
        return [value]
    leaves: list[Any] = []
    for member in value.values() if isinstance(value, dict) else value:
        if isinstance(member, _NESTS):
            leaves += leaves_of(member)
        else:  # most: a launch needs all operands of a graph
            leaves.append(member)
    return leaves


_NESTS = (dict, list, tuple)
