"""Add memory that launches access without a tensor argument, found in the captured graph.

Note [Memory that no argument names]. An operator may allocate a workspace and free it again, so that a later tensor
gets the same memory; so may Triton for one launch (its global scratch). Kernels get its address as a parameter. So the
words of each launch's nodes are searched for addresses in the graph's pool that are in none of the launch's tensors
(`with_hidden_memory`).

* If the operator allocated nothing, the address may be in a block that is never freed, such as cuBLAS's workspace.
* Otherwise it stands for the memory around it that no live tensor had at that time, up to the size that the operator
  allocated. The block at this address at the end of the capture counts too: it may be cuBLAS's workspace, or be
  allocated later and smaller than the operator's.
* An address in an input that was not passed to the operator stands for the whole input.

Note [Addresses that are no words]. A kernel may also get addresses in a tensor map with an unknown encoding, or from a
table in GPU memory. The search does not find these. So an operator is a barrier if one of its kernels has no known
address among its parameters, or if no kernel has the address of a result.

Note [Inputs that move]. An input that is not at a fixed address may be read in place, at a new address in each call.
Two inputs that did not overlap in the capture may then share memory. This is a conflict only if a launch writes one of
them. So a launch that writes an input at a fixed address conflicts with each launch that gets a moving input, and a
launch that writes a moving input conflicts with each launch that gets any input (`with_moving_inputs`). After such an
input was freed during the capture, writes to its memory are writes to another tensor.

Note [Memory of live tensors]. The tensors that launches got or made show the live memory around an address. One that
the function has allocated but not used yet is missing, and so is one that may have been freed by then. So the memory
counted as workspace can only be too large. A storage around the address that may have been alive counts whole, too.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from optimizations.concurrency.launch_log import Lifetime, Logged
from optimizations.concurrency.order import Launch, Span
from optimizations.graph.records import CapturedGraph, KernelNode, MemcpyNode, MemsetNode, Node, addresses_between


def with_hidden_memory(
    logged: Sequence[Logged],
    graph: CapturedGraph,
    pool: Iterable[Span],
    never_freed: Iterable[Span],
    inputs: Iterable[Span] = (),
    lifetimes: Iterable[Lifetime] = (),
) -> list[Launch]:
    """Return the launches with the memory that only their nodes' parameters name.

    Args:
        logged: the launches that a `LaunchLog` noted in the capture of `graph`.
        pool: the segments of the graph's memory pool.
        never_freed: blocks of the pool that are in use when the capture ends.
        inputs: the storages of the function's inputs.
        lifetimes: of the storages that the log noted.
    """
    inputs, lives = tuple(inputs), _Lives(lifetimes)
    known = (*pool, *inputs)
    segments, blocks_without = _Spans(known), _without_freed((*never_freed,), inputs)
    declared_spans = chain.from_iterable((*one.launch.reads, *one.launch.writes) for one in logged)
    borders = [*chain.from_iterable((*known, *declared_spans))] or [0]
    words_of = addresses_between(graph.nodes, min(borders), max(borders))
    found = []
    for index, one in enumerate(logged):
        launch = one.launch
        if launch.barrier is not None:
            found.append(launch)
            continue
        nodes = graph.nodes[launch.first : launch.first + launch.count]
        declared, blocks = _Spans((*launch.reads, *launch.writes)), blocks_without(one.freed)
        words = words_of[launch.first : launch.first + launch.count]
        barrier = next((reason for node in nodes if (reason := _unreadable(node))), None)
        if barrier is None and one.is_operator:
            barrier = _without_addresses(launch, nodes, words, segments, declared)
        if barrier is not None:
            found.append(replace(launch, barrier=barrier))
            continue
        hidden = {
            _around(address, one, index, segment, blocks, lives)
            for address in chain.from_iterable(words)
            if (segment := segments.around(address)) is not None and declared.around(address) is None
        }
        found.append(
            replace(launch, reads=(*launch.reads, *hidden), writes=(*launch.writes, *hidden)) if hidden else launch
        )
    return found


def _around(address: int, launch: Logged, index: int, segment: Span, blocks: _Spans, lives: _Lives) -> Span:
    """Return the memory around an address that was not passed. Note [Memory that no argument names]."""
    block, own_bytes = blocks.around(address), launch.own_bytes
    if block is not None and own_bytes == 0:
        return block
    if not launch.is_operator:
        return segment if block is None else _joined([segment, block])
    holding, is_certain = lives.holding(address, index, segment)
    if is_certain:
        return _joined(holding)
    start, end = lives.gap(address, index, segment)
    if own_bytes:
        start, end = max(start, address - own_bytes), min(end, address + own_bytes)
    return _joined([(start, end), *holding, *([block] if block is not None else [])])


def _joined(spans: Sequence[Span]) -> Span:
    return min(start for start, _ in spans), max(end for _, end in spans)


def with_moving_inputs(logged: Sequence[Logged], launches: Sequence[Launch], inputs: Sequence[Span]) -> list[Launch]:
    """Return the launches with the inputs that they may share memory with in a later call. Note [Inputs that move].

    Args:
        logged: the log entries of `launches`.
        inputs: the storages of the function's inputs.
    """
    given_without = _without_freed((), inputs)
    written = {
        span
        for one, launch in zip(logged, launches, strict=True)
        for write in launch.writes
        if (span := given_without(one.freed).around(write[0])) is not None
    }
    found = []
    for one, launch in zip(logged, launches, strict=True):
        if one.writes_moving:
            launch = replace(launch, writes=(*launch.writes, *inputs))
        elif one.is_given_moving and written:
            launch = replace(launch, reads=(*launch.reads, *sorted(written)))
        found.append(launch)
    return found


def _without_freed(blocks: Sequence[Span], inputs: Sequence[Span]) -> Callable[[tuple[Span, ...]], _Spans]:
    """Return a function that gives blocks and inputs without the inputs that were freed."""
    return functools.cache(lambda freed: _Spans((*blocks, *(one for one in inputs if one not in freed))))


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
    if isinstance(node, MemcpyNode):
        ends = {node.source.memory, node.destination.memory}
        return None if ends == {"device"} else f"it copies between {' and '.join(sorted(ends))} memory"
    known = isinstance(node, (KernelNode, MemsetNode))
    return None if known else f"a node of it is of the kind {getattr(node, 'type_name', node.kind)}"


class _Spans:
    """Hold disjoint address ranges. Ranges that overlap are joined.

    Adjacent spans are not joined: two adjacent blocks are no conflict.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._borders: list[int] = []
        for start, end in sorted(spans):
            if self._borders and start < self._borders[-1]:
                self._borders[-1] = max(self._borders[-1], end)
            else:
                self._borders += [start, end]

    def around(self, address: int) -> Span | None:
        """Return the span that contains an address."""
        at = bisect_right(self._borders, address)
        return (self._borders[at - 1], self._borders[at]) if at % 2 else None


class _Lives:
    """Find the storages that were alive at a launch. Note [Lifetimes] in `launch_log`."""

    def __init__(self, lifetimes: Iterable[Lifetime]) -> None:
        self._of: dict[Span, list[Lifetime]] = {}
        for one in sorted(lifetimes, key=lambda one: (one.first, one.last)):  # the last one that began counts
            self._of.setdefault(one.span, []).append(one)
        self._spans = sorted(self._of)

    def holding(self, address: int, index: int, within: Span) -> tuple[list[Span], bool]:
        """Return the storages around an address that may be alive at a launch, and whether one of them certainly is."""
        found, is_certain = list[Span](), False
        for span in reversed(self._spans[: self._after(address)]):
            alive = self._is_alive(span, index)
            if span[0] < within[0] or (alive and span[1] <= address):
                break
            if span[1] > address and alive is not False:
                found.append(span)
                is_certain = is_certain or bool(alive)
        return found, is_certain

    def gap(self, address: int, index: int, within: Span) -> Span:
        """Return the memory between storages that are certainly alive around an address that is in none."""
        at = self._after(address)
        lower = (end for start, end in reversed(self._spans[:at]) if self._is_alive((start, end), index))
        upper = (start for start, end in self._spans[at:] if self._is_alive((start, end), index))
        return max(next(lower, 0), within[0]), min(next(upper, within[1]), within[1])

    def _after(self, address: int) -> int:
        return bisect_right(self._spans, address, key=lambda span: span[0])

    def _is_alive(self, span: Span, index: int) -> bool | None:
        """Return whether a storage is alive at a launch; None if that is not known."""
        lifetimes = self._of[span]
        before = bisect_right(lifetimes, index, key=lambda one: one.first)
        if not before:
            return False
        latest = lifetimes[before - 1]
        if index <= latest.last:
            return True
        return None if latest.gone is None or index < latest.gone else False
