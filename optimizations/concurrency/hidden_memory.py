"""Complete what launches read and write by what their arguments do not say, once the captured graph is there.

Note [Memory that no argument names]. An operator may allocate a workspace and free it again, so that a later tensor
lies there, and so may Triton for one launch (its global scratch). Kernels get its address as a parameter. So when the
graph is there, the words of each launch's nodes are searched for addresses in the graph's pool that none of its tensors
holds (`with_hidden_memory`). An operator that has allocated nothing may use a block that is never freed, as the
workspace of cuBLAS. Else such a word stands for what lies around it, as far as no tensor held it at that time, and not
farther than the operator allocated. The block that is there at the end of the capture counts too: it may be cuBLAS's
workspace, or be made later, and smaller than what the operator had. An address in an input that the operator was not
given stands for the whole input.

Note [Addresses that are no words]. A kernel may get addresses otherwise: in a tensor map whose encoding is not known,
or from a table in the GPU's memory. Then the search finds nothing. So an operator is a barrier if one of its kernels
has no known address among its parameters, or none of them has that of a result.

Note [Inputs that move]. An input that is not at a fixed address may be read in place, and lie elsewhere in each call.
Two inputs that did not overlap when the graph was captured may then share memory. Only a launch that writes an input
can make that a conflict. So a launch that writes an input at a fixed address conflicts with each launch that is given a
moving one, and a launch that writes a moving one conflicts with each launch that is given any input
(`with_moving_inputs`). Once such an input is freed during the capture, what is written in its memory is another tensor.

Note [Memory of live tensors]. What lies around an address is known by the tensors that launches were given or made. A
tensor that the function has allocated and not used yet is not known, so the memory taken for the workspace can only be
too large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from optimizations.concurrency.launch_log import Logged
from optimizations.concurrency.order import Launch, Span
from optimizations.graph.records import CapturedGraph, KernelNode, MemcpyNode, MemsetNode, Node, words_of


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
    segments, blocks_without = _Spans((*pool, *inputs)), _BlocksWithout(never_freed, inputs)
    found = []
    for one in logged:
        launch = one.launch
        if launch.barrier is not None:
            found.append(launch)
            continue
        nodes = graph.nodes[launch.first : launch.first + launch.count]
        declared, blocks = _Spans((*launch.reads, *launch.writes)), blocks_without(one.freed)
        words = [list(words_of(node)) for node in nodes]
        barrier = next((reason for node in nodes if (reason := _unreadable(node))), None)
        if barrier is None and one.is_operator:
            barrier = _without_addresses(launch, nodes, words, segments, declared)
        if barrier is not None:
            found.append(replace(launch, barrier=barrier))
            continue
        hidden = {
            _around(address, one, segment, blocks)
            for address in chain.from_iterable(words)
            if (segment := segments.around(address)) is not None and declared.around(address) is None
        }
        found.append(
            replace(launch, reads=(*launch.reads, *hidden), writes=(*launch.writes, *hidden)) if hidden else launch
        )
    return found


def _around(address: int, launch: Logged, segment: Span, blocks: _Spans) -> Span:
    """Return the memory that an address stands for which was not passed. Note [Memory that no argument names]."""
    block, own_bytes = blocks.around(address), launch.own_bytes
    if block is not None and own_bytes == 0:
        return block
    live = _Spans(launch.live)
    if (tensor := live.around(address)) is not None:
        return tensor
    start, end = live.gap(address, segment)
    if own_bytes:
        start, end = max(start, address - own_bytes), min(end, address + own_bytes)
    return (start, end) if block is None else (min(start, block[0]), max(end, block[1]))


def with_moving_inputs(logged: Sequence[Logged], launches: Sequence[Launch], inputs: Sequence[Span]) -> list[Launch]:
    """Return the launches with the inputs that they may share memory with in a later call. Note [Inputs that move].

    Args:
        logged: what was noted of each of `launches`.
        inputs: the storages of the function's inputs.
    """
    given_without = _BlocksWithout((), inputs)
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


class _BlocksWithout:
    """Give blocks and inputs, but for inputs that were freed."""

    def __init__(self, blocks: Iterable[Span], inputs: Iterable[Span]) -> None:
        self._blocks, self._inputs = tuple(blocks), tuple(inputs)
        self._found: dict[tuple[Span, ...], _Spans] = {}

    def __call__(self, freed: tuple[Span, ...]) -> _Spans:
        if freed not in self._found:
            self._found[freed] = _Spans((*self._blocks, *(one for one in self._inputs if one not in freed)))
        return self._found[freed]


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


class _Spans:
    """Hold disjoint address ranges. Ranges that overlap are joined.

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
