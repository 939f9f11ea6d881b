"""Decide, once per recording, how each node gets new addresses and what replay does when an input moves.

This is a pure function from pointer uses, available updaters and the user's option to an immutable `Plan`. There are
two node updaters:

* `host`: the node's parameters are set from the host (kernel, memcpy and memset nodes); one driver call per node that
  uses a moved input;
* `prelude`: the kernel node is made device-updatable, and a kernel at the start of the graph writes its parameters from
  the pointer table. Replay writes the table, in one step, whatever the number of nodes.

Note [The rule of auto]. The costs were measured with `encore micro indirection` on an H200 (recorded in
results/recorded/micro-indirection). A host update takes a driver call per consuming node, and only when an input moved.
The prelude takes a few microseconds in every replay, independent of the number of nodes, and its table one driver call
when an input moved. So `auto` chooses `host` up to `AUTO_HOST_NODES` consuming nodes and `prelude` beyond, with `host`
as the fallback. The rule does not measure the graph itself. Rewriting Triton kernels to read the table themselves was
measured as well: between 2 and 16 nodes it saved 0.2 to 1.4 us of a replay over the prelude, and took more time beyond.

Note [One updater per node]. A device-updatable node must not be updated from the host as well, so all uses of a node
get the same updater.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from optimizations.graph.pointers import Analysis, PointerUse, Reason, ReasonCode, UseKind
from optimizations.graph.records import WORD_BYTES, CapturedGraph, KernelNode, MemcpyNode
from optimizations.graph.tensor_map import TENSOR_MAP_BYTES
from optimizations.options import Choice as Choice

_KERNEL = re.compile(
    r"nccl|nvshmem|symmetric_?mem|symm_?mem|multimem|nvls|cross_?device|user_?buffers|deep_?ep|msccl"
    r"|quick_?reduce|(?:put|wait)_signal|barrier_kernel"
    r"|all_?(?:reduce|gather|to_?all)|reduce_?scatter",
    re.IGNORECASE,
)
_OPERATOR = re.compile(
    r"nccl|nvshmem|symm_?mem|multimem|cross_?device|all_?(?:reduce|gather|to_?all)|reduce_?scatter|wait_tensor"
    r"|(?:^|_)(?:broadcast|send|recv|isend|irecv|barrier)_?$",
    re.IGNORECASE,
)
_OF_INDUCTOR = re.compile(r"triton_[a-z]+_fused_")
"""Inductor names a fused kernel after its operators, which may include an adjacent collective."""


def is_collective_kernel(name: str) -> bool:
    """Return whether a kernel of this name, mangled or not, communicates with other processes."""
    return not _OF_INDUCTOR.match(name) and _KERNEL.search(name) is not None


def is_collective_operator(name: str) -> bool:
    """Return whether an operator of this name, without its namespace, communicates with other processes."""
    return _OPERATOR.search(name) is not None


AUTO_HOST_NODES = 4
"""Up to how many nodes `auto` updates from the host; see Note [The rule of auto]."""

ALIGNMENT_BYTES = 16
"""The alignment that kernels chosen for a placeholder may rely on: the widest access is 16 bytes, and Inductor
guards no more."""

TENSOR_MAP_ALIGNMENT_BYTES = 32
"""The largest alignment that `cuTensorMapEncodeTiled` requires (32 with 32-byte interleave, else 16)."""

LIBRARY_ALIGNMENT_BYTES = 256
"""The alignment that a library's kernel may rely on: cuBLASLt considers the alignment of operands up to this when it
picks a kernel."""

IN_KERNELS = (UseKind.PARAMETER, UseKind.TENSOR_MAP)
"""Pointers among the parameters of a kernel node."""


@dataclass(frozen=True, slots=True)
class Available:
    """Hold the updaters that can be used on the nodes of one graph.

    Attributes:
        triton: the nodes that launch Triton kernels.
        against_prelude: returns why the graph cannot have a prelude, None if it can. It may compile kernels.
    """

    triton: frozenset[int] = frozenset()
    against_prelude: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Slot:
    """Describe a place in the pointer table, `offset_bytes` from its start.

    It holds the address of `input` plus `delta`; or, if `tensor_map` is not None, these 128 bytes with that address
    inserted.
    """

    offset_bytes: int
    input: int
    delta: int
    tensor_map: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return WORD_BYTES if self.tensor_map is None else TENSOR_MAP_BYTES


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """Describe that the prelude writes `slot` at `buffer_offset` bytes into the node's parameter buffer."""

    buffer_offset: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """Describe a node that gets new addresses, and how.

    Attributes:
        updater: the updater that replaces the pointers of this node.
        uses: all pointers that are replaced.
        updates: the prelude's writes; none if the host writes each use.
    """

    node: int
    updater: Choice
    uses: tuple[PointerUse, ...]
    updates: tuple[ParameterUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class InputPlan:
    """Hold the plan for one input.

    With reasons it is copied. Otherwise, if it moved to an address that is a multiple of `alignment_bytes`, replay
    writes its slots and sets its nodes; at any other address it is copied for this call.
    """

    input: int
    reasons: tuple[Reason, ...]
    alignment_bytes: int

    @property
    def indirect(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the patch plan of a recording. `fallbacks`: by node, why a prelude does not update it."""

    inputs: tuple[InputPlan, ...]
    slots: tuple[Slot, ...]
    nodes: tuple[PlannedNode, ...]
    fallbacks: tuple[tuple[int, str], ...]

    def of(self, updater: Choice) -> tuple[PlannedNode, ...]:
        """Return the nodes of one updater."""
        return tuple(node for node in self.nodes if node.updater is updater)


def make_plan(graph: CapturedGraph, analysis: Analysis, choice: Choice, available: Available) -> Plan:
    """Return the patch plan for `graph`.

    Args:
        graph: the captured graph that will be replayed; the first of the two that were analysed.
        analysis: the result of `find_pointer_uses`.
        choice: the user's option.
        available: the updaters that can be used on its nodes.
    """
    against = {verdict.input: list(verdict.reasons) for verdict in analysis.verdicts}
    if choice is Choice.OFF:
        for reasons in against.values():
            reasons.append(Reason(ReasonCode.OFF, "indirection is switched off"))
    uses: dict[int, list[PointerUse]] = defaultdict(list)
    for use in analysis.uses:
        if not against[use.input]:
            uses[use.node].append(use)
    wants_prelude = choice is Choice.PRELUDE or (choice is Choice.AUTO and len(uses) > AUTO_HOST_NODES)
    nodes, fallbacks = [], []
    slots: dict[tuple[int, int, bytes | None], Slot] = {}
    for node, found in uses.items():
        refusal = _against_prelude(found, available) if wants_prelude else None
        record = graph.nodes[node]
        if wants_prelude and refusal is None and isinstance(record, KernelNode):
            updates = tuple(_update(record, use, slots) for use in found)
            nodes.append(PlannedNode(node, Choice.PRELUDE, tuple(found), updates))
        else:
            nodes.append(PlannedNode(node, Choice.HOST, tuple(found)))
        if refusal is not None:
            fallbacks.append((node, f"{Choice.PRELUDE}: {refusal}"))
    inputs = tuple(
        InputPlan(verdict.input, tuple(against[verdict.input]), _alignment_bytes(verdict.uses, available.triton))
        for verdict in analysis.verdicts
    )
    return Plan(inputs, tuple(slots.values()), tuple(nodes), tuple(fallbacks))


def _against_prelude(uses: Iterable[PointerUse], available: Available) -> str | None:
    """Return why a prelude cannot replace these pointers of one node; None if it can."""
    if any(use.kind not in IN_KERNELS for use in uses):
        return "only kernel nodes can be updated from the device"
    return available.against_prelude()


def _update(record: KernelNode, use: PointerUse, slots: dict[tuple[int, int, bytes | None], Slot]) -> ParameterUpdate:
    """Return the prelude's writes for a use. Each distinct content has one slot, in order."""
    parameter = record.parameters[use.parameter]
    window = parameter.data[use.byte_offset : use.byte_offset + TENSOR_MAP_BYTES]
    key = (use.input, use.delta, window if use.kind is UseKind.TENSOR_MAP else None)
    if key not in slots:
        last = next(reversed(slots.values()), None)
        slots[key] = Slot(last.offset_bytes + last.size_bytes if last is not None else 0, *key)
    return ParameterUpdate(parameter.offset + use.byte_offset, slots[key])


def _alignment_bytes(uses: Collection[PointerUse], triton: Collection[int]) -> int:
    """Return the alignment that an input's address needs to be read in place.

    Kernels were chosen for the placeholder, which is aligned to 512 bytes. Inductor's own rely on the alignment that it
    guards. The assumptions of other kernels are unknown, so they get the largest alignment that a library checks.

    Args:
        uses: the places in the graph that hold the input's address.
        triton: the nodes that launch Triton kernels.
    """
    kinds = {use.kind for use in uses}
    if any(use.kind in IN_KERNELS and use.node not in triton for use in uses):
        return LIBRARY_ALIGNMENT_BYTES
    return TENSOR_MAP_ALIGNMENT_BYTES if UseKind.TENSOR_MAP in kinds else ALIGNMENT_BYTES


def limit(analysis: Analysis, graph: CapturedGraph, aliased: Collection[int]) -> Analysis:
    """Return `analysis` with the reasons that follow from the graph as a whole and from its outputs.

    Args:
        graph: the captured graph that will be replayed.
        aliased: inputs that an output shares memory with.
    """
    analysis = with_reasons(
        analysis,
        ReasonCode.OUTPUT_ALIAS,
        dict.fromkeys(aliased, "an output shares its memory, and must stay valid when the caller's is gone"),
    )
    return with_reasons(analysis, ReasonCode.NO_UPDATER, dict(_multidimensional_copies(analysis, graph)))


def with_reasons(analysis: Analysis, code: ReasonCode, messages: Mapping[int, str]) -> Analysis:
    """Return `analysis` with one more reason against each of these inputs."""
    verdicts = tuple(
        dataclasses.replace(verdict, reasons=(*verdict.reasons, Reason(code, messages[verdict.input])))
        if verdict.input in messages
        else verdict
        for verdict in analysis.verdicts
    )
    return dataclasses.replace(analysis, verdicts=verdicts)


def _multidimensional_copies(analysis: Analysis, graph: CapturedGraph) -> Iterable[tuple[int, str]]:
    """Yield the inputs used by copies that `cuGraphExecMemcpyNodeSetParams` does not take, with the reason."""
    for use in analysis.uses:
        copy = graph.nodes[use.node]
        if isinstance(copy, MemcpyNode) and copy.height * copy.depth != 1:
            yield use.input, f"node {use.node} copies in several dimensions and cannot be updated"
