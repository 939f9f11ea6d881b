"""Note what each launch of a function reads and writes while the function is captured on one stream.

Inductor's Triton kernels say it by the names of their arguments, PyTorch's operators by their schemas. Around each of
both the nodes of the graph are counted, so every node belongs to a launch. Nodes that came from neither are a launch of
their own, which is a barrier (Note [Barriers] in `order`).

Note [Extents]. Memory that the function allocated is touched where the tensor that was passed lies: Inductor passes a
buffer whole, or a part of it as a tensor of that part. A tensor that the function was given may be a view, and a kernel
may read more of its storage than the view covers. So of such a tensor the whole storage counts.

Note [Memory that no argument names]. An operator may allocate a workspace and free it again, so that a later tensor
lies there. Kernels get its address as a parameter. So when the graph is there, the words of each operator's nodes are
searched for addresses in the graph's pool that none of its tensors holds (`with_hidden_memory`). Such a word stands for
the block in which it lies, where that block was never freed: a workspace of cuBLAS. Else it stands for what lies around
it, as far as no tensor held it at that time, and not farther than the operator allocated. An address in an input that
the operator was not given stands for the whole input.

Note [Addresses that are no words]. A kernel may get addresses otherwise: in a tensor map whose encoding is not known,
or from a table in the GPU's memory. Then the search finds nothing. So an operator is a barrier if one of its kernels
has no known address among its parameters, or none of them has that of a result.

Note [Memory that is kept]. The next operator of the same kind gets the same workspace, and would wait for the first. A
tensor that is freed makes room for one that has nothing to do with it. So what was freed last, and as much as an
operator allocated for itself, is kept from being used again, within a limit. Large tensors are not kept: a few would
take the whole limit, and the reuse that remains makes longer chains than no limit at all.

Note [Inputs that move]. An input that is not at a fixed address may be read in place, and lie elsewhere in each call.
Two inputs that lay apart when the graph was captured may then share memory. Only a launch that writes an input can make
that a conflict. So a launch that writes an input at a fixed address conflicts with each launch that is given a moving
one, and a launch that writes a moving one conflicts with each launch that is given any input (`with_moving_inputs`).

Note [Memory of live tensors]. What lies around an address is known by the tensors that launches were given or made. A
tensor that the function has allocated and not used yet is not known, so the memory taken for the workspace can only be
too large.
"""

from __future__ import annotations

import contextlib
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.order import Launch, Span
from optimizations.graph.memory import memory_of, storage_of
from optimizations.graph.named_uses import STEP_BYTES
from optimizations.graph.records import (
    WORD_BYTES,
    CapturedGraph,
    KernelNode,
    MemcpyNode,
    MemoryRange,
    MemsetNode,
    Node,
)
from optimizations.one_line import one_line

LEAST_KEPT = 8
"""At least so many tensors fit into the memory that is kept. Note [Memory that is kept]."""

_POINTERS_IN_DEVICE_MEMORY = re.compile(
    r"linalg|cholesky|lu_|triangular_solve|ormqr|orgqr|geqrf|svd|eigh?|lstsq|fft|_rnn"
)
"""In names of operators whose libraries keep addresses of workspaces in the device's memory, where no word tells."""

_ARGUMENT = re.compile(r"(in_out_ptr|out_ptr|in_ptr|ws_ptr)\d*$")
"""How Inductor names the arguments of the kernels that it writes."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A launch, and what must be known to search its nodes for memory that its arguments do not name.

    Attributes:
        launch: with the memory of its arguments and results.
        is_operator: whether it may use other memory, as operators may and Inductor's kernels may not.
        live: storages that were live when it ran, as spans, ascending.
        own_bytes: most memory that it allocated for itself; None where that is not known.
        is_given_moving: whether it is given an input that is not at a fixed address; `writes_moving`: and writes it.
    """

    launch: Launch
    is_operator: bool
    live: tuple[Span, ...] = ()
    own_bytes: int | None = None
    is_given_moving: bool = False
    writes_moving: bool = False


class LaunchLog:
    """The launches of one capture. Only the thread that is `noting` is noted.

    Args:
        count: returns how many nodes the captured graph has by now.
        given: the function's inputs. Note [Extents].
        moving: those of them that are not at a fixed address. Note [Inputs that move].
        keep_bytes: of the memory that is freed during the capture, so many bytes are not used again. Note [Memory that
            is kept].
        allocated_bytes: returns how much was ever allocated on the device; None where that is not known.
        line: returns the line of the generated code that runs now; None where none does.
        device_type: of the device whose memory counts.

    Attributes:
        logged: the launches so far.
        inputs: the storages of the function's inputs.
        kept_bytes: most memory that was kept at one time.
        failure: why the log says nothing; None where it does.
    """

    def __init__(
        self,
        count: Callable[[], int],
        given: Sequence[torch.Tensor] = (),
        moving: Iterable[torch.Tensor] = (),
        keep_bytes: int = 0,
        allocated_bytes: Callable[[], int] | None = None,
        line: Callable[[], int | None] = lambda: None,
        device_type: str = "cuda",
    ) -> None:
        self._count_nodes = count
        self._allocated_bytes = allocated_bytes or (lambda: 0)
        self._knows_allocated = allocated_bytes is not None
        self._line = line
        self._device_type = device_type
        self._thread: int | None = None
        self._last = 0
        self._depth = 0
        self._given = {one.untyped_storage()._cdata: _weak(one) for one in given}
        self._moving = {one.untyped_storage()._cdata for one in moving}
        self._live: dict[int, tuple[Any, Span]] = {}
        self._keep_bytes = keep_bytes
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._kept_now = 0
        self.kept_bytes = 0
        self.failure: str | None = None
        self.inputs = tuple(_extent_of_storage(one) for one in given)
        self.logged: list[Logged] = []

    @contextlib.contextmanager
    def noting(self, kernels: dict[str, Any]) -> Iterator[None]:
        """Note what runs in the block.

        Args:
            kernels: the globals of the generated module. While the block runs, its Triton kernels stand there as
                objects that note each launch and call the kernel.
        """
        replaced = {
            name: _NotingKernel(value, self)
            for name, value in kernels.items()
            if isinstance(value, torch_internals.CachingAutotuner)
        }
        originals = {name: kernels[name] for name in replaced}
        kernels.update(replaced)
        self._thread = threading.get_ident()
        self._others("before the function")
        try:
            with _operators(self):
                yield
            self._others("at the end")
        finally:
            kernels.update(originals)
            self._thread = None
            self._kept.clear()
            self._kept_now = 0
            self._live.clear()

    def _count(self) -> int:
        """Return how many nodes there are. A driver that does not say ends the log, never the capture."""
        if self.failure is None:
            try:
                return self._count_nodes()
            except Exception as error:
                self.failure = one_line(error)
        return self._last

    # What the parts below call

    def is_noted(self) -> bool:
        """Return whether a call is to be noted: it comes from the capture's thread and is not part of another."""
        return not self._depth and threading.get_ident() == self._thread

    def note(
        self,
        name: str,
        call: Callable[[], Any],
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        barrier: str | None = None,
        *,
        is_operator: bool,
    ) -> Any:
        """Run `call`, note the nodes that it adds, and return its result."""
        self._others(f"before {name}")
        reads, writes = list(reads), list(writes)
        live = self._spans_of_live(chain(reads, writes)) if is_operator else ()
        before = self._allocated_bytes() if is_operator else 0
        self._depth += 1
        try:
            result = call()
        finally:
            self._depth -= 1
        made = _tensors_in(result) if is_operator else []
        own_bytes = 0
        if is_operator and self._knows_allocated:
            own_bytes = max(0, self._allocated_bytes() - before - sum(self._new_bytes(made)))
        now = self._count()
        if now > self._last:
            launch = Launch(
                name,
                self._last,
                now - self._last,
                tuple(span for one in reads if (span := self._span(one))),
                tuple(span for one in chain(writes, made) if (span := self._span(one))),
                barrier,
                self._line(),
            )
            self.logged.append(
                Logged(
                    launch,
                    is_operator,
                    live,
                    own_bytes if self._knows_allocated else None,
                    any(map(self._is_moving, chain(reads, writes))),
                    any(map(self._is_moving, writes)),
                )
            )
            self._last = now
            self._keep(chain(reads, writes, made))
            if own_bytes:
                self._keep_workspace(own_bytes)
        self._note_live(made)
        return result

    def _others(self, when: str) -> None:
        now = self._count()
        if now > self._last:
            reason = "its nodes came from neither an operator of PyTorch nor a kernel of Inductor"
            self.logged.append(Logged(Launch(f"unknown, {when}", self._last, now - self._last, barrier=reason), False))
            self._last = now

    def _counts(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device_type and tensor.layout is torch.strided and not tensor.is_nested

    def _span(self, tensor: torch.Tensor) -> Span | None:
        """Return the memory of a tensor that a launch may touch. Note [Extents]."""
        if not self._counts(tensor) or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        return _extent_of_storage(tensor) if storage._cdata in self._given else _extent(tensor)

    def _is_moving(self, tensor: torch.Tensor) -> bool:
        return self._counts(tensor) and tensor.untyped_storage()._cdata in self._moving

    def _spans_of_live(self, tensors: Iterable[torch.Tensor]) -> tuple[Span, ...]:
        self._note_live(tensors)
        gone = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in gone:
            del self._live[key]
        return tuple(sorted(span for _, span in self._live.values()))

    def _note_live(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self._counts(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live and storage.nbytes():
                self._live[key] = _weak(tensor), _extent_of_storage(tensor)

    def _new_bytes(self, made: Iterable[torch.Tensor]) -> Iterator[int]:
        """Return the sizes of storages that an operator made, rather than was given."""
        found = {one.untyped_storage()._cdata: one.untyped_storage() for one in made if self._counts(one)}
        return (storage.nbytes() for key, storage in found.items() if key not in self._live)

    def _keep(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._counts(tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key in self._kept:
                    self._kept[key] = self._kept.pop(key)  # the latest use counts
                elif key not in self._given and storage.nbytes() <= self._keep_bytes // LEAST_KEPT:
                    self._kept[key] = storage
                    self._kept_now += storage.nbytes()
        while self._kept_now > self._keep_bytes:
            oldest = next(iter(self._kept))
            self._kept_now -= self._kept.pop(oldest).nbytes()
        self.kept_bytes = max(self.kept_bytes, self._kept_now)

    def _keep_workspace(self, size_bytes: int) -> None:
        """Take memory where an operator's workspace lay, so that the next one lies elsewhere."""
        if size_bytes <= self._keep_bytes // LEAST_KEPT:
            self._depth += 1
            try:
                taken = torch.empty(size_bytes, dtype=torch.uint8, device=self._device_type)
            finally:
                self._depth -= 1
            self._keep([taken])


class _NotingKernel:
    """Stands for a Triton kernel in the generated module."""

    def __init__(self, kernel: Any, log: LaunchLog) -> None:
        self._kernel = kernel
        self._log = log
        # A kernel of the program's own may call an argument `in_ptr` and write it.
        is_generated = getattr(kernel, "custom_kernel", True) is False
        self._names = tuple(kernel.triton_meta.get("signature", ())) if is_generated else ()
        self._mutated = frozenset(kernel.mutated_arg_names or ())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        kernel, log = self._kernel, self._log
        if not log.is_noted():
            return kernel.run(*arguments, **keywords)
        reads, writes, barrier = kernel_memory(self._names, arguments, self._mutated)
        return log.note(
            str(kernel.fn.__name__),
            lambda: kernel.run(*arguments, **keywords),
            reads,
            writes,
            barrier,
            is_operator=False,
        )


def kernel_memory(
    names: Sequence[str], arguments: Sequence[Any], mutated: frozenset[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor], str | None]:
    """Return which arguments a Triton kernel reads, which it writes, and why it is a barrier (None: it is none).

    Args:
        names: of its arguments, in order. Inductor's own are `in_ptr0`, `out_ptr0`, `in_out_ptr0`, `ws_ptr0`, ...
        mutated: names that Inductor found to be written.
    """
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for position, value in enumerate(arguments):
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            continue
        if not isinstance(value, torch.Tensor):
            return reads, writes, f"it is given a {type(value).__name__}, which may hold addresses"
        name = names[position] if position < len(names) else ""
        kind = _ARGUMENT.match(name)
        if kind is None:
            return reads, writes, f"the generated code does not name its argument {name or position} as read or written"
        if kind[1] == "in_ptr" and name not in mutated:
            reads.append(value)
        else:
            reads.append(value)
            writes.append(value)
    return reads, writes, None


def operator_memory(
    func: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor], str | None]:
    """Return which tensors an operator reads, which it writes, and why it is a barrier (None: it is none)."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    barrier = None
    name = str(func)
    if func.namespace not in torch_internals.PURE_OPERATORS:
        barrier = "it is a custom operator, which may write what it does not declare"
    elif _POINTERS_IN_DEVICE_MEMORY.search(name):
        barrier = "its library may keep addresses in the memory of the device"
    schema = func._schema.arguments
    for position, argument in enumerate(schema):
        value = keywords.get(argument.name, arguments[position] if position < len(arguments) else None)
        tensors = _tensors_in(value)
        if any(one.layout is not torch.strided or one.is_nested for one in tensors):
            barrier = barrier or "it is given a tensor that is made of others"
            tensors = [one for one in tensors if one.layout is torch.strided and not one.is_nested]
        reads += tensors
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
    return reads, writes, barrier


def _operators(log: LaunchLog) -> Any:
    """Return a dispatch mode that notes PyTorch's operators."""

    class Noting(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keywords = kwargs or {}
            if not log.is_noted():
                return func(*args, **keywords)
            reads, writes, barrier = operator_memory(func, args, keywords)
            return log.note(str(func), lambda: func(*args, **keywords), reads, writes, barrier, is_operator=True)

    return Noting()


def _tensors_in(nest: Any) -> list[torch.Tensor]:
    """Return the tensors of what an operator takes or returns."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, (list, tuple)):
        return []
    return [tensor for one in nest for tensor in _tensors_in(one)]


def _weak(tensor: torch.Tensor) -> Any:
    """Return a weak reference to a storage. While it exists, no other storage has the number of this one."""
    return torch_internals.cudagraph_trees.StorageWeakRef(tensor.untyped_storage())


def _extent_of_storage(tensor: torch.Tensor) -> Span:
    return _span_of(storage_of(tensor))


def _extent(tensor: torch.Tensor) -> Span:
    return _span_of(memory_of(tensor))


def _span_of(memory: MemoryRange) -> Span:
    return memory.address, memory.address + memory.size_bytes


def with_hidden_memory(
    logged: Sequence[Logged],
    graph: CapturedGraph,
    pool: Iterable[Span],
    never_freed: Iterable[Span],
    inputs: Iterable[Span] = (),
) -> list[Launch]:
    """Return the launches with the memory that only the words of their nodes name.

    Args:
        logged: what a `LaunchLog` noted of the capture of `graph`.
        pool: the segments of the graph's memory pool.
        never_freed: blocks of the pool that are in use when the capture ends.
        inputs: the storages of the function's inputs.
    """
    inputs = tuple(inputs)
    segments, blocks = _Spans((*pool, *inputs)), _Spans((*never_freed, *inputs))
    found = []
    for one in logged:
        launch = one.launch
        if launch.barrier is not None or not one.is_operator:
            found.append(launch)
            continue
        nodes = graph.nodes[launch.first : launch.first + launch.count]
        unreadable = next((reason for node in nodes if (reason := _unreadable(node))), None)
        if unreadable is not None:
            found.append(replace(launch, barrier=unreadable))
            continue
        declared, live = _Spans((*launch.reads, *launch.writes)), _Spans(one.live)
        words = [list(_words(node)) for node in nodes]
        if (unnamed := _without_addresses(launch, nodes, words, segments, declared)) is not None:
            found.append(replace(launch, barrier=unnamed))
            continue
        hidden = set()
        for address in chain.from_iterable(words):
            segment = segments.around(address)
            if segment is None or declared.around(address) is not None:
                continue
            span = blocks.around(address) or live.around(address)
            if span is None:
                start, end = live.gap(address, segment)
                if one.own_bytes:
                    start, end = max(start, address - one.own_bytes), min(end, address + one.own_bytes)
                span = start, end
            hidden.add(span)
        found.append(
            replace(launch, reads=(*launch.reads, *hidden), writes=(*launch.writes, *hidden)) if hidden else launch
        )
    return found


def with_moving_inputs(logged: Sequence[Logged], launches: Sequence[Launch], inputs: Sequence[Span]) -> list[Launch]:
    """Return the launches with the inputs that they may share memory with in a later call. Note [Inputs that move].

    Args:
        logged: what was noted of each of `launches`.
        inputs: the storages of the function's inputs.
    """
    given = _Spans(inputs)
    written = {span for one in launches for write in one.writes if (span := given.around(write[0])) is not None}
    found = []
    for one, launch in zip(logged, launches, strict=True):
        if one.writes_moving:
            launch = replace(launch, writes=(*launch.writes, *inputs))
        elif one.is_given_moving and written:
            launch = replace(launch, reads=(*launch.reads, *sorted(written)))
        found.append(launch)
    return found


def _without_addresses(
    launch: Launch, nodes: Sequence[Node], words: Sequence[Sequence[int]], segments: _Spans, declared: _Spans
) -> str | None:
    """Return why the memory of an operator cannot be read from its parameters. Note [Addresses that are no words]."""
    for node, own in zip(nodes, words, strict=True):
        if not any(declared.around(word) or segments.around(word) for word in own):
            return f"no parameter of {getattr(node, 'name', None) or 'its ' + node.kind} is a known address"
    results = _Spans(launch.writes)
    if launch.writes and not any(results.around(word) for word in chain.from_iterable(words)):
        return "no parameter of its kernels is the address of a result"
    return None


def _unreadable(node: Node) -> str | None:
    match node:
        case KernelNode():
            return None
        case MemsetNode():
            return None
        case MemcpyNode(source=source, destination=destination):
            ends = {source.memory, destination.memory}
            return None if ends == {"device"} else f"it copies between {' and '.join(sorted(ends))} memory"
        case _:
            return f"a node of it is of the kind {getattr(node, 'type_name', node.kind)}"


def _words(node: Node) -> Iterator[int]:
    if isinstance(node, KernelNode):
        for parameter in node.parameters:
            for offset in range(0, parameter.size - WORD_BYTES + 1, STEP_BYTES):
                yield int.from_bytes(parameter.data[offset : offset + WORD_BYTES], "little")
    elif isinstance(node, MemsetNode):
        yield node.address
    elif isinstance(node, MemcpyNode):
        yield node.source.address
        yield node.destination.address


class _Spans:
    """Disjoint memory by address. Spans that overlap are joined.

    Spans that only touch are not, as in `graph.memory`: two blocks that adjoin are no conflict.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(spans):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def around(self, address: int) -> Span | None:
        """Return the span in which an address lies."""
        at = bisect_right(self._starts, address) - 1
        return (self._starts[at], self._ends[at]) if at >= 0 and address < self._ends[at] else None

    def gap(self, address: int, within: Span) -> Span:
        """Return what lies between the spans around an address that is in none of them."""
        at = bisect_right(self._starts, address)
        start = self._ends[at - 1] if at else within[0]
        end = self._starts[at] if at < len(self._starts) else within[1]
        return max(start, within[0]), min(end, within[1])
