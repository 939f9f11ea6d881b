"""Decide, once per recording, which updater replaces which pointer and what replay does when an input moves.

Pure: pointer uses, what is available and the user's option go in, an immutable `Plan` comes out. The updaters are the
modules of `optimizations.graph` that `options.Choice` names; each says which pointers it can replace:

* `host`: the node's parameters are set from the host (kernel, memcpy and memset nodes); one driver call per node that
  uses a moved input;
* `prelude`: the kernel node is made device-updatable, and a kernel at the start of the graph writes its parameters from
  the pointer table;
* `ptx`: the node launches a variant of its Triton kernel that reads the pointer from the pointer table itself.

For `prelude` and `ptx` replay writes the pointer table, in one step, whatever the number of nodes.

Note [The rule of auto]. Their costs were measured with `encore micro indirection` on an H200 (recorded in
results/recorded/micro-indirection): a host update takes a driver call per consuming node, and only when an input moved;
a rewritten kernel takes a little in every replay, per kernel; the prelude a few microseconds in every replay, however
many nodes there are; and the table one driver call when an input moved. So up to `AUTO_HOST_NODES` consuming nodes
`auto` takes `host`; beyond, `ptx` for up to `AUTO_PTX_NODES` nodes if all but `AUTO_HOST_NODES` others can have it
(those get `host`); in all other graphs `prelude`, for which `ptx` and then `host` stand in. It is a rule, not a
measurement of the graph at hand.

Note [One updater per node]. A device-updatable node must not be updated from the host as well, so all uses of a node
get the same updater. Where none takes them all, inputs are given up (copied, with the reason) until one does.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from optimizations.graph.pointers import Analysis, PointerUse, Reason, ReasonCode, UseKind
from optimizations.graph.records import WORD_BYTES, CapturedGraph, KernelNode, MemcpyNode, Node, NodePath, format_path
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
"""Inductor names a fused kernel after the operators it came from, a collective next to it among them."""


def is_collective_kernel(name: str) -> bool:
    """Return whether a kernel of this name, mangled or not, works with other processes."""
    return not _OF_INDUCTOR.match(name) and _KERNEL.search(name) is not None


def is_collective_operator(name: str) -> bool:
    """Return whether an operator of this name, without its namespace, works with other processes."""
    return _OPERATOR.search(name) is not None


AUTO_HOST_NODES = 4
"""Up to how many nodes `auto` updates from the host; see Note [The rule of auto]."""

AUTO_PTX_NODES = 16
"""Up to how many kernels `auto` exchanges for rewritten ones."""

ALIGNMENT_BYTES = 16
"""The alignment that kernels chosen for a placeholder may rely on: the widest access is 16 bytes, and Inductor
guards no more."""

TENSOR_MAP_ALIGNMENT_BYTES = 32
"""The alignment that `cuTensorMapEncodeTiled` asks for at most (32 with 32-byte interleave, else 16)."""

LIBRARY_ALIGNMENT_BYTES = 256
"""The alignment that a library's kernel may rely on: cuBLASLt is told the alignment of its operands up to this when
it picks one."""

IN_KERNELS = (UseKind.PARAMETER, UseKind.TENSOR_MAP)
"""Pointers among the parameters of a kernel node."""


@dataclass(frozen=True, slots=True)
class Available:
    """Hold the node updaters and which of them can be used here.

    `off` holds the reason for each updater that cannot be used at all. `ptx` holds, for each kernel node whose PTX is
    at hand, a refusal (or None) per parameter. `appliers` are all updaters, by name.
    """

    off: Mapping[Choice, str]
    ptx: Mapping[NodePath, Sequence[str | None]]
    appliers: Mapping[Choice, PlansNodes]


class PlansNodes(Protocol):
    """Define the part of a node updater that planning uses; `graph.protocol` has the whole interface."""

    @property
    def stand_ins(self) -> Sequence[Choice]:
        """Return the updaters to try, best first, for nodes that this one cannot be used for."""

    def refusal(self, use: PointerUse, available: Available) -> str | None:
        """Return why it cannot replace this pointer; None if it can. Not called for nodes of child graphs."""

    def planned(self, record: Node, node: PlannedNode, slots: Slots) -> PlannedNode:
        """Return what it needs to know of a node to update it. Slots that it asks for are in the pointer table."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Describe a place in the pointer table, `offset_bytes` from its start.

    It holds the address of `input` plus `delta`, or, where `tensor_map` is not None, those 128 bytes with that address
    put in.
    """

    offset_bytes: int
    input: int
    delta: int
    tensor_map: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return WORD_BYTES if self.tensor_map is None else TENSOR_MAP_BYTES


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """Describe a node that gets new addresses, and how. Updaters that need to know more derive from it.

    Attributes:
        applier: the updater that replaces the pointers of this node.
        uses: all pointers that are replaced.
    """

    node: NodePath
    applier: Choice
    uses: tuple[PointerUse, ...]

    @property
    def through_table(self) -> bool:
        """Return whether the node reads its addresses from the pointer table; else the host writes each use."""
        return False


@dataclass(frozen=True, slots=True)
class InputPlan:
    """Hold the plan for one input.

    With reasons it is copied. Else, if it moved to an address that is a multiple of `alignment_bytes`, replay writes
    its slots and sets its nodes; at any other address it is copied for this call.
    """

    input: int
    reasons: tuple[Reason, ...]
    alignment_bytes: int

    @property
    def indirect(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the patch plan of a recording. `fallbacks` says, by node, why an updater tried earlier was not taken."""

    choice: Choice
    inputs: tuple[InputPlan, ...]
    slots: tuple[Slot, ...]
    nodes: tuple[PlannedNode, ...]
    fallbacks: tuple[tuple[NodePath, str], ...]

    @property
    def table_bytes(self) -> int:
        """Return the size of the pointer table in bytes."""
        return sum(slot.size_bytes for slot in self.slots)

    def of(self, applier: Choice) -> tuple[PlannedNode, ...]:
        """Return the nodes of one updater."""
        return tuple(node for node in self.nodes if node.applier is applier)


def make_plan(graph: CapturedGraph, analysis: Analysis, choice: Choice, available: Available) -> Plan:
    """Return the patch plan for `graph`.

    Args:
        graph: the captured graph that will be replayed; the first of the two that were analysed.
        analysis: what `find_pointer_uses` found.
        choice: the user's option.
        available: which updaters can be used, and on which nodes.
    """
    against = {verdict.input: list(verdict.reasons) for verdict in analysis.verdicts}
    if choice is Choice.OFF:
        for reasons in against.values():
            reasons.append(Reason(ReasonCode.OFF, "indirection is switched off"))
    while True:
        uses = _uses_by_node(analysis, against)
        assigned = {
            node: _assign(node, found, order, available) for node, found, order in _orders(uses, choice, available)
        }
        given_up = {index: reason for assignment in assigned.values() for index, reason in assignment.given_up.items()}
        if not given_up:
            return _lay_out(graph, analysis, choice, available, against, uses, assigned)
        for index, message in given_up.items():
            against[index].append(Reason(ReasonCode.NO_APPLIER, message))


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Hold the updater of one node, the reasons against those before it, and inputs to copy where there is none."""

    applier: Choice | None
    fallbacks: tuple[str, ...]
    given_up: Mapping[int, str]


def _uses_by_node(analysis: Analysis, against: Mapping[int, Sequence[Reason]]) -> dict[NodePath, list[PointerUse]]:
    """Return the uses of inputs that have no reason against them."""
    uses = defaultdict(list)
    for use in analysis.uses:
        if not against[use.input]:
            uses[use.node].append(use)
    return dict(uses)


def _orders(
    uses: Mapping[NodePath, Sequence[PointerUse]], choice: Choice, available: Available
) -> Iterable[tuple[NodePath, Sequence[PointerUse], tuple[Choice, ...]]]:
    """Yield each node with its uses and the updaters to try on it, best first. Note [The rule of auto]."""
    order: tuple[Choice, ...]
    if choice is Choice.OFF:
        order = ()
    elif choice is Choice.AUTO:
        order = _order_of_auto(uses, available)
    else:
        order = (choice, *available.appliers[choice].stand_ins)
    for node, found in uses.items():
        yield node, found, order


def _order_of_auto(uses: Mapping[NodePath, Sequence[PointerUse]], available: Available) -> tuple[Choice, ...]:
    """Return the updaters that `auto` tries, best first. Note [The rule of auto]."""
    if len(uses) <= AUTO_HOST_NODES:
        return Choice.HOST, Choice.PTX, Choice.PRELUDE
    without_ptx = sum(any(_refusals(Choice.PTX, found, available)) for found in uses.values())
    if without_ptx <= AUTO_HOST_NODES and len(uses) - without_ptx <= AUTO_PTX_NODES:
        return Choice.PTX, Choice.HOST, Choice.PRELUDE
    return Choice.PRELUDE, Choice.PTX, Choice.HOST


def _assign(node: NodePath, uses: Sequence[PointerUse], order: Sequence[Choice], available: Available) -> _Assignment:
    """Return the first updater that takes every use; if there is none, give up the inputs of uses that none takes.

    Such uses exist then: `ptx` alone answers use by use, the others take all uses of a kernel node or none.
    """
    refusals: dict[Choice, list[str | None]] = {}
    for applier in order:
        refusals[applier] = _refusals(applier, uses, available)
        if not any(refusals[applier]):
            passed = tuple(
                f"{earlier}: {next(refusal for refusal in refusals[earlier] if refusal)}"
                for earlier in order[: order.index(applier)]
            )
            return _Assignment(applier, passed, {})
    given_up = {}
    for index, use in enumerate(uses):
        answers = [(applier, found[index]) for applier, found in refusals.items()]
        if all(answer for _, answer in answers):
            said = "; ".join(f"{applier}: {answer}" for applier, answer in answers)
            given_up[use.input] = f"node {format_path(node)}: {said}"
    return _Assignment(None, (), given_up)


def _refusals(applier: Choice, uses: Sequence[PointerUse], available: Available) -> list[str | None]:
    return [_refusal(applier, use, available) for use in uses]


def _refusal(applier: Choice, use: PointerUse, available: Available) -> str | None:
    """Return why the updater cannot replace this pointer; None if it can."""
    if applier in available.off:
        return available.off[applier]
    if len(use.node) > 1:
        return "the node is in a child graph, whose nodes cannot be updated one by one"
    return available.appliers[applier].refusal(use, available)


def _lay_out(
    graph: CapturedGraph,
    analysis: Analysis,
    choice: Choice,
    available: Available,
    against: Mapping[int, Sequence[Reason]],
    uses: Mapping[NodePath, Sequence[PointerUse]],
    assigned: Mapping[NodePath, _Assignment],
) -> Plan:
    """Return the plan: slots for everything updated through the table, and the nodes of each updater."""
    slots = Slots()
    records = dict(graph.walk())
    nodes = []
    for node, found in uses.items():
        applier = assigned[node].applier
        if applier is not None:
            planned = PlannedNode(node, applier, tuple(found))
            nodes.append(available.appliers[applier].planned(records[node], planned, slots))
    inputs = tuple(
        InputPlan(verdict.input, tuple(against[verdict.input]), _alignment_bytes(verdict.uses, available.ptx.keys()))
        for verdict in analysis.verdicts
    )
    fallbacks = tuple((node, reason) for node, assignment in assigned.items() for reason in assignment.fallbacks)
    return Plan(choice, inputs, tuple(slots.all), tuple(nodes), fallbacks)


def _alignment_bytes(uses: Collection[PointerUse], triton: Collection[NodePath]) -> int:
    """Return the alignment an address of an input needs to be read in place.

    Kernels were chosen for the placeholder, which is aligned to 512 bytes. Inductor's own rely on what it guards. What
    others were chosen for cannot be seen, so they get as much as a library looks at.

    Args:
        uses: where the graph holds the input's address.
        triton: the nodes that launch Triton kernels.
    """
    kinds = {use.kind for use in uses}
    if any(use.kind in IN_KERNELS and use.node not in triton for use in uses):
        return LIBRARY_ALIGNMENT_BYTES
    return TENSOR_MAP_ALIGNMENT_BYTES if UseKind.TENSOR_MAP in kinds else ALIGNMENT_BYTES


class Slots:
    """Collect the slots of a pointer table in order, one for each distinct content."""

    def __init__(self) -> None:
        self.all: list[Slot] = []
        self._end_bytes = 0
        self._known: dict[tuple[int, int, bytes | None], Slot] = {}

    def slot(self, index: int, delta: int, tensor_map: bytes | None = None) -> Slot:
        """Return the slot for the address of input `index` plus `delta`, or for a tensor map of it; see `Slot`."""
        key = (index, delta, tensor_map)
        if key not in self._known:
            slot = self._known[key] = Slot(self._end_bytes, index, delta, tensor_map)
            self.all.append(slot)
            self._end_bytes += slot.size_bytes
        return self._known[key]


def limit(analysis: Analysis, graph: CapturedGraph, aliased: Collection[int], *, tried_out: bool = True) -> Analysis:
    """Return `analysis` with the reasons that follow from the graph as a whole and from its outputs.

    Args:
        graph: the captured graph that will be replayed.
        aliased: inputs that an output shares memory with.
        tried_out: whether the graph would be run to prove what was found.
    """
    analysis = with_reasons(
        analysis,
        ReasonCode.OUTPUT_ALIAS,
        dict.fromkeys(aliased, "an output shares its memory, and must stay valid when the caller's is gone"),
    )
    collective = _collective(graph) if tried_out else None
    if collective is not None:
        reason = f"the graph takes part in a collective ({collective}), so it cannot be tried out on one device alone"
        everyone = dict.fromkeys((verdict.input for verdict in analysis.verdicts), reason)
        analysis = with_reasons(analysis, ReasonCode.COLLECTIVE, everyone)
    return with_reasons(analysis, ReasonCode.NO_APPLIER, dict(_multidimensional_copies(analysis, graph)))


def with_reasons(analysis: Analysis, code: ReasonCode, messages: Mapping[int, str]) -> Analysis:
    """Return `analysis` with one more reason against each of these inputs."""
    verdicts = tuple(
        dataclasses.replace(verdict, reasons=(*verdict.reasons, Reason(code, messages[verdict.input])))
        if verdict.input in messages
        else verdict
        for verdict in analysis.verdicts
    )
    return dataclasses.replace(analysis, verdicts=verdicts)


def _collective(graph: CapturedGraph) -> str | None:
    names = (node.name for _, node in graph.walk() if isinstance(node, KernelNode) and node.name)
    return next((name for name in names if is_collective_kernel(name)), None)


def _multidimensional_copies(analysis: Analysis, graph: CapturedGraph) -> Iterable[tuple[int, str]]:
    """Yield the inputs used by copies that `cuGraphExecMemcpyNodeSetParams` does not take, with the reason."""
    copies = {path: node for path, node in graph.walk() if isinstance(node, MemcpyNode)}
    for use in analysis.uses:
        if use.kind in (UseKind.MEMCPY_SOURCE, UseKind.MEMCPY_DESTINATION):
            copy = copies[use.node]
            if copy.height * copy.depth != 1:
                yield use.input, f"node {format_path(use.node)} copies in several dimensions and cannot be updated"
